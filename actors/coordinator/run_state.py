"""Where a run stands, as its coordinator sees it: phases and what may follow which, reasons, versions. Sans-IO.

starting   waits for the trainer; restores live knobs; waits for the first engine that serves the trainer's version
running    every version made is adopted by the engines; evaluation on the side
draining   the leader ended: last adoption, last evaluation
finished / failed
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...core.errors import LaunchError
from ...core.messages import EngineStatus, RunPhase, RunStatus
from .journal import RunKept

_ALLOWED: dict[RunPhase, frozenset[RunPhase]] = {
    "starting": frozenset({"running", "draining", "failed"}),
    "running": frozenset({"draining", "failed"}),
    "draining": frozenset({"finished", "failed"}),
    "finished": frozenset(),
    "failed": frozenset(),
}


@dataclass(slots=True)
class RunState:
    """See the module's head. Fields as in `RunKept`."""

    phase: RunPhase = "starting"
    version: int = -1
    started_wall_s: float = 0.0
    error: str = ""
    reason: str = ""
    leader_reason: str | None = None
    stop_reason: str = ""
    eval_reward: float | None = None
    evaluating: int = -1
    engines: set[str] = field(default_factory=set[str])
    """Rollout actors that reported in and did not leave, in an earlier incarnation too."""
    has_restored: bool = False
    has_stale_engines: bool = False

    @classmethod
    def of(cls, kept: RunKept) -> RunState:
        """As an earlier incarnation left it."""
        return cls(
            phase=kept.phase,
            version=kept.version,
            started_wall_s=kept.started_wall_s,
            error=kept.error,
            reason=kept.reason,
            leader_reason=kept.leader_reason,
            stop_reason=kept.stop_reason,
            eval_reward=kept.eval_reward,
            evaluating=kept.evaluating,
            engines=set(kept.engines),
            has_restored=kept.has_restored,
            has_stale_engines=kept.has_stale_engines,
        )

    def kept(self) -> RunKept:
        """For the journal."""
        return RunKept(
            phase=self.phase,
            version=self.version,
            started_wall_s=self.started_wall_s,
            error=self.error,
            reason=self.reason,
            leader_reason=self.leader_reason,
            stop_reason=self.stop_reason,
            eval_reward=self.eval_reward,
            evaluating=self.evaluating,
            engines=tuple(sorted(self.engines)),
            has_restored=self.has_restored,
            has_stale_engines=self.has_stale_engines,
        )

    @property
    def is_over(self) -> bool:
        """Nothing comes after this."""
        return not _ALLOWED[self.phase]

    @property
    def known_version(self) -> int:
        """Where the run stands for people: 0 before the trainer said anything."""
        return max(self.version, 0)

    def status(self, name: str, num_steps: int, engines: tuple[EngineStatus, ...], paused: str) -> RunStatus:
        """For the launcher and for people."""
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

    def move(self, phase: RunPhase) -> None:
        """Raises LaunchError for a step that no run takes."""
        if phase not in _ALLOWED[self.phase]:
            raise LaunchError(f"the run cannot go from {self.phase} to {phase}", remedy="this is a bug; report it")
        self.phase = phase
