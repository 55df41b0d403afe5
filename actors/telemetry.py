"""What an actor and its parts report by (`Reporter`): telemetry for the monitor.

Training never waits for the monitor and never fails because of it. A bundle without an answer is sent again, and its
number tells the monitor whether it has it already. Meanwhile records wait within the buffer's bound; what the bound
pushes out is counted, and the count travels with the next bundle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from msgspec.structs import replace

from ..core.activity import ActivityMeter, TelemetryBuffer
from ..core.actor import ActorContext
from ..core.clock import Clock
from ..core.errors import Draining, NoSuchActor, NotReady, NotSent, OutcomeUnknown, Overloaded
from ..core.messages import Telemetry
from ..core.process import ProcessorTime
from ..core.retry import until_answered
from ..core.timeouts import TIMEOUTS
from .contracts import MonitorContract

T = TypeVar("T")
SendTelemetry = Callable[[Telemetry], Awaitable[None]]
"""Usually `ctx.ref(MonitorContract, "monitor").telemetry`."""

AWAY = (NotSent, NoSuchActor, NotReady, Draining, Overloaded, OutcomeUnknown, TimeoutError)
"""No monitor takes it now; a later try may succeed. Any other error is about the bundle, and would come again."""

_log = logging.getLogger(__name__)


REPORT_S = 1.0
"""Between two reports of an actor."""
REPORT_SHARE, RAREST_S = 0.05, 10.0
"""A report takes that share of an actor's time at most: to a monitor that has much to do all report less often, but
every so many seconds."""


async def report_once(buffer: TelemetryBuffer, send: SendTelemetry, *, timeout_s: float = 5.0) -> bool:
    """Send what waits, a bundle without an answer first; False: something waits again, or was lost. Raises only
    CancelledError."""
    while True:
        is_again = buffer.unconfirmed is not None
        bundle = buffer.unconfirmed or buffer.drain()
        if not (bundle.counts() or bundle.dropped):
            return True
        has_more = bool(len(buffer))  # what comes while this is sent is for the next time
        buffer.unconfirmed = bundle
        try:
            async with asyncio.timeout(timeout_s):
                await send(bundle)
        except AWAY as error:
            _log.debug("%s: a telemetry bundle waits for a monitor: %r", buffer.source, error)
            return False
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the monitor, the actor must not fail
            _log.debug("%s: a telemetry bundle was lost: %r", buffer.source, error)
            others = replace(bundle, events=())
            if not bundle.events or not (others.counts() or others.dropped):
                buffer.unconfirmed = None
                buffer.lost(bundle)
                return False
            buffer.lost(others)
            buffer.unconfirmed = buffer.numbered(Telemetry(events=bundle.events))  # they need not be at fault
            continue
        buffer.unconfirmed = None
        if not (has_more or is_again):
            return True


async def report_forever(buffer: TelemetryBuffer, send: SendTelemetry, every_s: float = REPORT_S) -> None:
    """Every so many seconds until cancelled, then once more: last words matter. Raises only CancelledError."""
    try:
        pause_s, loop = every_s, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(pause_s)
            started_s = loop.time()
            await report_once(buffer, send)
            pause_s = max(every_s, min(RAREST_S, (loop.time() - started_s) / REPORT_SHARE))
    finally:
        if buffer.meter is not None:
            buffer.meter.close_span()
        # Also to a monitor that was away: it may be back.
        while await report_once(buffer, send, timeout_s=TIMEOUTS.monitor.last_words_s) and len(buffer):
            pass


@dataclass(frozen=True, slots=True)
class Reporter:
    """An actor's context with its time accounting and telemetry, for the actor and its parts."""

    ctx: ActorContext
    meter: ActivityMeter
    telemetry: TelemetryBuffer

    @classmethod
    def begin(cls, ctx: ActorContext, every_s: float = REPORT_S, **more: Any) -> Self:
        """Called in `on_start`: from then on the monitor hears of the actor every so many seconds."""
        meter = ActivityMeter(ctx.name, ctx.clock)
        telemetry = TelemetryBuffer(ctx.name, ctx.clock, meter=meter)
        telemetry.more_seconds.append(ProcessorTime().seconds)
        send = ctx.ref(MonitorContract, "monitor").telemetry
        ctx.spawn(report_forever(telemetry, send, every_s), name=f"{ctx.name} telemetry")
        return cls(ctx, meter, telemetry, **more)

    @property
    def clock(self) -> Clock:
        return self.ctx.clock

    def tell(self, kind: str, text: str, **data: Any) -> None:
        """An event, which is logged too."""
        self.ctx.log.info("%s: %s", kind, text)
        self.telemetry.event(kind, text, **data)

    def warn(self, kind: str, text: str, **data: Any) -> None:
        self.ctx.log.warning("%s: %s", kind, text)
        self.telemetry.event(kind, text, **data)

    async def ask(self, who: str, send: Callable[[], Awaitable[T]], *, waits_for_disk: bool = True) -> T:
        return await until_answered(send, who=who, clock=self.clock, log=self.ctx.log, waits_for_disk=waits_for_disk)
