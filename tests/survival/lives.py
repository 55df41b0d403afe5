"""A run that is killed as a whole, again and again, and goes on each time by `myxa resume`; and what its ledger says.

The data is gone through once, so that the prompts that are trained on are known beforehand: each of them, once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.harness.commands import Command
from tests.harness.run_job import PATIENT, Job, make_job, metrics
from tests.harness.waiting import wait_until

NUM_PROMPTS, BATCH = 64, 4


@dataclass(frozen=True)
class Consumed:
    """What became of the prompts, by the ledger alone."""

    draws: Counter[int]
    """Draw of the prompt source -> how many groups of it count as trained."""
    steps: Counter[int]
    """Step -> groups that it was made of."""
    net: Counter[int]
    """Group -> times that it was trained, less those that were undone; only where that is not once."""


def consumed(run_dir: Path) -> Consumed:
    """Read the ledger from outside, by plain SQL."""
    with contextlib.closing(sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
        trained = "state IN ('TRAINED', 'DURABLE')"
        draws = Counter(draw for (draw,) in db.execute(f"SELECT draw FROM groups WHERE {trained}"))
        steps = Counter(step for (step,) in db.execute(f"SELECT step FROM groups WHERE {trained}"))
        told = db.execute(
            "SELECT t.group_id, SUM(t.to_state = 'TRAINED') - SUM(t.from_state IN ('TRAINED', 'DURABLE') "
            f"AND t.to_state = 'READY') FROM transitions t JOIN groups g USING(group_id) WHERE g.{trained} GROUP BY 1"
        )
        return Consumed(draws, steps, Counter({group: count for group, count in told if count != 1}))


@dataclass
class Lives:
    """One run through its lives. Made by `begin`."""

    job: Job
    overrides: tuple[str, ...] = ()
    launcher: Command | None = None
    run_dir: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    """Variables of its commands, beside ours."""
    said: list[str] = field(default_factory=list)
    """What each life printed."""

    def begin(self) -> None:
        """The first life; returns once its directory is there."""
        self.launcher = Command(self.job.words(*FLAGS, *self.overrides), self.job.folder, env=self._env())
        wait_until(lambda: self._has_begun(), "the run's directory")
        self.run_dir = self.job.run_dir()

    def _has_begun(self) -> bool:
        assert self.launcher is not None
        assert self.launcher.poll() is None, self.launcher.communicate()[0]
        return any((self.job.folder / "runs").glob("small-*/config.toml"))

    def resume(self, *arguments: str) -> None:
        """The next life begins."""
        assert self.run_dir is not None
        self.launcher = Command(["resume", str(self.run_dir), "--quiet", *arguments], self.job.folder, env=self._env())

    def _env(self) -> dict[str, str]:
        return {**os.environ, **self.env}

    def wait(self, timeout_s: float = 120) -> int:
        """The exit status of this life, which ends by itself."""
        assert self.launcher is not None
        output, _ = self.launcher.communicate(timeout=timeout_s)
        self.said.append(output)
        return self.launcher.returncode

    def kill(self, *, launcher_only: bool = False) -> None:
        """kill -9 of everything, or of the launcher, with which all else ends; returns when all are gone."""
        assert self.launcher is not None
        everyone = self.launcher.family()
        for process in everyone[: 1 if launcher_only else None]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        output, _ = self.launcher.communicate(timeout=60)
        self.said.append(output)
        _, alive = psutil.wait_procs(everyone, timeout=20)
        assert not alive, f"outlive their launcher: {alive}"

    def version(self) -> int:
        """The newest that the metrics tell of."""
        assert self.run_dir is not None
        if not (self.run_dir / "metrics.jsonl").exists():
            return 0
        with contextlib.suppress(ValueError):  # a line that is being written
            return max((p["step"] for p in metrics(self.run_dir) if "train/loss" in p["values"]), default=0)
        return 0

    def until_version(self, version: int) -> None:
        """Wait for it; a life that ends before is an error."""
        assert self.launcher is not None

        def is_there() -> bool:
            assert self.launcher is not None
            return self.version() >= version or self.launcher.poll() is not None

        wait_until(is_there, f"version {version}", timeout_s=120)

    def after(self, seconds: float) -> bool:
        """Wait so long; False if the life ended meanwhile."""
        assert self.launcher is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.launcher.poll() is not None:
                return False
            time.sleep(0.02)
        return self.launcher.poll() is None

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self.launcher is not None and self.launcher.poll() is None:
            self.kill(launcher_only=True)
        print("".join(self.said)[-4000:])


FLAGS = (
    f'data.train="data/prompts.jsonl@[0:{NUM_PROMPTS}]"', "data.max_passes=1", "run.num_steps=0",
    "trainer.checkpoint_every=2", "trainer.export_at_end=false", 'reward.fn="patient.py:reward"',
)  # fmt: skip


def make_lives(folder: Path, *overrides: str, patience_s: float = 0.2) -> Lives:
    """A job in `folder`, not started; its reward takes that long."""
    job = make_job(folder)
    (folder / "patient.py").write_text(PATIENT.format(seconds=patience_s))
    return Lives(job, overrides)
