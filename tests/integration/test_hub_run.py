"""A run whose model and data are named as on the hub: two nodes with a cache each, then without the hub."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.commands import Command, run
from tests.harness.hub import Hub
from tests.harness.run_job import make_job
from tests.harness.waiting import wait_until

from myxa.core.config import load_config
from myxa.launch.run_dir import RunDir

pytestmark = pytest.mark.timeout(150)

SETS = (
    "model.path=acme/policy", "data.train=acme/rows", "run.num_steps=2", "trainer.checkpoint_every=1",
    "roles.rollout.nodes=[0, 1]", 'weights.channel="disk"', "run.dir=runs",
)  # fmt: skip


def test_each_node_fetches_the_commit_of_node_0_and_the_run_goes_on_without_the_hub(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    hub, flags = Hub(), [part for item in SETS for part in ("--set", item)]
    model = hub.add_folder("models", "acme/policy", tmp_path / "model")
    rows = hub.add("datasets", "acme/rows", {"prompts.jsonl": (tmp_path / "data" / "prompts.jsonl").read_bytes()})
    meeting = ("--nnodes", "2", "--rdzv-file", str(tmp_path / "rdzv"), "--job-key", str(tmp_path / "job.key"))
    homes = [tmp_path / f"home.{node}" for node in range(2)]
    launchers: list[Command] = []
    with hub.serving():
        for node, more in enumerate((("--rdzv", "127.0.0.1:0"), ())):
            words = ("launch", str(tmp_path / "run.toml"), *flags, *meeting, *more, "--node-rank", str(node))
            with (tmp_path / f"said.{node}").open("w") as log:
                env = hub.env(homes[node])
                launchers.append(Command(words, tmp_path, log=log, env=env))
        try:
            ends = [launcher.wait(100) for launcher in launchers]
        finally:
            for launcher in launchers:
                if launcher.poll() is None:
                    launcher.kill()
    said = [(tmp_path / f"said.{node}").read_text() for node in range(2)]
    assert ends == [0, 0], said
    for node, text in enumerate(said):
        assert ("fetching" in text) and "%|" not in text, "a log has no progress bars"
        snapshots = {path.name for path in homes[node].glob("hub/models--acme--policy/snapshots/*")}
        assert snapshots == {model.commit}
    assert not list(homes[1].glob("hub/datasets--*")), "rows are read where the buffer is"
    frozen = load_config(RunDir(job.run_dir()).config)
    assert frozen.model.path == f"hf://acme/policy@{model.commit}"
    assert frozen.data.train == f"hf://datasets/acme/rows@{rows.commit}/prompts.jsonl"

    first, alone = str(job.run_dir()), ("--no-start", "--set", "roles.rollout.nodes=[0]")
    env = hub.env(homes[0], HF_HUB_OFFLINE="1")
    forked = run("fork", first, *alone, "--name", "twin", folder=tmp_path, env=env)
    assert forked.returncode == 0, forked.stderr
    assert load_config(RunDir(job.run_dir()).config).model.path == frozen.model.path
    nowhere = run("fork", first, *alone, folder=tmp_path, env=hub.env(tmp_path / "none", HF_HUB_OFFLINE="1"))
    assert nowhere.returncode == 2 and "is not whole in the cache" in nowhere.stderr


def test_plan_of_a_large_model_reads_its_config_alone(tmp_path: Path) -> None:
    make_job(tmp_path)
    hub, gib = Hub(), 1 << 30
    hub.add_folder("models", "acme/policy", tmp_path / "model", sizes={"model.safetensors": gib})
    hub.add("datasets", "acme/rows", {"rows.parquet": b"PAR1"}, sizes={"rows.parquet": 2 * gib})
    flags = ("--set", "model.path=acme/policy", "--set", "data.train=acme/rows", "--json")
    with hub.serving():
        done = run("plan", "run.toml", *flags, folder=tmp_path, env=hub.env(tmp_path / "home"))
        told = json.loads(done.stdout)
        hub.repos["models", "acme/policy"].status = 403
        gated = run("plan", "run.toml", *flags, folder=tmp_path, env=hub.env(tmp_path / "other"))
    assert done.returncode == 0, done.stdout
    assert [(one["key"], one["num_bytes"]) for one in told["downloads"]] == [
        ("model.path", gib),
        ("data.train", 2 * gib),
    ]
    assert told["num_parameters"] and told["batch"] and told["problems"] == []
    assert not [one for one in hub.asked if one.startswith("GET") and one.endswith((".safetensors", ".parquet"))]
    (problem,) = [one for one in json.loads(gated.stdout)["problems"] if one["severity"] == "error"]
    assert gated.returncode == 2 and problem["key"] == "model.path" and "is gated" in problem["message"]


def test_ctrl_c_waits_for_no_download(tmp_path: Path) -> None:
    make_job(tmp_path)
    hub = Hub()
    hub.add("models", "acme/slow", {"config.json": b"{}", "model.safetensors": bytes(8 << 20)}, pause_s=0.5)
    words = (sys.executable, "-m", "myxa", "up", "run.toml", "--set", "model.path=acme/slow")
    with hub.serving():
        up = subprocess.Popen(words, cwd=tmp_path, env=hub.env(tmp_path / "home"), stdout=subprocess.DEVNULL)
        try:
            wait_until(lambda: any(re.match("GET .*safetensors", one) for one in hub.asked), "the download")
            up.send_signal(signal.SIGINT)
            assert up.wait(10) == 130
        finally:
            up.kill()
            up.wait()
    assert not (tmp_path / "runs").exists()
