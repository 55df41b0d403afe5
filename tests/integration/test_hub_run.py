"""A run whose model and data are named as on the hub: two nodes with a cache each, then without the hub."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.harness.commands import Command, run
from tests.harness.hub import Asker, Hub
from tests.harness.run_job import make_job
from tests.harness.waiting import wait_until

from myxa.actors.hub import LOOK_BYTES
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


MIB = 1 << 20
TOY = Path(__file__).parents[1] / "launch"


@contextmanager
def two_nodes(tmp_path: Path, slow: int, pause_s: float, wait_s: int) -> Iterator[tuple[Path, list[Command]]]:
    """Toys, of which one node has to fetch the model first, with a pause after each 16 KiB."""
    hub, launchers = Hub(), list[Command]()
    repo = hub.add("models", "acme/large", {"config.json": b"{}", "model.safetensors": bytes(80 * MIB)})
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "toy"\n[model]\npath = "hf://acme/large"\n[data]\ntrain = "d.jsonl"\n'
    )
    homes = [tmp_path / f"home.{node}" for node in range(2)]
    with hub.serving(), Asker(hub, homes[1 - slow]) as asker:
        asker.fetched(model="hf://acme/large")
        repo.pause_s = pause_s
        meeting = ("--nnodes", "2", "--rdzv-file", str(tmp_path / "rdzv"), "--job-key", str(tmp_path / "job.key"),
                   "--rdzv-timeout", str(wait_s), "--lost-timeout", "5", "--program", "toy_program:build",
                   "--set", "roles.rollout.nodes=[0, 1]", "--set", 'run.dir="runs"')  # fmt: skip
        try:
            for node, more in enumerate((("--rdzv", "127.0.0.1:0"), ())):
                words = ("launch", str(tmp_path / "run.toml"), *meeting, *more, "--node-rank", str(node))
                with (tmp_path / f"said.{node}").open("w") as log:
                    env = hub.env(homes[node], PYTHONPATH=str(TOY))
                    launchers.append(Command(words, tmp_path, log=log, env=env))
            yield homes[slow], launchers
        finally:
            for launcher in launchers:
                if launcher.poll() is None:
                    launcher.kill()
                    launcher.wait(30)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_node_is_waited_for_while_its_download_goes_on(tmp_path: Path, slow: int) -> None:
    began_s = time.monotonic()
    with two_nodes(tmp_path, slow, 0.003, 12) as (_, launchers):  # 10 MiB, which are news, take two seconds
        logs = tmp_path / "runs" / "latest" / "logs"

        def is_up() -> bool:
            return (
                "serves as" in (logs / "rollout.1.0.log").read_text() if (logs / "rollout.1.0.log").exists() else False
            )

        wait_until(lambda: is_up() or any(one.poll() is not None for one in launchers), "the actors")
        said = [(tmp_path / f"said.{node}").read_text() for node in range(2)]
        assert is_up(), said
        assert time.monotonic() - began_s > 14, "longer than --rdzv-timeout"
        assert ("node 0 is not ready", "node 1 (")[slow] in said[1 - slow], said[1 - slow]
        (logs.parent / "finish").touch()
        assert [one.wait(60) for one in launchers] == [0, 0]


def test_a_node_whose_download_stands_still_is_given_up(tmp_path: Path) -> None:
    with two_nodes(tmp_path, 1, 3600.0, 10) as (home, launchers):
        wait_until(lambda: any(home.glob("hub/*/blobs/*.incomplete")), "the download")
        assert launchers[0].wait(60) == 3
        assert "1 of 2 nodes did not join" in (tmp_path / "said.0").read_text()
        assert launchers[1].wait(60) != 0, "it learns that the run is over"


def test_plan_of_a_large_model_reads_its_config_alone(tmp_path: Path) -> None:
    make_job(tmp_path)
    hub, size = Hub(), LOOK_BYTES + 1
    hub.add_folder("models", "acme/policy", tmp_path / "model", sizes={"model.safetensors": size})
    hub.add("datasets", "acme/rows", {"rows.parquet": b"PAR1"}, sizes={"rows.parquet": size + 1})
    flags = ("--set", "model.path=acme/policy", "--set", "data.train=acme/rows", "--json")
    with hub.serving():
        done = run("plan", "run.toml", *flags, folder=tmp_path, env=hub.env(tmp_path / "home"))
        told = json.loads(done.stdout)
        hub.repos["models", "acme/policy"].status = 403
        gated = run("plan", "run.toml", *flags, folder=tmp_path, env=hub.env(tmp_path / "other"))
    assert done.returncode == 0, done.stdout
    assert [(one["key"], one["num_bytes"]) for one in told["downloads"]] == [
        ("model.path", size),
        ("data.train", size + 1),
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
            assert up.wait(60) == 130
        finally:
            up.kill()
            up.wait()
    assert not (tmp_path / "runs").exists()
