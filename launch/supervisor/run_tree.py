"""The supervision tree of a run, from its actors: a branch per role, below it a gang or a branch per actor. Pure.

Neither the run nor a role restarts anything by itself: an actor (or gang) that has spent its budget ends the run,
unless its role can do without.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ...core.supervision_tree import BranchSpec, ChildSpec
from ..actor_spec import ActorSpec


def run_tree(actors: Sequence[ActorSpec], grace_s: float) -> BranchSpec:
    """`actors` in start order, the actors of a role together."""
    roles = [(role, tuple(mates)) for role, mates in groupby(actors, key=lambda actor: actor.role)]
    return BranchSpec("run", tuple(_role(role, mates, grace_s) for role, mates in roles), max_restarts=0)


def _role(role: str, actors: Sequence[ActorSpec], grace_s: float) -> BranchSpec:
    first = actors[0]
    if first.restart == "gang":
        ranks = tuple(_child(actor, grace_s) for actor in actors)
        return BranchSpec(gang_name(role), ranks, "gang", first.max_restarts)
    branches = tuple(seat(actor, grace_s) for actor in actors)
    return BranchSpec(role_name(role), branches, max_restarts=0, quorum=first.quorum)


def role_name(role: str) -> str:
    """Of the branch whose members are a role's actors, each with a budget of its own."""
    return f"role {role}"


def seat(actor: ActorSpec, grace_s: float) -> BranchSpec:
    """An actor with a budget of its own."""
    return BranchSpec(actor.name, (_child(actor, grace_s),), max_restarts=actor.max_restarts)


def gang_name(role: str) -> str:
    """Of the gang that a role's actors are."""
    return f"gang {role}"


def _child(actor: ActorSpec, grace_s: float) -> ChildSpec:
    restart = "temporary" if actor.restart == "never" else "permanent"
    return ChildSpec(actor.name, restart, actor.when_hung, grace_s)
