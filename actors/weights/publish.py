"""The trainer's side of weight sync: a rank's end of the run's channel, and the leader's account of what engines read.

publish    all ranks gather and write or stage the version. At most `max_unreleased` versions are kept: publishing
           waits for the release of older ones
released   no engine reads the version any more; the other ranks that published a part of it drop it too, and those
           that did not hear of it do so with the next version
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...core.errors import GatherError, TrainError
from ...core.files import until_written
from ...core.messages import WeightChannel, WeightManifest
from ...core.protocols import TrainBackend, WeightSender, WeightWriter
from ...core.refs import together
from ...core.timeouts import TIMEOUTS
from ...core.weight_channel import SENT_CHANNELS, SHARED_CHANNELS, SenderOrder
from ..contracts import TrainerContract
from ..telemetry import Reporter

A = TypeVar("A")
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs blocking work in the backend's thread."""


class ChannelEnd:
    """A trainer rank's end. For the rank's loop, not thread-safe.

    shm, disk, tcp    rank 0 has a `writer`; it works in its own thread, beside training
    nccl, cuda_ipc    every rank has a `sender`; it takes tensors in the backend's thread, and answers in any
    """

    def __init__(
        self, channel: WeightChannel, *, writer: WeightWriter | None = None, sender: WeightSender | None = None
    ) -> None:
        self._shares = channel in SHARED_CHANNELS
        self._writer = writer
        self._sender = sender
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        """Where the writer works."""
        self._held: set[int] = set()
        """Versions that were not released."""

    def answer(self, order: SenderOrder[A]) -> A:
        """In any thread. Raises TrainError for what this channel does not do."""
        end = self._sender or self._writer
        if end is None:
            raise TrainError("this rank publishes no weights", remedy="see weights.channel")
        return end.answer(order)

    async def publish(
        self, version: int, backend: TrainBackend, in_thread: InThread, unreleased: tuple[int, ...] = ()
    ) -> WeightManifest | None:
        """Called on all ranks at once; other versions than `unreleased` are dropped. None where this rank publishes no
        part. Raises what backend and end raise."""
        for released in self._held.difference(unreleased):
            await self.release(released)
        writer, sender, manifest = self._writer, self._sender, None
        if sender is not None:
            manifest = await in_thread(
                lambda: sender.publish(version, lambda: backend.export_device(to_all=self._shares))
            )
        else:
            tensors = await in_thread(backend.export_weights)
            if writer is not None:
                manifest = await self._in_writer_thread(lambda: writer.publish(version, tensors))
        if manifest is not None:
            self._held.add(version)
        return manifest

    async def release(self, version: int) -> None:
        self._held.discard(version)
        if self._sender is not None:
            self._sender.release(version)
        elif (writer := self._writer) is not None:
            await self._in_writer_thread(lambda: writer.release(version))

    async def _in_writer_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def close(self) -> None:
        """Blocks while files are deleted; for the thread. Never raises."""
        for end in (self._writer, self._sender):
            if end is not None:
                end.close()


def max_unreleased(channel: WeightChannel) -> int:
    """Versions that engines may still be reading; one more waits. Between devices they lie in the trainer's memory."""
    return 2 if channel in SENT_CHANNELS else 3


