"""A run to which machines come and from which they go: launchers on this machine that meet over tcp, as on several."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
from tests.harness.commands import Command
from tests.harness.run_job import PATIENT, Job, make_job
from tests.harness.waiting import wait_until

from myxa.actors.ledger.audit import LedgerAudit, audit_ledger
from myxa.launch.control.client import ControlClient

PACE_S = 1.5
"""An engine's one group takes so long: throughput is the number of engines."""
ENDLESS = (
    "run.num_steps=1000000", 'reward.fn="patient.py:reward"', 'weights.channel="disk"', "rollout.max_groups=1",
    "async.max_staleness=8", "trainer.checkpoint_every=5",
)  # fmt: skip


class Fleet:
    """Launchers of one run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.launchers: list[Command] = []

    def begin(self, *overrides: str) -> Command:
        """Node 0; others may come."""
        sets = [part for item in (*ENDLESS, *overrides) for part in ("--set", item)]
        flags = ("--nnodes", "1:4", "--rdzv", "127.0.0.1:0", "--lost-timeout", "6")
        return self._launch(str(self.job.folder / "run.toml"), *sets, *flags)

    def join(self, num_rollouts: int) -> Command:
        """A late machine, which knows the run's directory and nothing else."""
        return self._launch("--join", str(self.run_dir), "--rollouts", str(num_rollouts))

    def _launch(self, *arguments: str) -> Command:
        key = ("--job-key", str(self.job.folder / "job.key"))
        out = (self.job.folder / f"launcher.{len(self.launchers)}").open("w")
        with out:
            launcher = Command(["launch", *arguments, *key], self.job.folder, has_session=True, log=out)
        self.launchers.append(launcher)
        return launcher

    @property
    def run_dir(self) -> Path:
        return self.job.run_dir()

    @property
    def ledger(self) -> Path:
        return self.run_dir / "ledger.sqlite"

    def audit(self) -> LedgerAudit:
        return audit_ledger(self.ledger)

    def ask(self, verb: str, **arguments: Any) -> Any:
        return ControlClient.of(self.run_dir).ask(verb, 200, **arguments)

    def said(self) -> str:
        """What all launchers printed, and node 0's log."""
        files = sorted(self.job.folder.glob("launcher.*"))
        log = self.run_dir / "logs/launcher.0.log"
        return "\n".join(f"== {file.name}\n{file.read_text()[-2000:]}" for file in (*files, log) if file.exists())

    def engines(self) -> list[str]:
        """Rollout actors that the coordinator counts as serving."""
        status = self.ask("status")["status"] or {"engines": ()}  # the coordinator may be busy
        return [engine["rollout"] for engine in status["engines"] if engine["version"] >= 0]

    def until_engines(self, count: int) -> None:
        wait_until(lambda: len(self.engines()) == count, f"{count} engines that serve", timeout_s=150)

    def has_ledger(self) -> bool:
        """Whether there are tables in it yet."""
        return self.ledger.exists() and bool(self.rows("SELECT 1 FROM sqlite_master WHERE name = 'transitions'"))

    def rows(self, question: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self.ledger}?mode=ro", uri=True)) as db:
            return db.execute(question).fetchall()

    def groups_made(self) -> int:
        """Groups that came back finished so far."""
        return int(self.rows("SELECT COUNT(*) FROM transitions WHERE to_state = 'READY'")[0][0])

    def pace(self, seconds: float = 8.0) -> float:
        """Groups finished per second, from now on for a while."""
        before, began = self.groups_made(), time.monotonic()
        time.sleep(seconds)
        return (self.groups_made() - before) / (time.monotonic() - began)

    def step(self) -> int:
        return int(self.rows("SELECT COALESCE(MAX(step), -1) FROM groups WHERE state IN ('TRAINED', 'DURABLE')")[0][0])

    def goes_on(self, num: int = 2) -> None:
        """So many more steps are made."""
        before = self.step()
        wait_until(lambda: self.step() >= before + num, f"{num} more steps\n{self.said()}")

    def end(self) -> None:
        """In good order; every launcher says so."""
        self.ask("down")
        for launcher in self.launchers:
            assert launcher.wait(120) in (0, -signal.SIGKILL), self.said()

    def close(self) -> None:
        for launcher in reversed(self.launchers):
            children = launcher.below()
            if launcher.poll() is None:
                launcher.kill()
            launcher.wait(30)
            psutil.wait_procs(children, timeout=30)


@contextmanager
def fleet_in(folder: Path, *overrides: str) -> Iterator[Fleet]:
    """A run whose first steps are made."""
    job = make_job(folder)
    (folder / "patient.py").write_text(PATIENT.format(seconds=PACE_S))
    fleet = Fleet(job)
    try:
        first = fleet.begin(*overrides)

        def has_begun() -> bool:
            assert first.poll() is None, (folder / "launcher.0").read_text()
            return any((folder / "runs").glob("*/control.json")) and fleet.has_ledger() and fleet.step() >= 0

        wait_until(has_begun, "the first step", timeout_s=150)
        yield fleet
    finally:
        fleet.close()
