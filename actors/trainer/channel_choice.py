"""By which channel the leader has a weight version published, and whether the run can go over to another one.

    a new version        by the knob `weight_channel` as it is in force, which changes at the boundary "weights"
    the first after a    by what was decided last, its number come or not. A channel that does not work could never be
    start, or one again  left otherwise: the next version may be waiting for just this one

Knows the knob, and rollout actors by their contract. Must not know ranks or bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec

from ...core.activity import TelemetryBuffer
from ...core.actor import ActorContext
from ...core.errors import GatherError
from ...core.host import boot_id
from ...core.knobs import KnobValue, LiveKnob, LiveKnobs
from ...core.messages import WeightChannel
from ..contracts.roles import RolloutContract
from ..knobs.owner import KnobOwner
from .checkpoint_side import RunSide
from .knobs import CHANNEL, TrainerKnobs
from .leader_options import LeaderOptions

ASK_S = 5.0
"""For rollout actors to say whether a channel reaches them; less than a vote may take."""


class ChannelChoice:
    """See the module's head. One per leader."""

    def __init__(
        self, owner: KnobOwner, knobs: TrainerKnobs, options: LeaderOptions, side: RunSide, telemetry: TelemetryBuffer
    ) -> None:
        """`options`: the run file's channel, and those that the run's shape refuses. `side` tells what was decided in
        this run. `telemetry`: an event "knobs-not-restored" tells of a kept channel that cannot be used."""
        self._owner = owner
        self._knobs = knobs
        self._side = side
        self._telemetry = telemetry
        self._begins_with: WeightChannel = options.channel
        self._refused = options.refused_channels
        self._kept: LiveKnob | None = None
        """Decided before this gang began, which is told of it only once engines have its first version."""

    async def take_up(self, kept: LiveKnobs | None) -> LiveKnobs | None:
        """Before the first version. `kept`: what the checkpoint that the gang begins with says of the knobs; this run's
        own word is the newer one. Returns `kept` without a channel that this run's roles cannot use: a fork may have
        others than the run that wrote it."""
        if not self._knobs.text(CHANNEL):
            return kept
        usable = None if kept is None else self._usable(kept)
        for live in (usable or LiveKnobs(), self._usable(await self._side.live_knobs())):
            found = [k for k in live.knobs if self._is_ours(k)]
            if found:
                self._kept = max(found, key=lambda k: k.epoch)
        return usable

    def _is_ours(self, knob: LiveKnob) -> bool:
        """Whether it is the channel, and newer than the run file's word."""
        return (knob.name, knob.first) == (CHANNEL, self._begins_with)

    def _usable(self, live: LiveKnobs) -> LiveKnobs:
        refused = {k: why for k in live.knobs if self._is_ours(k) and (why := _refusal(k.value, self._refused))}
        for knob, why in refused.items():
            self._telemetry.event("knobs-not-restored", f"{why}; decided by change {knob.epoch}")
        return msgspec.structs.replace(live, knobs=tuple(k for k in live.knobs if k not in refused))

    def of_new(self) -> WeightChannel:
        """For a version that is published for the first time."""
        self._kept = None
        return cast(WeightChannel, self._knobs.text(CHANNEL) or self._begins_with)

    def newest(self) -> WeightChannel:
        """For the first version after a start, and for one that is published again."""
        if not self._knobs.text(CHANNEL):
            return self._begins_with
        epoch, told = self._owner.newest(CHANNEL)
        # Epochs, not values: to go back to the one in force is a decision like any other.
        kept = self._kept
        return cast(WeightChannel, kept.value if kept is not None and kept.epoch > epoch else told)


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


def _refusal(channel: KnobValue, refused: Mapping[WeightChannel, str]) -> str:
    reason = refused.get(cast(WeightChannel, channel), "")
    return f"{CHANNEL} = {channel}: {reason}" if reason else ""
