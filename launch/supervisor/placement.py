"""Which actor runs on which node and devices: a pure function of the run's configuration.

Must not know processes, interpreters that exist, or addresses; those are found out when an actor is started.
"""

from __future__ import annotations

from msgspec.structs import replace

from ...core.config import RoleName, RoleSettings, RolesSettings, RolloutRole, RunConfig
from ...core.errors import ConfigError
from ..actor_spec import ActorSpec, RankSpec

START_ORDER: tuple[RoleName, ...] = ("monitor", "buffer", "coordinator", "memory", "trainer", "rollout")
"""Who is needed by others starts first; they are stopped in reverse."""

NUMBERED: frozenset[RoleName] = frozenset({"memory", "trainer", "rollout"})
"""Roles whose actors carry their index in the name even when there is one."""


def place(config: RunConfig, num_nodes: int) -> tuple[ActorSpec, ...]:
    """All actors of the run in start order.

    Raises ConfigError naming every role that asks for a node or a share of devices that does not exist.
    """
    problems = placement_problems(config, num_nodes)
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(actor for role in started_roles(config) for actor in _place_role(role, config.roles, num_nodes))


def placement_problems(config: RunConfig, num_nodes: int) -> list[str]:
    """What cannot be placed; each text begins with the key it is about."""
    return [text for role in started_roles(config) for text in _problems(role, config.roles[role], num_nodes)]


def started_roles(config: RunConfig) -> tuple[RoleName, ...]:
    """The roles of this run in start order: a memory manager only where memory is shared in turns."""
    return tuple(role for role in START_ORDER if role != "memory" or config.memory.share == "switch")


def _problems(role: RoleName, settings: RoleSettings, num_nodes: int) -> list[str]:
    problems: list[str] = []
    if settings.nodes != "*":
        beyond = [str(node) for node in settings.nodes if node >= num_nodes]
        if beyond:
            have = "one node, node 0" if num_nodes == 1 else f"{num_nodes} nodes, 0 to {num_nodes - 1}"
            problems.append(f"roles.{role}.nodes names node {', '.join(beyond)}, but this run has {have} (--nnodes)")
    num_devices = len(settings.device_ids)
    if num_devices % settings.count:
        problems.append(
            f"roles.{role}.devices names {num_devices} GPUs, which do not divide among {settings.count} actors a node"
        )
    num_actors = settings.count * (num_nodes if settings.nodes == "*" else len(settings.nodes))
    if isinstance(settings, RolloutRole) and settings.quorum > num_actors:
        problems.append(f"roles.{role}.quorum = {settings.quorum}, but the run has {num_actors} {role} actors")
    return problems


def _place_role(role: RoleName, roles: RolesSettings, num_nodes: int) -> list[ActorSpec]:
    settings = roles[role]
    nodes = tuple(range(num_nodes)) if settings.nodes == "*" else settings.nodes
    is_gang = role == "trainer"
    devices = settings.device_ids
    share = len(devices) // settings.count
    actors: list[ActorSpec] = []
    for group_rank, node in enumerate(nodes):
        for local in range(settings.count):
            index = node if role == "memory" else group_rank * settings.count + local
            own = devices[local * share : (local + 1) * share]
            rank = RankSpec(
                gang=role,
                rank=index,
                world_size=len(nodes) * settings.count,
                local_rank=local,
                local_world_size=settings.count,
                group_rank=group_rank,
            )
            spec = make_spec(role, settings, index, node, own)
            actors.append(replace(spec, visible_devices=devices, rank=rank) if is_gang else spec)
    return actors


def make_spec(role: RoleName, settings: RoleSettings, index: int, node: int, devices: tuple[int, ...]) -> ActorSpec:
    """One actor of a role at its place, which sees its own devices and is in no gang."""
    return ActorSpec(
        name=f"{role}/{index}" if role in NUMBERED else role,
        role=role,
        kind=settings.kind,
        index=index,
        node=node,
        devices=devices,
        visible_devices=devices,
        python=settings.python,
        env=dict(settings.env),
        threads=settings.threads,
        restart=settings.restart,
        max_restarts=settings.max_restarts,
        when_hung=settings.when_hung,
        quorum=settings.quorum if isinstance(settings, RolloutRole) else 0,
    )
