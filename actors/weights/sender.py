"""A trainer rank's end of the channels between devices. Fulfils `core.protocols.WeightSender`.

    publish   export -> staging buckets (+ digest)        in the backend's thread, between two steps
    join      meeting place, group built in a thread      while the engine generates
    send      broadcast from staging                      while the engine is paused, and the trainer trains
    share     handles of the staging buckets              instead of join and send, on one GPU

Composition only: `plan` cuts, `staging` keeps, `channels` sends, `cuda_ipc` shares, `fp8` quantises on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import torch

from ...core.errors import TrainError
from ...core.messages import WeightManifest
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
from .channels import Channels
from .cuda_ipc import bucket_metadata, bucket_payload
from .object_stream import Written
from .plan import WeightPlan
from .staging import Staging, beside_training

Tensors = Iterator[tuple[str, Any]]
SentChannel = Literal["nccl", "cuda_ipc"]


class DeviceWeightSender:
    """One rank. `name` is its actor's, under which engines ask for it."""

    def __init__(
        self,
        name: str,
        *,
        channel: SentChannel,
        bucket_bytes: int,
        host: str,
        quantise: Callable[[Tensors], Tensors] | None = None,
        keeps_buffers: bool = True,
    ) -> None:
        """`host`: boot id of this host. `quantise`: turns exported tensors into those that the engines hold.
        `keeps_buffers`: see `Staging`."""
        self._name = name
        self._channel: SentChannel = channel
        self._host = host
        self._quantise = quantise
        self._staging = Staging(bucket_bytes, keeps_buffers=keeps_buffers)
        self._channels = Channels(name, host)
        self._metadata: tuple[str, tuple[Written, ...]] = ("", ())
        """Fingerprint of a plan, and its buckets' metadata."""

    def publish(self, version: int, export: Callable[[], Tensors]) -> WeightManifest | None:
        """See the protocol."""
        quantise = self._quantise
        staged = self._staging.publish(version, export if quantise is None else lambda: quantise(export()))
        if staged is None:
            return None
        self._channels.published()
        return WeightManifest(
            version=version,
            channel=self._channel,
            location=self._name,
            generation=0,
            num_bytes=staged.buffers.plan.num_bytes,
            tensors=(),
            digest=staged.digest,
            host=self._host,
        )

    def release(self, version: int) -> None:
        """See the protocol."""
        self._staging.release(version)

    def plan(self, request: PlanRequest) -> PlanReply:
        """See the protocol."""
        staged = self._staging.read(request.version)
        self._staging.done(staged)
        plan = staged.buffers.plan
        return PlanReply(
            fingerprint=plan.fingerprint,
            digest=staged.digest,
            buckets=() if request.known == plan.fingerprint else plan.buckets,
            has_channel=self._channels.has(request.channel),
        )

    def join(self, request: JoinRequest) -> JoinOffer:
        """See the protocol."""
        device = self._staging.device
        if device is None:
            raise TrainError(f"{self._name} has published nothing yet", remedy="publish a version first")
        return self._channels.join(request, device)

    def send(self, order: SendOrder) -> SendReport:
        """See the protocol."""
        staged = self._staging.read(order.version)
        return self._channels.send(order, staged, lambda: self._staging.done(staged))

    def leave(self, channel: str, reason: str) -> None:
        """See the protocol."""
        self._channels.leave(channel, reason)

    def progress(self) -> dict[str, str]:
        """Where each channel is, for people: "bucket 2 of 5"."""
        return self._channels.progress()

    def share(self, request: ShareRequest) -> ShareReply:
        """See the protocol."""
        staged = self._staging.read(request.version)
        try:
            with beside_training(staged.buffers.device):
                payloads = tuple(
                    tuple(bucket_payload(staged.buffers.bucket(number), metadata) for _ in range(request.num_ranks))
                    for number, metadata in enumerate(self._metadata_of(staged.buffers.plan))
                )
        finally:
            self._staging.done(staged)
        return ShareReply(payloads=payloads)

    def _metadata_of(self, plan: WeightPlan) -> tuple[Written, ...]:
        """What is told of each bucket, the same for all versions of the plan."""
        fingerprint, metadata = self._metadata
        if fingerprint != plan.fingerprint:
            metadata = tuple(bucket_metadata(bucket) for bucket in plan.buckets)
            self._metadata = (plan.fingerprint, metadata)
        return metadata

    def sample(self, request: SampleRequest) -> SampleReply:
        """See the protocol."""
        staged = self._staging.read(request.version)
        try:
            with beside_training(staged.buffers.device):
                values = tuple(self._first_values(staged.buffers.views, n, request.num_values) for n in request.names)
        finally:
            self._staging.done(staged)
        return SampleReply(values=values)

    def _first_values(self, views: dict[str, torch.Tensor], name: str, num_values: int) -> tuple[float, ...]:
        view = views.get(name)
        if view is None:
            raise TrainError(f"{self._name} sends no weight {name}", remedy="ask another sender")
        first = view.reshape(-1)[:num_values].to(torch.float32).cpu()
        return tuple(cast("list[float]", first.tolist()))  # pyright: ignore[reportUnknownMemberType]

    def close(self) -> None:
        """See the protocol."""
        self._channels.close()
        self._staging.close()
