"""How a rollout actor makes itself known to the coordinator: when its engine is up, and again to a coordinator that was
started anew, with the version that it serves. Knows the coordinator by its contract."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...core.actor import ActorContext, PeerEvent
from ...core.messages import EngineStatus
from ...core.patience import until_answered
from ..contracts.roles import CoordinatorContract

COORDINATOR = "coordinator"
MEET_S = 120.0


class ReportingIn:
    """See the module's head. Made in `on_start`."""

    def __init__(self, ctx: ActorContext, status: Callable[[], Awaitable[EngineStatus]]) -> None:
        self._ctx = ctx
        self._status = status
        self._coordinator = ctx.ref(CoordinatorContract, COORDINATOR)
        self._is_known = False
        ctx.watch(COORDINATOR)

    async def run(self, *others: str) -> None:
        """The first time, once the others are there too. Raises LaunchError without them or a coordinator, CallError
        without an answer."""
        await self._ctx.wait_for(COORDINATOR, *others, timeout_s=MEET_S)
        await self._tell()
        self._is_known = True

    def on_peer(self, event: PeerEvent) -> None:
        """Who comes after the coordinator that was told knows nothing of this actor."""
        if event.name == COORDINATOR and event.kind in ("up", "restarted") and self._is_known:
            self._ctx.log.info("the coordinator is new (epoch %d): this actor reports in again", event.epoch)
            self._ctx.spawn(self._tell(), name=f"report in {event.epoch}")

    async def _tell(self) -> None:
        async def send() -> None:
            await self._coordinator.rollout_ready(await self._status(), self._ctx.epoch)

        await until_answered(send, who=COORDINATOR, clock=self._ctx.clock, log=self._ctx.log)
