"""The leader's side of weight versions: every rank publishes its part, engines let go, the ranks may forget.

    publish    all ranks gather and write or stage a version; first, room is made: not too many at once are kept
    released   no engine reads a version any more; ranks beside the leader's that published a part of it are told

Knows ranks by their contract. Must not know engines, how bytes travel, or which versions are worth publishing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...core.activity import ActivityMeter
from ...core.actor import ActorContext
from ...core.actor_group import ActorGroup
from ...core.disk import Tell, until_written
from ...core.errors import GatherError, TrainError
from ...core.knobs import LiveKnobs
from ...core.messages import WeightChannel, WeightManifest
from ...core.weight_channel import SENT_CHANNELS, SHARED_CHANNELS
from ..contracts.roles import TrainerContract
from .channel_choice import ChannelChoice
from .manifest_parts import join_parts

RELEASE_DEADLINE_S = 300.0


def max_unreleased(channel: WeightChannel) -> int:
    """Versions that engines may still be reading; one more waits. Between devices they lie in the trainer's memory."""
    return 2 if channel in SENT_CHANNELS else 3


class Publisher:
    """See the module's head. One per leader."""

    def __init__(
        self,
        ctx: ActorContext,
        ranks: ActorGroup[TrainerContract],
        channels: ChannelChoice,
        meter: ActivityMeter,
        tell: Tell,
        run_dir: Path,
        limit: Callable[[WeightChannel], int] = max_unreleased,
    ) -> None:
        """`ranks` fail fast together. `tell`: of a disk, in `run_dir`, that refuses a version."""
        self._ctx = ctx
        self._ranks = ranks
        self._channels = channels
        self._meter = meter
        self._tell = tell
        self._run_dir = run_dir
        self._limit = limit
        self._unreleased: dict[int, tuple[str, ...]] = {}
        """Version -> ranks that published it."""
        self._untold: dict[int, tuple[str, ...]] = {}
        """Version that was released -> ranks beside this one that have not heard it."""
        self._letting_go: set[int] = set()
        """Versions of which the other ranks are being told; what they staged is still there."""
        self._release_seen = asyncio.Event()
        self.newest = -1
        """Version that was published last; -1: none."""
        self._manifest: WeightManifest | None = None

    async def first(self, version: int, kept: LiveKnobs | None) -> tuple[WeightManifest, LiveKnobs | None]:
        """As `publish`, of the version that the gang begins with; `kept` is what its checkpoint says of the knobs,
        returned without what this run cannot use."""
        usable = await self._channels.take_up(kept)
        return await self.publish(version), usable

    async def publish(self, version: int) -> WeightManifest:
        """Where engines find `version`. Raises TrainError when no rank gathered it, or nobody lets go of older ones."""
        is_new = self._manifest is not None and version != self.newest
        channel = self._channels.of_new() if is_new else self._channels.newest()
        limit = self._limit(channel)
        if version not in self._unreleased and len(self._unreleased) >= limit:
            await self.await_release(version, at_most=limit - 1)
        self._untold.pop(version, None)  # ranks that publish it again let go of what they had
        with self._meter.during("wait-weights", f"publish others {version}"):
            parts = await until_written(
                lambda: self._ranks.all(TrainerContract.publish, version, channel),
                path=self._run_dir,
                tell=self._tell,
                meter=self._meter,
            )
        manifest = join_parts(parts)
        if manifest is None:
            raise TrainError(f"no rank gathered weights for version {version}", remedy="see the log of trainer/0")
        if channel in SHARED_CHANNELS and len(set(manifest.digest.split(","))) > 1:
            self._ctx.log.warning("version %d differs between its senders: %s", version, manifest.location)
        manifest = msgspec.structs.replace(manifest, lineage=self._ctx.epoch, attempt=self._attempt_at(version))
        self._unreleased[version] = tuple(name for name, part in parts.items() if part is not None)
        self.newest, self._manifest = version, manifest
        self._ctx.log.info("weight version %d is published over %s, digest %s", version, channel, manifest.digest)
        return manifest

    def _attempt_at(self, version: int) -> int:
        before = self._manifest
        return before.attempt + 1 if before is not None and before.version == version else 0

    @property
    def readable(self) -> WeightManifest | None:
        """The newest version, if it was not released yet."""
        return self._manifest if self.newest in self._unreleased else None

    async def release_older(self, before: int) -> None:
        """Whoever was to say that nobody reads the versions below `before` any more is gone."""
        own = self._ctx.ref(TrainerContract, self._ctx.name)
        for version in sorted(self._unreleased):
            if version < before:
                await own.release_weights(version)

    async def released(self, version: int) -> None:
        """No engine reads `version` any more. A rank that does not hear it now is told again with the next one."""
        others = tuple(name for name in self._unreleased.pop(version, ()) if name != self._ctx.name)
        if others:
            self._untold[version] = others
        self._letting_go.add(version)
        try:
            await self._tell_untold()
        finally:
            self._letting_go.discard(version)
            self._release_seen.set()

    async def _tell_untold(self) -> None:
        for untold, names in list(self._untold.items()):
            try:
                await self._ctx.group(TrainerContract, names).all(TrainerContract.release_weights, untold)
            except GatherError as error:
                self._ctx.log.warning("version %d may go, but not all ranks heard it: %s", untold, error)
                continue
            if self._untold.get(untold) is names:
                del self._untold[untold]

    async def await_release(self, version: int, at_most: int = 0) -> None:
        """Wait, for the sake of `version`, until the engines let go of all published versions but `at_most`, and the
        other ranks of what they staged of them: that memory is wanted by others."""
        try:
            with self._meter.during("wait-weights", f"release for {version}"):
                async with asyncio.timeout(RELEASE_DEADLINE_S):
                    while len(self._unreleased) + len(self._letting_go) > at_most:
                        self._release_seen.clear()
                        await self._release_seen.wait()
        except TimeoutError as err:
            raise TrainError(
                f"the coordinator did not release any of the versions {sorted(self._unreleased)} "
                f"within {RELEASE_DEADLINE_S:g} s",
                remedy="an engine is stuck in a weight update; see the coordinator's log for its name",
            ) from err
