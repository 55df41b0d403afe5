"""A trainer rank's answers to engines that take weights from its device: beside training, each in a thread of its own.

Knows the rank's ends of the channels. Must not know training or the leader.
"""

from __future__ import annotations

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
from ..own_thread import in_own_thread
from .channel_ends import ChannelEnds


class SendsWeights(TrainerContract):
    """The handlers, for a rank. Set `_ends` in `__init__`."""

    _ends: ChannelEnds

    async def weight_plan(self, request: PlanRequest) -> PlanReply:
        return self._ends.sender_of(request.version).plan(request)

    async def join_channel(self, request: JoinRequest) -> JoinOffer:
        sender = self._ends.group_sender()
        return await in_own_thread(lambda: sender.join(request), f"join {request.channel}")

    async def send_weights(self, order: SendOrder) -> SendReport:
        sender = self._ends.sender_of(order.version)
        return await in_own_thread(lambda: sender.send(order), f"send {order.version}")

    async def leave_channel(self, channel: str, reason: str) -> None:
        self._ends.left(channel, reason)

    async def share_weights(self, request: ShareRequest) -> ShareReply:
        sender = self._ends.sender_of(request.version)
        return await in_own_thread(lambda: sender.share(request), f"share {request.version}")

    async def sample_weights(self, request: SampleRequest) -> SampleReply:
        sender = self._ends.sender_of(request.version)
        return await in_own_thread(lambda: sender.sample(request), f"sample {request.version}")
