"""By which channel the leader has a weight version published, and whether the run can go over to another one.

    a new version        by the knob `weight_channel` as it is in force, which changes at the boundary "weights"
    the first after a    by what was decided last, its number come or not. A channel that does not work could never be
    start, or one again  left otherwise: the next version may be waiting for just this one

Knows the knob, and rollout actors by their contract. Must not know ranks or bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from ...core.actor import ActorContext
from ...core.errors import GatherError
from ...core.host import boot_id
from ...core.knobs import KnobValue, LiveKnobs
from ...core.messages import WeightChannel
from ..contracts.roles import RolloutContract
from ..knobs.owner import KnobOwner
from .checkpoint_side import RunSide
from .knobs import CHANNEL, TrainerKnobs

ASK_S = 5.0
"""For rollout actors to say whether a channel reaches them; less than a vote may take."""


class ChannelChoice:
    """See the module's head. One per leader."""

    def __init__(self, owner: KnobOwner, knobs: TrainerKnobs, begins_with: WeightChannel, side: RunSide) -> None:
        """`begins_with`: the run file's. `side` tells what was decided in this run."""
        self._owner = owner
        self._knobs = knobs
        self._side = side
        self._begins_with: WeightChannel = begins_with
        self._kept: KnobValue | None = None
        """Decided before this gang began, which is told of it only once engines have its first version."""

    async def take_up(self, kept: LiveKnobs | None) -> None:
        """Before the first version. `kept`: what the checkpoint that the gang begins with says of the knobs; this run's
        own word is the newer one."""
        if not self._knobs.text(CHANNEL):
            return
        for live in (kept or LiveKnobs(), await self._side.live_knobs()):
            found = [k for k in live.knobs if (k.name, k.first) == (CHANNEL, self._begins_with)]
            if found:
                self._kept = max(found, key=lambda k: k.epoch).value

    def of_new(self) -> WeightChannel:
        """For a version that is published for the first time."""
        self._kept = None
        return cast(WeightChannel, self._knobs.text(CHANNEL) or self._begins_with)

    def newest(self) -> WeightChannel:
        """For the first version after a start, and for one that is published again."""
        if not (in_force := self._knobs.text(CHANNEL)):
            return self._begins_with
        told = self._owner.newest(CHANNEL)  # what waits for its number is newer than what was decided before the start
        return cast(WeightChannel, told if told != in_force else self._kept or told)


async def refuses(ctx: ActorContext, channel: KnobValue, refused: Mapping[WeightChannel, str]) -> str:
    """Why weights cannot go by `channel`, naming who cannot; empty: they can. `refused`: what the run's own shape says.
    Rollout actors that are there are asked, since they may have come later, from elsewhere."""
    wanted = cast(WeightChannel, channel)
    if reason := refused.get(wanted, ""):
        return f"{CHANNEL} = {wanted}: {reason}"
    names = list(ctx.peers("rollout/"))
    if not names:
        return ""
    engines = ctx.group(RolloutContract, names).options(deadline_s=ASK_S)
    try:
        answers = await engines.all(RolloutContract.judge_channel, wanted, boot_id())
    except GatherError as error:
        return f"{CHANNEL} = {wanted}: not every engine says whether it can take it: {error.message}"
    return "; ".join(f"{CHANNEL} = {wanted}: {name}: {why}" for name, why in answers.items() if why)
