"""Publishing a weight version, on rank 0 of the trainer: which channel carries it, when the ranks may drop it.

    publish    all ranks gather and write or stage the version. At most `max_unreleased` versions are kept: publishing
               waits for the release of older ones
    released   no engine reads the version any more; the other ranks that published a part of it drop it too

The channel of a new version is the knob `weight_channel` as it is in force at the boundary "weights". The first version
after a start, and a version that is published again, take the channel that was decided last: a channel that does not
work could not be left otherwise, because the next version may be waiting for this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.actor import ActorContext
from ...core.errors import GatherError, TrainError
from ...core.files import Tell, until_written
from ...core.knobs import KnobValue, LiveKnob, LiveKnobs
from ...core.messages import WeightChannel, WeightManifest
from ...core.process import boot_id
from ...core.refs import ActorGroup
from ...core.weight_channel import SENT_CHANNELS, SHARED_CHANNELS
from ..contracts import RolloutContract, TrainerContract
from ..knobs.owner import KnobOwner

CHANNEL = "weight_channel"
"""The knob."""
RELEASE_DEADLINE_S = 300.0


def max_unreleased(channel: WeightChannel) -> int:
    """Versions that engines may still be reading; one more waits. Between devices they lie in the trainer's memory."""
    return 2 if channel in SENT_CHANNELS else 3


@dataclass(slots=True)
class Publisher:
    """Publishes weight versions and keeps account of those that engines still read. One per run."""

    ctx: ActorContext
    ranks: ActorGroup[TrainerContract]
    """Which fail fast together."""
    channels: ChannelChoice
    meter: ActivityMeter
    tell: Tell
    """Of a disk, in `run_dir`, that refuses a version."""
    run_dir: Path
    limit: Callable[[WeightChannel], int] = max_unreleased
    newest: int = -1
    """Version that was published last; -1: none."""
    _unreleased: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    """Version -> ranks that published it."""
    _unheard: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    """Version that was released -> ranks beside this one that have not heard it."""
    _letting_go: set[int] = field(default_factory=set[int])
    """Released versions that the other ranks are hearing of; what they staged is still there."""
    _release_seen: asyncio.Event = field(default_factory=asyncio.Event)
    _manifest: WeightManifest | None = None

    async def first(self, version: int, kept: LiveKnobs | None) -> tuple[WeightManifest, LiveKnobs | None]:
        """As `publish`, of the version that the gang begins with; `kept` is what its checkpoint says of the knobs,
        returned without what this run cannot use."""
        usable = await self.channels.take_up(kept)
        return await self.publish(version), usable

    async def publish(self, version: int) -> WeightManifest:
        """Where engines find `version`. Raises TrainError when no rank gathered it, or older ones are not released."""
        is_new = self._manifest is not None and version != self.newest
        channel = self.channels.of_new() if is_new else self.channels.newest()
        limit = self.limit(channel)
        if version not in self._unreleased and len(self._unreleased) >= limit:
            await self.await_release(version, at_most=limit - 1)
        self._unheard.pop(version, None)  # ranks that publish it again drop what they had
        with self.meter.during("wait-weights", f"publish others {version}"):
            parts = await until_written(
                lambda: self.ranks.all(TrainerContract.publish, version, channel),
                path=self.run_dir,
                tell=self.tell,
                meter=self.meter,
            )
        manifest = join_parts(parts)
        if manifest is None:
            raise TrainError(f"no rank gathered weights for version {version}", remedy="see the log of trainer/0")
        if channel in SHARED_CHANNELS and len(set(manifest.digest.split(","))) > 1:
            self.ctx.log.warning("version %d differs between its senders: %s", version, manifest.location)
        before = self._manifest
        attempt = before.attempt + 1 if before is not None and before.version == version else 0
        manifest = msgspec.structs.replace(manifest, lineage=self.ctx.epoch, attempt=attempt)
        self._unreleased[version] = tuple(name for name, part in parts.items() if part is not None)
        self.newest, self._manifest = version, manifest
        self.ctx.log.info("weight version %d is published over %s, digest %s", version, channel, manifest.digest)
        return manifest

    @property
    def readable(self) -> WeightManifest | None:
        return self._manifest if self.newest in self._unreleased else None

    async def release_older(self, before: int) -> None:
        """Release the versions below `before`: the actor that would have done it is gone."""
        own = self.ctx.ref(TrainerContract, self.ctx.name)
        for version in sorted(self._unreleased):
            if version < before:
                await own.release_weights(version)

    async def released(self, version: int) -> None:
        """No engine reads `version` any more. A rank that misses this message gets it again with the next version."""
        others = tuple(name for name in self._unreleased.pop(version, ()) if name != self.ctx.name)
        if others:
            self._unheard[version] = others
        self._letting_go.add(version)
        try:
            await self._tell_unheard()
        finally:
            self._letting_go.discard(version)
            self._release_seen.set()

    async def _tell_unheard(self) -> None:
        for version, names in list(self._unheard.items()):
            try:
                await self.ctx.group(TrainerContract, names).all(TrainerContract.release_weights, version)
            except GatherError as error:
                self.ctx.log.warning("version %d may go, but not all ranks heard it: %s", version, error)
                continue
            if self._unheard.get(version) is names:
                del self._unheard[version]

    async def await_release(self, version: int, at_most: int = 0) -> None:
        """Before `version`, wait until the engines released all published versions but `at_most`, and the other ranks
        what they staged of them, since that memory is needed."""
        try:
            with self.meter.during("wait-weights", f"release for {version}"):
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


