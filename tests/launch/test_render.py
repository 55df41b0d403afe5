"""`myxa render`: what it prints is a batch script that bash reads, manifests that Kubernetes' schema takes, and a
compose file of all nodes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from myxa.launch.cli import main
from myxa.transport.node import JobKey

ROOT = Path(__file__).parents[2]
RUN = """
[run]
name = "two_nodes"
[model]
path = "model"
[data]
train = "train.jsonl"
[roles.trainer]
kind = "megatron"
devices = "0-7"
count = 8
[roles.rollout]
kind = "sglang"
nodes = [1, 2]
devices = "0-3"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["render", *words]) == 0
    return capsys.readouterr().out


def test_a_batch_script(run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    text = rendered(capsys, "slurm", str(run_file), "--set", "run.seed=3", "--time", "01:00:00")
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=3", "--gres=gpu:8", "--time=01:00:00", "--signal=TERM@120", "--job-name=two-nodes"} <= set(options)
    stand_in = tmp_path / "bin" / "srun"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    (tmp_path / "job").write_text(text)
    env = {"PATH": f"{stand_in.parent}:/bin:/usr/bin", "SLURM_SUBMIT_DIR": "/there", "SLURM_JOB_ID": "7"}

    def started(*words: str) -> str:
        done = subprocess.run(
            ["bash", "job", *words], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout

    tail = "--rdzv-file /there/rdzv-7 --finish-timeout 100\n"
    first = f"--kill-on-bad-exit=1 myxa launch {run_file} --set run.seed=3 --set run.name=two_nodes-7 {tail}"
    assert started() == first
    assert started("runs/latest") == f"--kill-on-bad-exit=1 myxa resume runs/latest {tail}"

    def make_run(name: str, checkpoint: str) -> None:
        (tmp_path / "runs" / name / "checkpoints" / checkpoint).mkdir(parents=True)

    make_run("two_nodes-6-20260101-000000", "version_00000004")
    make_run("two_nodes-7-20260101-000000", "")
    assert started() == first, "no checkpoint of this job is there"
    for version in ("version_00000002", "version_00000004"):
        make_run("two_nodes-7-20260101-000001", version)
    again = f"--kill-on-bad-exit=1 myxa resume runs/two_nodes-7-20260101-000001 {tail}"
    assert started() == again, "as a job that Slurm has put into the queue again"


def test_manifests(run_file: Path, capsys: pytest.CaptureFixture[str]):
    parts = list(
        yaml.safe_load_all(rendered(capsys, "k8s", str(run_file), "--image", "reg/myxa:1", "--volume", "data"))
    )
    for part in parts:
        kubernetes_validate.validate(part, "1.30", strict=True)
    service, job = parts
    spec: Any = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    assert container["image"] == "reg/myxa:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert f"myxa launch {run_file} --nnodes 3 --node-rank $JOB_COMPLETION_INDEX" in container["args"][0]
    assert "--rdzv two-nodes-0.two-nodes:29400" in container["args"][0]
    assert pod["subdomain"] == service["metadata"]["name"] == "two-nodes"
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    claims = [
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert claims == ["data"]


def test_a_compose_file(run_file: Path, capsys: pytest.CaptureFixture[str]):
    services = yaml.safe_load(rendered(capsys, "compose", str(run_file)))["services"]
    assert list(services) == ["node0", "node1", "node2"]
    for rank, service in enumerate(services.values()):
        assert f"--nnodes 3 --node-rank {rank} --rdzv node0:29400" in service["command"]
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert devices == {"driver": "nvidia", "count": 8, "capabilities": ["gpu"]}


@pytest.mark.parametrize("kind", ["k8s", "compose"])
def test_the_command_for_the_nodes_key_makes_one(
    kind: str, run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    (line,) = [line for line in rendered(capsys, kind, str(run_file)).splitlines() if "> job.key" in line]
    command = f"umask 077; {line.lstrip('# ').replace('python', sys.executable, 1)}"
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    assert JobKey.load(tmp_path / "job.key").public


@pytest.mark.parametrize("kind", ["k8s", "compose"])
def test_a_value_with_marks_of_yaml_and_variables_arrives(
    kind: str, run_file: Path, capsys: pytest.CaptureFixture[str]
):
    system = "data.system=Answer: a # b, it's $(date) $5"
    text = rendered(capsys, kind, str(run_file), "--set", system)
    if kind == "k8s":
        job = next(one for one in yaml.safe_load_all(text) if one["kind"] == "Job")
        command = job["spec"]["template"]["spec"]["containers"][0]["args"][0]
    else:
        command = yaml.safe_load(text)["services"]["node0"]["command"]
    assert system in shlex.split(command.replace("$$", "$"))
    assert "$" not in command.replace("$$", "").replace("$JOB_COMPLETION_INDEX", "")


def test_a_run_without_gpus_asks_for_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("cpu.toml").write_text('[run]\nname = "small"\n[model]\npath = "m"\n[data]\ntrain = "t.jsonl"\n')
    for kind in ("slurm", "k8s", "compose"):
        assert "gpu" not in rendered(capsys, kind, "cpu.toml").lower()


def test_a_name_that_no_object_may_have_is_refused(run_file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["render", "k8s", str(run_file), "--set", "run.name=my run!"]) == 2
    assert 'run.name = "my run!"' in capsys.readouterr().err.replace("'", '"')


def test_the_example_is_what_render_prints(capsys: pytest.CaptureFixture[str]):
    folder = ROOT / "examples" / "slurm"
    text = rendered(capsys, "slurm", str(folder / "run.toml")).replace(str(folder / "run.toml"), "run.toml")
    assert (folder / "job.sbatch").read_text() == text
