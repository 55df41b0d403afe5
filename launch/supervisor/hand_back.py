"""Before an operator ends an actor: others are told that it leaves, and it hands back the work that it has in hand.

Knows which roles have work to hand back. Whatever goes wrong here is told and delays nothing: work that was not handed
back begins again elsewhere, from its prompts.
"""

from __future__ import annotations

from ...actors.contracts import CoordinatorContract, RolloutContract
from ...core.actor import ActorContext
from ...core.errors import MyxaError
from ...core.refs import with_deadline
from ..actor_spec import ActorSpec

TELL_S = 5.0
DRAIN_S = 40.0
"""A group that runs is aborted and returned at once; its reward may take its time."""


async def hand_back(ctx: ActorContext, actor: ActorSpec, reason: str) -> None:
    """Returns when the actor may be told to end. Raises nothing but what cancels it."""
    if actor.role != "rollout":
        return
    try:
        coordinator = with_deadline(ctx.ref(CoordinatorContract, "coordinator"), TELL_S)
        await coordinator.rollout_leaving(actor.name, reason)
    except MyxaError as error:
        ctx.log.info("the coordinator was not told that %s leaves: %s", actor.name, error)
    try:
        num_groups = await with_deadline(ctx.ref(RolloutContract, actor.name), DRAIN_S).drain()
    except MyxaError as error:
        ctx.log.warning("%s hands nothing back, its groups begin again from their prompts: %s", actor.name, error)
    else:
        ctx.log.info("%s handed back %d groups (%s)", actor.name, num_groups, reason)
