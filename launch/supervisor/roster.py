"""Who is there: one line per actor of the run, as the run supervisor knows it. Plain records, and how they are made."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ...core.config import RoleName
from ...core.supervision import ALIVE, ChildState, Supervisor
from .crew import Crew


class ActorRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One actor of the run."""

    name: str
    role: RoleName
    node: int
    host: str
    """Of its node; empty: the node is lost."""
    state: ChildState
    attempt: int
    """0 is the first."""
    pid: int = 0
    """Of the process, on its node; 0: it has none."""
    epoch: int = 0
    """Of the incarnation that registered last; 0: none did."""
    started_wall_s: float = 0.0
    """When the attempt was started, in seconds since 1970; 0: it was not."""
    restarts_left: int = 0
    """How often it may fail and be started again now."""
    devices: tuple[int, ...] = ()
    """GPU numbers on its node."""
    is_leaving: bool = False
    """Whether it is on its way out for good, as somebody wished."""

    @property
    def is_over(self) -> bool:
        """Whether it will have no process any more."""
        return self.state in ("failed", "stopped")


def roster_of(crew: Crew, rules: Supervisor, host: Callable[[int], str], now: float) -> tuple[ActorRecord, ...]:
    """All actors of the run, in start order."""
    return tuple(_record(name, crew, rules, host, now) for name in crew.names)


def _record(name: str, crew: Crew, rules: Supervisor, host: Callable[[int], str], now: float) -> ActorRecord:
    member, state = crew[name], rules.state(name)
    return ActorRecord(
        name=name,
        role=member.spec.role,
        node=member.spec.node,
        host=host(member.spec.node),
        state=state,
        attempt=rules.attempt(name),
        pid=member.pid if state in ALIVE else 0,
        epoch=member.epoch,
        started_wall_s=member.started_wall_s,
        restarts_left=rules.restarts_left(name, now),
        devices=member.spec.devices,
        is_leaving=rules.is_retiring(name),
    )
