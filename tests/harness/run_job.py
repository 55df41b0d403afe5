"""Real runs of the real product: a tiny model, the sorting task, `myxa up` in a process of its own."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tests.harness.commands import Command, processes_below
from tests.harness.commands import run as run_command

from myxa.actors.models.tiny import make_tiny_model
from myxa.launch.demo.run import write_rows

BATCH = 4
RUN_TOML = """
[run]
name = "small"
dir = "runs"
num_steps = 5

[model]
path = "model"

[data]
train = "data/prompts.jsonl"

[rollout]
num_samples = 4
max_new_tokens = 12
max_groups = 16
workers = 2

[algo]
batch_size = 4
group_filter = "none"

[optimizer]
lr = 1e-3

[monitor]
tensorboard = false
"""

PATIENCE = "patience"
"""File beside a run file: seconds that each reward takes, so that the run makes some steps a second and the processor is
for what the test looks at (standing_by.py)."""


@dataclass(frozen=True)
class Job:
    """A folder with a model, data and a run file."""

    folder: Path

    def words(self, *overrides: str, more: Sequence[str] = ()) -> list[str]:
        """After `myxa`. `more`: further run files."""
        return ["up", str(self.folder / "run.toml"), *more, *(part for item in overrides for part in ("--set", item))]

    def command(self, *overrides: str) -> list[str]:
        """The whole line, for those who start an interpreter of their own."""
        return [sys.executable, "-m", "myxa.launch", *self.words(*overrides)]

    def run(self, *overrides: str, timeout_s: float = 120) -> tuple[int, str, Path]:
        """Run to the end: exit status, everything printed, run directory."""
        done = run_command(*self.words(*overrides), folder=self.folder, timeout_s=timeout_s)
        return done.returncode, done.stdout + done.stderr, self.run_dir()

    def start(self, *overrides: str, more: Sequence[str] = ()) -> Command:
        """Start and return at once."""
        return Command(self.words(*overrides, more=more), self.folder)

    def paced(self, steps_per_s: float = 4.0) -> tuple[str, ...]:
        """Overrides of a run that has to go on while something else is looked at: so many steps a second, not all that
        the machine can."""
        groups = 8  # two batches of `RUN_TOML`
        self.be_patient(groups / BATCH / steps_per_s)
        return (f"rollout.max_groups={groups}",)

    def be_patient(self, seconds: float) -> None:
        """Rewards of this job's runs take so long, whatever they are."""
        (self.folder / PATIENCE).write_text(str(seconds))

    def has(self, name: str) -> bool:
        """Whether a run of this job holds such a file; a run that begins has none for a moment."""
        return any((self.folder / "runs").glob(f"*/{name}"))

    def run_dir(self) -> Path:
        """Directory of the newest run."""
        runs = [p for p in (self.folder / "runs").iterdir() if p.is_dir() and not p.is_symlink()]
        return max(runs, key=lambda p: p.stat().st_mtime_ns)


@dataclass(frozen=True)
class Audit:
    """What the ledger says."""

    states: dict[str, int]
    trained: list[int]
    """Group ids in order of their transition to TRAINED; one entry per transition."""


def make_job(folder: Path) -> Job:
    """A fresh job in `folder`."""
    make_tiny_model(folder / "model", preset="0p5m", seed=0)
    write_rows(folder / "data" / "prompts.jsonl", 200, seed=1)
    write_rows(folder / "data" / "heldout.jsonl", 16, seed=2)
    (folder / "run.toml").write_text(RUN_TOML)
    return Job(folder)


def audit(run_dir: Path) -> Audit:
    """Read the ledger from outside, by plain SQL."""
    with sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True) as db:
        states = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall())
        trained = [r[0] for r in db.execute("SELECT group_id FROM transitions WHERE to_state='TRAINED' ORDER BY seq")]
    db.close()
    return Audit(states={str(k): int(v) for k, v in states.items()}, trained=trained)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All metric points; none, where the run has not begun to write."""
    return _whole_lines(run_dir / "metrics.jsonl")


def newest_step(job: Job) -> int:
    """Of the newest run; 0: it has made none."""
    return newest_step_in(job.run_dir()) if job.has("metrics.jsonl") else 0


def newest_step_in(run_dir: Path) -> int:
    """Of one run; 0: it has made none."""
    return max((int(point["step"]) for point in metrics(run_dir) if "train/loss" in point["values"]), default=0)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """All events of a kind."""
    return [event for event in _whole_lines(run_dir / "events.jsonl") if event["kind"] == kind]


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Of a file that a run may be writing: it may not be there yet, and its last line may be half there."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def worker_pids(launcher_pid: int, name: str) -> list[int]:
    """Processes that the launcher started for that actor; not those that the actor started in its turn."""
    found: dict[int, int] = {}
    for child in processes_below(launcher_pid):
        try:
            spec, parent = child.environ().get("MYXA_WORKER_SPEC", ""), child.ppid()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if Path(spec).name.startswith(name.replace("/", ".") + "."):
            found[child.pid] = parent
    return [pid for pid, parent in found.items() if parent not in found]


def is_alive(pids: Sequence[int]) -> bool:
    """Whether any of these processes still runs."""
    return any(os.path.exists(f"/proc/{pid}") for pid in pids)
