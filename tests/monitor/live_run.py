"""A real run that goes on while a test asks it questions."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.commands import Command, run
from tests.harness.run_job import Job
from tests.harness.waiting import wait_until

from myxa.core.errors import MyxaError
from myxa.launch.control.client import ControlClient

START_S = 180.0
END_S = 90.0


@contextmanager
def live(job: Job, *overrides: str, program: str = "", env: dict[str, str] | None = None) -> Generator[ControlClient]:
    """Start the job, wait for its first version, end it in good order afterwards."""
    words = [*job.words("run.num_steps=100000", *overrides), "--quiet"]
    words += ["--program", program] if program else []
    log = job.folder / "printed.txt"
    with log.open("w") as file:
        process = Command(words, job.folder, has_session=True, log=file, env=env)
    try:
        client = _client(job, process, log)
        wait_until(lambda: _version(client) >= 1, lambda: f"no step was made\n{log.read_text()}", START_S)
        yield client
        assert process.poll() is None, log.read_text()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def myxa(client: ControlClient, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command, as a person types it."""
    return run(*words, "--run", str(client.run_dir), folder=cwd, timeout_s=120)


def _client(job: Job, process: subprocess.Popen[Any], log: Path) -> ControlClient:
    found: list[ControlClient] = []

    def is_there() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            found.append(ControlClient.of(job.run_dir()))
        except (MyxaError, OSError, ValueError):
            return False
        return True

    wait_until(is_there, lambda: f"the run opened no control socket\n{log.read_text()}", START_S)
    return found[-1]


def _version(client: ControlClient) -> int:
    try:
        told = client.ask("status")
    except MyxaError:
        return -1
    return int(told["status"]["version"]) if told["status"] else -1
