"""A fleet of somebody else's servers grows and shrinks while a run goes on: a server more, and one less, under
load."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from tests.harness.commands import Command
from tests.harness.fake_sglang import STAND_IN
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import Job, audit, events, make_job
from tests.harness.waiting import wait_until

from myxa.launch.control.client import ControlClient

pytestmark = pytest.mark.timeout(300)


@pytest.mark.soak
def test_a_server_comes_and_the_first_one_goes(tmp_path: Path):
    job = make_job(tmp_path)
    flags = ('roles.rollout.kind="sglang"', "run.num_steps=100000", "async.max_staleness=8", *job.paced())
    (first, first_process), (second, second_process) = start_server(job), start_server(job)
    wait_until(lambda: listens(first) and listens(second), "the servers")
    with first_process, second_process, job.start(*flags, f'engine.attach=["{first}"]') as run:
        wait_until(lambda: job.has("control.json"), "the control socket")
        run_dir = job.run_dir()
        client = ControlClient.of(run_dir)
        wait_until(lambda: (run_dir / "ledger.sqlite").exists() and bool(events(run_dir, "engine-joined")), "an engine")
        goes_on(run_dir)
        more = client.ask("scale", 120, role="rollout", count=2, attach=second, wait_s=100)
        assert more["is_done"], more
        wait_until(
            lambda: any(e["source"] == "rollout/1" for e in events(run_dir, "weights-adopted")), "weights for it"
        )
        goes_on(run_dir)
        assert client.ask("drain", 120, target="rollout/0", wait_s=100)["is_done"]
        first_process.terminate()
        goes_on(run_dir)
        client.ask("down")
        said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    report = audit_ledger(run_dir / "ledger.sqlite")
    assert report.problems == ()
    assert set(report.trained.values()) == {1}
    assert not report.dropped, "nobody was told of an error"


def goes_on(run_dir: Path, num_steps: int = 3) -> None:
    before = len(audit(run_dir).trained)
    wait_until(lambda: len(audit(run_dir).trained) >= before + 4 * num_steps, f"{num_steps} more steps")


def start_server(job: Job) -> tuple[str, Command]:
    """Its address, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        "--model-path", str(job.folder / "model"), "--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init",
        "--incremental-streaming-output", "--dtype", "float32", "--max-running-requests", "32", "--stream-interval", "4",
        "--random-seed", str(port),
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(STAND_IN)}
    with (job.folder / f"server.{port}.log").open("w") as out:
        process = Command(words, job.folder, env=env, log=out, program=STAND_IN / "sglang" / "launch_server.py")
    return f"http://127.0.0.1:{port}", process


def listens(url: str) -> bool:
    """Whether a server accepts connections: a run waits some seconds only for one that does not."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