@dataclass(slots=True)
class Publisher:
    """Publishes weight versions and keeps account of those that engines still read. One per run."""

    report: Reporter
    ranks: Mapping[str, TrainerContract]
    """By name."""
    limit: int
    """Versions that may be unreleased."""
    run_dir: Path
    newest: int = -1
    """Version that was published last; -1: none."""
    _unreleased: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    """Version -> ranks that published it."""
    _letting_go: set[int] = field(default_factory=set[int])
    """Released versions that the other ranks are hearing of; what they staged is still there."""
    _release_seen: asyncio.Event = field(default_factory=asyncio.Event)
    _manifest: WeightManifest | None = None

    async def publish(self, version: int) -> WeightManifest:
        """Where engines find `version`. Raises TrainError when no rank gathered it, or older ones are not released."""
        if version not in self._unreleased and len(self._unreleased) >= self.limit:
            await self.await_release(version, at_most=self.limit - 1)
        with self.report.meter.during("wait-weights", f"publish others {version}"):
            parts = await until_written(
                lambda: together(
                    {name: rank.publish(version, tuple(self._unreleased)) for name, rank in self.ranks.items()},
                    fails_fast=True,
                ),
                path=self.run_dir,
                tell=self.report.tell,
                meter=self.report.meter,
            )
        manifest = join_parts(parts)
        if manifest is None:
            raise TrainError(f"no rank gathered weights for version {version}", remedy="see the log of trainer/0")
        if manifest.channel in SHARED_CHANNELS and len(set(manifest.digest.split(","))) > 1:
            self.report.ctx.log.warning("version %d differs between its senders: %s", version, manifest.location)
        manifest = msgspec.structs.replace(manifest, lineage=self.report.ctx.epoch)
        self._unreleased[version] = tuple(name for name, part in parts.items() if part is not None)
        self.newest, self._manifest = version, manifest
        delta = f", delta of {manifest.deltas[-1].num_bytes} bytes" if manifest.deltas else ""
        self.report.ctx.log.info(
            "weight version %d is published over %s%s, digest %s", version, manifest.channel, delta, manifest.digest
        )
        return manifest

    @property
    def readable(self) -> WeightManifest | None:
        return self._manifest if self.newest in self._unreleased else None

    async def release_older(self, before: int) -> None:
        """Release the versions below `before`: the actor that would have done it is gone."""
        leader = self.report.ctx.ref(TrainerContract, self.report.ctx.name)
        for version in sorted(self._unreleased):
            if version < before:
                await leader.release_weights(version)

    async def released(self, version: int) -> None:
        """No engine reads `version` any more."""
        names = self._unreleased.pop(version, ())
        self._letting_go.add(version)
        try:
            refs = {n: self.report.ctx.ref(TrainerContract, n) for n in names if n != self.report.ctx.name}
            await together({name: ref.release_weights(version) for name, ref in refs.items()})
        except GatherError as error:
            self.report.ctx.log.warning("version %d may go, but not all ranks heard it: %s", version, error)
        finally:
            self._letting_go.discard(version)
            self._release_seen.set()

    async def await_release(self, version: int, at_most: int = 0) -> None:
        """Before `version`, wait until the engines released all published versions but `at_most`, and the other ranks
        what they staged of them, since that memory is needed."""
        try:
            with self.report.meter.during("wait-weights", f"release for {version}"):
                async with asyncio.timeout(TIMEOUTS.trainer.release_s):
                    while len(self._unreleased) + len(self._letting_go) > at_most:
                        self._release_seen.clear()
                        await self._release_seen.wait()
        except TimeoutError as err:
            raise TrainError(
                f"the coordinator did not release any of the versions {sorted(self._unreleased)} "
                f"within {TIMEOUTS.trainer.release_s:g} s",
                remedy="an engine is stuck in a weight update; see the coordinator's log for its name",
            ) from err


def join_parts(parts: Mapping[str, WeightManifest | None]) -> WeightManifest | None:
    """Parts by rank, in order of ranks; None if no rank published. Locations and digests are joined by commas."""
    manifests = [part for part in parts.values() if part is not None]
    if len(manifests) < 2:
        return manifests[0] if manifests else None
    is_whole = manifests[0].channel in SHARED_CHANNELS
    return msgspec.structs.replace(
        manifests[0],
        location=",".join(manifest.location for manifest in manifests),
        digest=",".join(manifest.digest for manifest in manifests),
        num_bytes=manifests[0].num_bytes if is_whole else sum(manifest.num_bytes for manifest in manifests),
    )
