"""Runs in which actors are made to fail at labelled points of their lives, and what can be said of such a run afterwards.

Every prompt is to be trained exactly once: one pass over a whole number of batches, no group left out. So the multiset
of what an undisturbed run trains is known without making one: each draw, once.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.commands import Command
from tests.harness.ledger_audit import LedgerAudit, audit_ledger
from tests.harness.nemesis import Plan, Struck, struck
from tests.harness.run_job import Job, events, make_job

BATCH = 4
RUN = (
    "run.num_steps=0",
    "data.max_passes=1",
    "rollout.max_groups=4",
    "rollout.max_new_tokens=20",  # longer than the engine keeps tokens to itself: answers come in parts
    "roles.rollout.count=2",
    *(
        f"roles.{role}.{setting}"
        for role in ("coordinator", "buffer", "monitor", "trainer", "rollout")
        for setting in ("max_restarts=1000", 'when_hung="kill"')
    ),
)


@dataclass(frozen=True)
class ChaosRun:
    status: int
    output: str
    run_dir: Path
    num_prompts: int
    strikes: tuple[Struck, ...]

    def audit(self) -> LedgerAudit:
        return audit_ledger(self.run_dir / "ledger.sqlite")

    def said(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for kind in kinds for event in events(self.run_dir, kind)]

    def logs(self) -> str:
        files = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-1500:]}" for file in files)


def chaos_job(folder: Path, *, reward_s: float = 0.1) -> Job:
    job = make_job(folder)
    job.be_patient(reward_s)
    return job


def run_under(
    job: Job, strikes: Sequence[str], *overrides: str, num_steps: int, timeout_s: float = 240,
    beside: Callable[[Job], None] = lambda _: None,
) -> ChaosRun:  # fmt: skip
    """A run to its own end, with these strikes one after the other; `num_steps` batches of data. `beside`: what
    somebody does meanwhile."""
    num_prompts = num_steps * BATCH
    words = job.words(
        *RUN, f'data.train="data/prompts.jsonl@[0:{num_prompts}]"', *overrides,
    )  # fmt: skip
    plan = Plan(tuple(strikes), str(marks(job)))
    launcher = Command(words, job.folder, has_session=True, env={**os.environ, **plan.variable()})
    try:
        beside(job)
        output, _ = launcher.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the run hangs after {timeout_s:g} s\n{hang_report(job, launcher)}") from None
    except BaseException:
        launcher.kill()
        launcher.communicate()
        raise
    run_dir = job.run_dir()
    return ChaosRun(launcher.returncode, output, run_dir, num_prompts, struck(marks(job)))


def hang_report(job: Job, launcher: subprocess.Popen[str]) -> str:
    """End a run that does not end, and say what it was about."""
    run = ChaosRun(0, "", job.run_dir(), 0, struck(marks(job)))
    told = f"{[strike.text for strike in run.strikes]}\n{run.audit()}\n"
    os.kill(launcher.pid, 9)  # its children go with it
    output, _ = launcher.communicate()
    return told + output[-2000:] + run.logs()


def marks(job: Job) -> Path:
    return job.folder / "strikes"


def check_lossless(run: ChaosRun, strikes: Sequence[str]) -> None:
    """It ended by itself, every strike came about, and each prompt was trained once."""
    assert run.status == 0, f"{run.output[-3000:]}\n{run.logs()}"
    assert [strike.text for strike in run.strikes] == list(strikes), run.output[-3000:]
    audit = run.audit()
    assert audit.problems == ()
    assert audit.num_draws == run.num_prompts
    assert audit.trained == Counter(range(run.num_prompts)), (audit.states, audit.dropped)


def check_nobody_left(run: ChaosRun) -> None:
    """No process, socket, or file of the run is there any more."""
    for strike in run.strikes:
        assert not Path(f"/proc/{strike.pid}").exists(), f"{strike.actor} (process {strike.pid}) lives on"
    assert not (run.run_dir / "control.json").exists()
    assert not list((run.run_dir / "checkpoints").glob(".partial-*"))
