"""The verb `status`: everything that the live view knows, in one answer, for views that look from outside.

Knows whom to ask. Must not know how it is shown.
"""

from __future__ import annotations

from ...core.knobs import Operator
from ...core.messages import BufferStats, Record, RunStatus
from ..run_watch import RunWatch
from .verb import Arguments, Room, Verb


class StatusReply(Record, frozen=True):
    """One look at the run; whoever did not answer in time is None or empty."""

    run_dir: str
    started_wall_s: float
    now_wall_s: float
    status: RunStatus | None
    """Coordinator."""
    buffer: BufferStats | None
    snapshot: dict[str, dict[str, float]]
    """Monitor: see `MonitorContract.snapshot`."""


async def _status(room: Room, arguments: Arguments, who: Operator) -> StatusReply:
    del arguments, who
    state = await RunWatch(room.node, room.node.clock).look()
    return StatusReply(
        run_dir=str(room.run_dir.path),
        started_wall_s=room.started_wall_s,
        now_wall_s=state.now_wall_s,
        status=state.status,
        buffer=state.buffer,
        snapshot={source: dict(values) for source, values in state.snapshot.items()},
    )


VERBS = (
    Verb(
        name="status",
        access="view",
        arguments=Arguments,
        help="phase, step, engines, buffer and newest metrics in one answer",
        run=_status,
    ),
)
