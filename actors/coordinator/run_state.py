"""A run's state, as its coordinator sees it: phases and what may follow which, reasons, versions; and its journal.

starting   waits for the trainer; restores live knobs; waits for the first engine that serves the trainer's version
running    every version made is adopted by the engines; evaluation on the side
draining   the leader ended: last adoption, last evaluation
finished / failed

The journal is a small JSON file: what no other actor can report to a restarted coordinator. It is replaced as a whole
and durable before its content takes effect.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ...core.daemon_thread import in_daemon_thread
from ...core.errors import ConfigError, LaunchError, LedgerError, MyxaError, raised_as
from ...core.files import read_regular, until_written, write_durably
from ...core.knobs import AuditRecord
from ...core.messages import EngineStatus, Record, RunPhase, RunStatus
from ...core.timeouts import TIMEOUTS
from ..telemetry import Reporter
from .audit import append_audit
from .options import CoordinatorOptions

NEXT_PHASES: dict[RunPhase, frozenset[RunPhase]] = {
    "starting": frozenset({"running", "draining", "failed"}),
    "running": frozenset({"draining", "failed"}),
    "draining": frozenset({"finished", "failed"}),
    "finished": frozenset(),
    "failed": frozenset(),
}


@dataclass(slots=True)
class RunState:
    """All of it is kept in the journal."""

    phase: RunPhase = "starting"
    version: int = -1
    """Newest version that is known here; the trainer may have a newer one."""
    started_wall_s: float = 0.0
    """When the leader was first started; 0: not yet."""
    error: str = ""
    reason: str = ""
    leader_reason: str | None = None
    stop_reason: str = ""
    """Why the leader is to end; empty: it is not."""
    eval_reward: float | None = None
    eval_version: int = -1
    """Version that was evaluated last, if all answers were of it and the trainer did not go back since."""
    has_restored: bool = False
    """The knobs of the checkpoint that the run resumed from are among the decisions."""
    past_epoch: int = 0
    """Newest change of knobs of the runs that this one continues; it counts on from there."""
    has_stale_engines: bool = False
    """The trainer returned to an older version, and engines may still serve undone ones."""

    @property
    def is_over(self) -> bool:
        return not NEXT_PHASES[self.phase]

    @property
    def known_version(self) -> int:
        """The run's version for people: 0 before the trainer reported one."""
        return max(self.version, 0)

    def status(self, name: str, num_steps: int, engines: tuple[EngineStatus, ...], paused: str) -> RunStatus:
        return RunStatus(
            name=name,
            phase=self.phase,
            version=self.known_version,
            num_steps=num_steps,
            engines=engines,
            error=self.error,
            reason=self.reason,
            eval_reward=self.eval_reward,
            paused=paused,
        )


JOURNAL_FILE = "coordinator.journal"
MAX_BYTES = 64 << 20


class JournalContent(Record, frozen=True):
    """All of a journal."""

    launch: str
    """Names the launcher of this run: another one's journal is no word of this run."""
    run: RunState


class CoordinatorJournal:
    """See the module's head. Cheap to make; holds nothing open."""

    def __init__(self, path: Path, launch: str) -> None:
        self.path = path
        self.launch = launch
        self.state = RunState()
        """What is kept, as it is when it is written."""
        self.coming: RunPhase | None = None
        """The phase that the run enters once the journal has it."""
        self._turn = threading.Lock()

    def load(self) -> tuple[bool, str]:
        """Take up the `state` that an earlier incarnation kept; False, and why there is nothing (empty for a first
        start). Blocking. Raises ConfigError, since nothing that is tried again mends it, for a damaged file."""
        try:
            content = msgspec.json.decode(read_regular(self.path, MAX_BYTES), type=JournalContent)
        except FileNotFoundError:
            return False, ""
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{self.path} cannot be used: {error}",
                remedy="the run cannot continue without it; `myxa resume` continues from the last checkpoint",
            ) from error
        if content.launch != self.launch:
            return False, f"{self.path} was written under another launcher: it is not used"
        self.state = content.run
        return True, ""

    async def keep(self) -> None:
        """Durable once it returns, also if the caller is cancelled. Raises LedgerError with the file unchanged."""
        await in_daemon_thread(self._write, "journal")

    def _write(self) -> None:
        with self._turn:
            run = replace(self.state, phase=self.coming or self.state.phase)
            with raised_as(LedgerError, str(self.path), OSError, remedy="check disk and rights of the run directory"):
                write_durably(self.path, msgspec.json.encode(JournalContent(launch=self.launch, run=run)), 0o600)


@dataclass(frozen=True, slots=True)
class RunContext(Reporter):
    """What all parts of the coordinator work with."""

    options: CoordinatorOptions
    journal: CoordinatorJournal

    @property
    def state(self) -> RunState:
        return self.journal.state

    def version(self) -> int:
        return self.state.known_version

    async def record(self, record: AuditRecord) -> AuditRecord:
        """Into the audit log, with time and version of now; durable. Raises as `append_audit`."""
        now = msgspec.structs.replace(record, wall_s=self.clock.wall(), version=self.version())
        return await in_daemon_thread(lambda: append_audit(self.options.audit_path, now), "audit")

    async def keep(self) -> None:
        """Write the journal. A disk that refuses or hangs is reported, and tried again with the next change."""
        try:
            async with asyncio.timeout(TIMEOUTS.coordinator.keep_s):
                await self.journal.keep()
        except (MyxaError, TimeoutError) as error:
            self.tell(
                "journal-not-written",
                str(error) or f"{self.journal.path}: not written within {TIMEOUTS.coordinator.keep_s:g} s",
            )


class PhaseMoves:
    """The moves of a run from phase to phase: into the journal first, then reported."""

    def __init__(self, run: RunContext, on_change: Callable[[], None]) -> None:
        """`on_change`: the run is in another phase now."""
        self._run = run
        self._on_change = on_change

    async def to(self, phase: RunPhase) -> bool:
        """Enter a phase: the journal has it before it is reported and before its work begins. False: another phase came
        first. The move completes even if the caller is cancelled. A start must be in the journal, since the next
        incarnation would begin the run again: it waits for a disk that refuses, and raises LedgerError for any other
        reason. All other phases proceed without the journal, and without a disk that hangs: the actor that reported the
        end reports it again."""
        journal = self._run.journal
        if phase not in NEXT_PHASES[journal.state.phase]:
            why = f"the run cannot go from {journal.state.phase} to {phase}"
            raise LaunchError(why, remedy="this is a bug; report it")
        if journal.coming is not None and phase not in NEXT_PHASES[journal.coming]:
            return False
        journal.coming = phase
        return await asyncio.shield(self._run.ctx.spawn(self._move(phase), name=f"to-{phase}"))

    async def _move(self, phase: RunPhase) -> bool:
        journal, state = self._run.journal, self._run.state
        if phase == "running":
            try:
                await until_written(journal.keep, path=journal.path, tell=self._run.tell)
            except MyxaError:
                journal.coming = None if journal.coming == phase else journal.coming
                raise
        else:
            await self._run.keep()
        if journal.coming != phase:
            return False
        self._run.tell("phase", f"{state.phase} -> {phase}")
        state.phase, journal.coming = phase, None
        if phase == "finished":
            self._run.tell("run-ended", state.reason)
        elif phase == "failed":
            self._run.tell("run-failed", state.error)
        self._on_change()
        return True
