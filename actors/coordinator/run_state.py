"""A run's state, as its coordinator sees it: phases and what may follow which, reasons, versions. Sans-IO.

starting   waits for the trainer; restores live knobs; waits for the first engine that serves the trainer's version
running    every version made is adopted by the engines; evaluation on the side
draining   the leader ended: last adoption, last evaluation
finished / failed
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.messages import EngineStatus, RunPhase, RunStatus

NEXT_PHASES: dict[RunPhase, frozenset[RunPhase]] = {
    "starting": frozenset({"running", "draining", "failed"}),
    "running": frozenset({"draining", "failed"}),
    "draining": frozenset({"finished", "failed"}),
    "finished": frozenset(),
    "failed": frozenset(),
}


@dataclass(slots=True)
class RunState:
    """See the module's head. All of it is kept in the journal."""

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
    evaluated: int = -1
    """Version that all answers of the newest evaluation are of; -1: of several, or there was none."""
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
