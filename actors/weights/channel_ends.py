"""A trainer rank's ends of the weight channels. An end is made when a version is first published through it, and closed
when newer versions go through another channel and engines released the last version in it.

    shm, disk         rank 0 has a `WeightWriter`; it works in its own thread, beside training. Before its first
                      version, by whatever channel, it deletes what a trainer that was killed has left
    nccl, cuda_ipc    every rank has a `WeightSender`; it takes tensors in the backend's thread, and answers in any

What the old channel holds stays readable until it is released. For the rank's loop, not thread-safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ...core.errors import TrainError
from ...core.messages import WeightChannel, WeightManifest
from ...core.protocols import TrainBackend, WeightSender, WeightWriter
from ...core.weight_channel import SENT_CHANNELS, SHARED_CHANNELS, AnyOrder, JoinRequest, LeaveOrder


@dataclass(frozen=True, slots=True)
class EndMakers:
    """What makes the ends."""

    writer: Callable[[WeightChannel], WeightWriter]
    """For shm and disk."""
    sender: Callable[[WeightChannel], WeightSender]
    """For nccl and cuda_ipc."""
    clear: Callable[[], None]
    """Deletes versions that a trainer which was killed has left behind."""


InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs blocking work in the backend's thread."""


class ChannelEnds:
    """See the module's head. One per rank."""

    def __init__(self, name: str, makers: EndMakers, *, writes: bool) -> None:
        """`name`: the rank's, for errors. `writes`: whether it is the one that writes what is read."""
        self._name = name
        self._makers = makers
        self._writes = writes
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        """Where writers work."""
        self._writers: dict[WeightChannel, WeightWriter] = {}
        self._senders: dict[WeightChannel, WeightSender] = {}
        self._held: dict[int, WeightChannel] = {}
        """Version that was not released -> channel that it lies in."""
        self._newest: WeightChannel | None = None
        self._must_clear = writes

    @property
    def open(self) -> tuple[WeightChannel, ...]:
        return (*self._writers, *self._senders)

    async def publish(
        self, version: int, channel: WeightChannel, backend: TrainBackend, in_thread: InThread
    ) -> WeightManifest | None:
        """Called on all ranks at once. None where this rank publishes no part. Raises what backend and end raise."""
        self._newest = channel  # from here on it is not closed
        if self._must_clear:
            self._must_clear = False
            await self._beside(self._makers.clear)
        if self._held.get(version, channel) != channel:  # it was published before, by another channel
            await self.release(version)
        if channel in SENT_CHANNELS:
            sender = self._senders.get(channel)
            if sender is None:
                sender = self._senders[channel] = self._makers.sender(channel)
            to_all = channel in SHARED_CHANNELS
            manifest = await in_thread(lambda: sender.publish(version, lambda: backend.export_device(to_all=to_all)))
        else:
            tensors = await in_thread(backend.export_weights)
            manifest = None
            if self._writes:
                writer = self._writers.get(channel)
                if writer is None:
                    writer = self._writers[channel] = self._makers.writer(channel)
                manifest = await self._beside(lambda: writer.publish(version, tensors))
        if manifest is not None:
            self._held[version] = channel
        await self._close_unused()
        return manifest

    async def release(self, version: int) -> None:
        channel = self._held.pop(version, None)
        if channel is None:
            return
        if channel in self._senders:
            self._senders[channel].release(version)
        else:
            writer = self._writers[channel]
            await self._beside(lambda: writer.release(version))
        await self._close_unused()

    async def _close_unused(self) -> None:
        used = {*self._held.values(), self._newest}
        for channel in self.open:
            if channel not in used and channel in self._senders:
                self._senders.pop(channel).close()
            elif channel not in used:
                await self._beside(self._writers.pop(channel).close)

    async def _beside(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def sender_for(self, order: AnyOrder) -> WeightSender | None:
        """The end that an engine's order is for: of a version, the one that it lies in; of a group, that of groups.
        None: it is closed, and has given that group up too. Raises TrainError when there is none."""
        if isinstance(order, LeaveOrder):
            return self._senders.get("nccl")
        if isinstance(order, JoinRequest):
            if "nccl" not in self._senders:
                raise TrainError(
                    f"{self._name} sends no weights by nccl",
                    remedy='`myxa set weight_channel=nccl`, or weights.channel = "nccl" in the run file',
                )
            return self._senders["nccl"]
        channel = self._held.get(order.version)
        if channel in self._senders:
            return self._senders[channel]
        where = f"it lies in {channel}" if channel is not None else "it was released, or never published here"
        raise TrainError(
            f"{self._name} does not send weight version {order.version}: {where}",
            remedy="the newest version will be offered next",
        )

    def close_senders(self) -> None:
        """Never raises, never waits."""
        for sender in self._senders.values():
            sender.close()

    def close_writers(self) -> None:
        """Blocks; for the thread. Never raises."""
        for writer in self._writers.values():
            writer.close()
