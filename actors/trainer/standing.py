"""Where the trainer stands, as its coordinator must know: told when the gang is up, and again to a coordinator that was
started anew, with what can be read of the newest weights.

Knows the coordinator by its contract. Must not know ranks or steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...core.actor import ActorContext, PeerEvent
from ...core.knobs import LiveKnobs
from ...core.messages import WeightManifest
from ..contracts.roles import CoordinatorContract
from .publishing import Publisher

COORDINATOR = "coordinator"

Ask = Callable[[str, Callable[[], Awaitable[None]]], Awaitable[None]]
"""Until it is answered: (who, call)."""


class Standing:
    """See the module's head. One per leader."""

    def __init__(self, ctx: ActorContext, publisher: Publisher, ask: Ask) -> None:
        self._ctx = ctx
        self._publisher = publisher
        self._ask = ask
        self._coordinator = ctx.ref(CoordinatorContract, COORDINATOR)
        self.version = -1
        """That the ranks have; -1: the gang was not told of yet."""
        self.is_leading = False
        """Whether the loop was let go."""
        self._facts: dict[str, str] = {}
        self._live: LiveKnobs | None = None
        self._finished = ""

    async def ready(
        self, version: int, manifest: WeightManifest | None, facts: dict[str, str], live: LiveKnobs | None
    ) -> None:
        """The gang is up. `live`: knobs as the checkpoint that it goes on from holds them. A coordinator that restarts
        just now may be told twice, which does no harm."""
        self._facts, self._live, self.version = facts, live, version
        await self._ask(COORDINATOR, lambda: self._coordinator.trainer_ready(version, manifest, facts, live))

    async def finished(self, version: int, reason: str) -> None:
        """The loop ended."""
        self._finished = reason
        await self._ask(COORDINATOR, lambda: self._coordinator.trainer_finished(version, reason))

    def on_peer(self, event: PeerEvent) -> None:
        """A coordinator that came up after the gang was told of knows nothing of it."""
        if event.name == COORDINATOR and event.kind in ("up", "restarted") and self.version >= 0:
            self._ctx.spawn(self._tell_again(), name=f"tell coordinator {event.epoch}")

    async def _tell_again(self) -> None:
        """What the one before was to release is nobody's any more. What is published meanwhile is the new one's."""
        version, live = self.version, None if self.is_leading else self._live
        manifest, newest = self._publisher.readable, self._publisher.newest
        self._ctx.log.info("the coordinator is new: it is told that the trainer stands at version %d", version)
        await self._ask(
            COORDINATOR,
            lambda: self._coordinator.trainer_ready(version, manifest, self._facts, live, is_leading=self.is_leading),
        )
        await self._publisher.release_older(newest)
        if self._finished:
            await self._ask(COORDINATOR, lambda: self._coordinator.trainer_finished(version, self._finished))
