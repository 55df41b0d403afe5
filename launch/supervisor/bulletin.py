"""What the launcher has to say to the monitor, so that it stands in events.jsonl, the live view and the report.

Lossy, as all telemetry: a monitor that is away, or hangs itself, costs the entry and nothing else.
"""

from __future__ import annotations

from ...actors.contracts import MonitorContract
from ...core.actor import ActorContext, PeerEvent
from ...core.errors import CallError
from ...core.messages import Event, Telemetry


class Bulletin:
    """Of one launcher."""

    def __init__(self, ctx: ActorContext) -> None:
        self._ctx = ctx
        self._monitor = ctx.ref(MonitorContract, "monitor")

    def post(self, event: PeerEvent) -> None:
        """An actor is suspect, hung, or has recovered."""
        self._ctx.spawn(self._send(event), name=f"tell of {event.name}")

    async def _send(self, event: PeerEvent) -> None:
        entry = Event(
            source=event.name,
            wall_s=self._ctx.clock.wall(),
            kind=f"actor-{event.kind}",
            text=f"{event.name} (epoch {event.epoch}): {event.reason}",
            data={"epoch": event.epoch},
        )
        try:
            await self._monitor.telemetry(Telemetry(events=(entry,)))
        except CallError as error:
            self._ctx.log.info("the monitor was not told that %s is %s: %s", event.name, event.kind, error)
