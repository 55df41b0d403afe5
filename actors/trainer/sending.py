"""A trainer rank's answers to engines that take weights from its device: beside training, each in a thread of its own.

Knows the protocol of a sender. Must not know training or the leader.
"""

from __future__ import annotations

from ...core.errors import TrainError
from ...core.protocols import WeightSender
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


class SendsWeights(TrainerContract):
    """The handlers, for a rank that may have a sender. Set `_sender` in `__init__`."""

    _sender: WeightSender | None

    def _require_sender(self) -> WeightSender:
        if self._sender is None:
            raise TrainError(
                f"{self.ctx.name} publishes weights for readers, it does not send them",
                remedy='set weights.channel = "nccl" or "cuda_ipc"',
            )
        return self._sender

    async def weight_plan(self, request: PlanRequest) -> PlanReply:
        return self._require_sender().plan(request)

    async def join_channel(self, request: JoinRequest) -> JoinOffer:
        sender = self._require_sender()
        return await in_own_thread(lambda: sender.join(request), f"join {request.channel}")

    async def send_weights(self, order: SendOrder) -> SendReport:
        sender = self._require_sender()
        return await in_own_thread(lambda: sender.send(order), f"send {order.version}")

    async def leave_channel(self, channel: str, reason: str) -> None:
        self._require_sender().leave(channel, reason)

    async def share_weights(self, request: ShareRequest) -> ShareReply:
        sender = self._require_sender()
        return await in_own_thread(lambda: sender.share(request), f"share {request.version}")

    async def sample_weights(self, request: SampleRequest) -> SampleReply:
        sender = self._require_sender()
        return await in_own_thread(lambda: sender.sample(request), f"sample {request.version}")