ASK_S = 5.0
"""For rollout actors to say whether a channel reaches them; less than the coordinator waits for a verdict."""


@dataclass(slots=True)
class ChannelChoice:
    """Chooses the channel of each version. One per run."""

    owner: KnobOwner
    in_force: Callable[[], str]
    """Value of the knob; empty: the run has none."""
    begins_with: WeightChannel
    """The run file's."""
    refused: Mapping[WeightChannel, str]
    """Channels that the run's shape refuses, and why."""
    live_knobs: Callable[[], Awaitable[LiveKnobs]]
    """What was decided in this run."""
    telemetry: TelemetryBuffer
    """Gets the event "knobs-not-restored" for a kept channel that cannot be used."""
    _kept: LiveKnob | None = None
    """Decided before this gang began; the gang gets it only once engines have its first version."""

    async def take_up(self, kept: LiveKnobs | None) -> LiveKnobs | None:
        """Before the first version. `kept`: what the checkpoint that the gang begins with says of the knobs; this run's
        own word is the newer one. Returns `kept` without a channel that this run's roles cannot use: a fork may have
        others than the run that wrote it."""
        if not self.in_force():
            return kept
        usable = None if kept is None else self._usable(kept)
        for live in (usable or LiveKnobs(), self._usable(await self.live_knobs())):
            found = [k for k in live.knobs if self._is_ours(k)]
            if found:
                self._kept = max(found, key=lambda k: k.epoch)
        return usable

    def _is_ours(self, knob: LiveKnob) -> bool:
        """Whether it is the channel, and newer than the run file's word."""
        return (knob.name, knob.first) == (CHANNEL, self.begins_with)

    def _usable(self, live: LiveKnobs) -> LiveKnobs:
        refused = {k: why for k in live.knobs if self._is_ours(k) and (why := _refusal(k.value, self.refused))}
        for knob, why in refused.items():
            self.telemetry.event("knobs-not-restored", f"{why}; decided by change {knob.epoch}")
        return msgspec.structs.replace(live, knobs=tuple(k for k in live.knobs if k not in refused))

    def of_new(self) -> WeightChannel:
        """For a version that is published for the first time."""
        self._kept = None
        return cast(WeightChannel, self.in_force() or self.begins_with)

    def newest(self) -> WeightChannel:
        """For the first version after a start, and for one that is published again."""
        if not self.in_force():
            return self.begins_with
        epoch, decided = self.owner.newest(CHANNEL)
        # Epochs, not values: to go back to the one in force is a decision like any other.
        kept = self._kept
        return cast(WeightChannel, kept.value if kept is not None and kept.epoch > epoch else decided)


async def refuses(ctx: ActorContext, channel: KnobValue, refused: Mapping[WeightChannel, str]) -> str:
    """Why weights cannot go by `channel`, naming who cannot; empty: they can. `refused`: what the run's own shape says.
    Rollout actors that are there are asked, since they may have come later, from elsewhere."""
    if reason := _refusal(channel, refused):
        return reason
    wanted = cast(WeightChannel, channel)
    names = list(ctx.peers("rollout/"))
    if not names:
        return ""
    engines = ctx.group(RolloutContract, names).options(deadline_s=ASK_S)
    try:
        answers = await engines.all(RolloutContract.judge_channel, wanted, boot_id())
    except GatherError as error:
        return f"{CHANNEL} = {wanted}: not every engine says whether it can take it: {error.message}"
    return "; ".join(f"{CHANNEL} = {wanted}: {name}: {why}" for name, why in answers.items() if why)


def _refusal(channel: KnobValue | None, refused: Mapping[WeightChannel, str]) -> str:
    reason = refused.get(cast(WeightChannel, channel), "")
    return f"{CHANNEL} = {channel}: {reason}" if reason else ""


def join_parts(parts: Mapping[str, WeightManifest | None]) -> WeightManifest | None:
    """Parts by rank, in order of ranks; None if no rank published. Locations and digests are joined by commas."""
    published = [part for part in parts.values() if part is not None]
    if len(published) < 2:
        return published[0] if published else None
    is_whole = published[0].channel in SHARED_CHANNELS
    return msgspec.structs.replace(
        published[0],
        location=",".join(part.location for part in published),
        digest=",".join(part.digest for part in published),
        num_bytes=published[0].num_bytes if is_whole else sum(part.num_bytes for part in published),
    )
