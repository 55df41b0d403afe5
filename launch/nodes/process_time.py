"""How much of its time a launcher's process works: by the processor's clock, for its actors only wait for messages.

The launcher has no meter: what it does is spread over supervisor, agent, control sockets and their threads, all of them
short. What it does not compute it waits for orders. Lossy, as all telemetry.
"""

from __future__ import annotations

import asyncio
import time

from ...actors.contracts import MonitorContract
from ...core.actor import ActorContext
from ...core.errors import CallError
from ...core.messages import MetricPoint, Telemetry

EVERY_S = 2.0


async def tell_process_time(ctx: ActorContext) -> None:
    """Until cancelled: cumulative seconds, as every actor tells them."""
    monitor = ctx.ref(MonitorContract, "monitor")
    started_s, worked_s = ctx.clock.monotonic(), time.process_time()
    while True:
        await asyncio.sleep(EVERY_S)
        elapsed_s = ctx.clock.monotonic() - started_s
        compute_s = min(time.process_time() - worked_s, elapsed_s)
        values = {
            "time/compute": compute_s,
            "time/wait-data": elapsed_s - compute_s,
            "time/wait-data/orders": elapsed_s - compute_s,
        }
        point = MetricPoint(source=ctx.name, step=-1, wall_s=ctx.clock.wall(), values=values)
        try:
            await monitor.telemetry(Telemetry(metrics=(point,)))
        except CallError as error:
            ctx.log.debug("the monitor was not told the launcher's time: %s", error)
