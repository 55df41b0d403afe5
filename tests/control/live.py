"""A live run for a module of tests, and commands on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.commands import Command, run
from tests.harness.run_job import Job, make_job, newest_step
from tests.harness.waiting import wait_until

ENDLESS = ("run.num_steps=1000000", 'eval.data="data/heldout.jsonl"')


@dataclass(frozen=True)
class Live:
    """The run, and its folder."""

    job: Job
    launcher: subprocess.Popen[str]
    fixed: Path | None = None
    """Its directory, where others are made beside it; else the newest."""

    @property
    def run_dir(self) -> Path:
        return self.fixed or self.job.run_dir()

    def myxa(
        self, *arguments: str, timeout_s: float = 100, folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """One command, in the job's folder."""
        return run(*arguments, folder=folder or self.job.folder, timeout_s=timeout_s)

    def ask(self, *arguments: str) -> Any:
        """One command's answer as JSON; it must be done."""
        done = self.myxa(*arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def shell(self, line: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
        """A line of shell with `myxa` on its path."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, timeout=timeout_s, check=False,
            cwd=self.job.folder, env={**os.environ, "PATH": path},
        )  # fmt: skip


@contextmanager
def live_run(
    folder: Path, *overrides: str, steps: int = 3, words: Sequence[str] = (), files: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Live]:  # fmt: skip
    """Until the block ends; ready when so many steps were made, or (-1) at once. `files`: of its folder."""
    job = make_job(folder)
    job.be_patient(1.0)
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    launcher = Command([*job.words(*ENDLESS, *overrides), *words], folder, env=env)
    live = Live(job, launcher)
    try:
        wait_until(lambda: is_spoken_to(live) and (steps < 0 or made_steps(live, steps)), f"{steps} steps")
        yield live
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGINT)
        try:
            output, _ = launcher.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            launcher.kill()
            output, _ = launcher.communicate()
        print(output[-3000:])


def is_spoken_to(live: Live) -> bool:
    """Whether its control sockets are there, which is long before its first step."""
    assert live.launcher.poll() is None, live.launcher.communicate()[0]
    return live.job.has("control.json")


def made_steps(live: Live, steps: int) -> bool:
    assert live.launcher.poll() is None, live.launcher.communicate()[0]
    return newest_step(live.job) >= steps
