"""An owner of live knobs that is started anew asks what is in force before its first work. Knows contracts only."""

from __future__ import annotations

from ...core.actor import ActorContext
from ...core.knobs import KnobsInForce
from ...core.patience import until_answered
from ..contracts.roles import CoordinatorContract
from .owner import KnobOwner

JOIN_GIVE_UP_S = 60.0


async def catch_up(ctx: ActorContext, owner: KnobOwner) -> KnobsInForce:
    """Bring `owner` to what the coordinator decided so far; returns what there is beside values.

    Called in `on_start`, before the first message. Without a coordinator, as at the start of a run, nothing was decided
    yet, and there is no wait: it gives everybody that registers what it decides. Raises CallError when one is
    registered and does not answer, BadRequest for a value that the owner could never have agreed to.
    """
    if "coordinator" not in ctx.peers("coordinator"):
        return KnobsInForce()
    coordinator = ctx.ref(CoordinatorContract, "coordinator")
    known = await until_answered(
        lambda: coordinator.knobs_in_force(ctx.name),
        who="coordinator",
        clock=ctx.clock,
        log=ctx.log,
        give_up_s=JOIN_GIVE_UP_S,
    )
    owner.take_over(known.commits)
    return known
