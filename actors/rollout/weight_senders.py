"""The trainer ranks that send weights, as the engine of a rollout actor reaches them: by reference, under deadlines.

Fulfils `core.protocols.WeightSenders`. An engine is built before its actor has a place in the run, so the actor is
named later (`speak_as`); nothing is asked before it has started.
"""

from __future__ import annotations

from contextlib import suppress

from ...core.actor import Actor, with_deadline
from ...core.errors import CallError, EngineError
from ...core.weight_channel import (
    JoinOffer,
    JoinRequest,
    PlanReply,
    PlanRequest,
    SampleReply,
    SampleRequest,
    SendOrder,
    SendReport,
    ShareReply,
    ShareRequest,
)
from ..contracts.roles import TrainerContract

ANSWER_S = 5.0
"""On top of what an order itself may take."""


class TrainerSenders:
    """See the module's head."""

    def __init__(self) -> None:
        self._actor: Actor | None = None

    def speak_as(self, actor: Actor) -> None:
        """The actor whose calls these are."""
        self._actor = actor

    def _ref(self, sender: str, within_s: float = 0.0) -> TrainerContract:
        if self._actor is None:
            raise EngineError("nobody speaks to the trainer yet", remedy="this is a bug: call speak_as first")
        ref = self._actor.ctx.ref(TrainerContract, sender)
        return with_deadline(ref, within_s) if within_s else ref

    async def plan(self, sender: str, request: PlanRequest) -> PlanReply:
        """See the protocol."""
        return await self._ref(sender).weight_plan(request)

    async def join(self, sender: str, request: JoinRequest) -> JoinOffer:
        """See the protocol."""
        return await self._ref(sender, request.timeout_s).join_channel(request)

    async def send(self, sender: str, order: SendOrder) -> SendReport:
        """See the protocol."""
        return await self._ref(sender, order.timeout_s + ANSWER_S).send_weights(order)

    async def leave(self, sender: str, channel: str, reason: str) -> None:
        """See the protocol."""
        with suppress(CallError):
            await self._ref(sender, ANSWER_S).leave_channel(channel, reason)

    async def share(self, sender: str, request: ShareRequest) -> ShareReply:
        """See the protocol."""
        return await self._ref(sender).share_weights(request)

    async def sample(self, sender: str, request: SampleRequest) -> SampleReply:
        """See the protocol."""
        return await self._ref(sender).sample_weights(request)
