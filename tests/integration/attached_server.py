"""SGLang servers that a run does not launch, for tests that attach to them: tests/harness/stand_in."""

from __future__ import annotations

import os
import socket

from tests.harness.commands import Command
from tests.harness.fake_sglang import STAND_IN
from tests.harness.run_job import Job


def start_server(job: Job, *more: str) -> tuple[str, Command]:
    """Its address, and its process. `more`: flags."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        "--model-path", str(job.folder / "model"), "--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init",
        "--incremental-streaming-output", "--dtype", "float32", "--max-running-requests", "32", "--stream-interval", "4",
        "--random-seed", str(port), *more,
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
