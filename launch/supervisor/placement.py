"""Which actors a run has, on which node and devices: at its start, on late nodes, and when it is scaled. Pure.

At the start the run file decides; later only rollout actors join and leave. What is impossible is refused with the
reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ...core.config import RoleName, RunConfig
from ...core.config.run import EngineSettings, RoleSettings, RolloutRole, parse_devices
from ...core.config.section import Table, check_urls
from ...core.errors import ConfigError, raised_as
from ..actor_spec import ActorSpec, RankSpec
from ..composition.weight_channels import choose_channel, has_reader

START_ORDER: tuple[RoleName, ...] = (
    "monitor",
    "buffer",
    "coordinator",
    "memory",
    "model",
    "gateway",
    "trainer",
    "rollout",
)
"""Roles that others need start first. Roles are stopped in reverse order."""

NUMBERED: frozenset[RoleName] = frozenset({"memory", "trainer", "rollout", "model"})
"""Roles whose actors have their index in the name even if there is only one."""


FIRST_EMBEDDED = 100_000
"""Number from which on rollout actors are hosted by other programs (embed.py). The run's own take the lowest ones that
are free."""

_NAME = re.compile(r"rollout/(0|[1-9]\d{0,5})")


def place(config: RunConfig, num_nodes: int) -> tuple[ActorSpec, ...]:
    """All actors of the run in start order.

    Raises ConfigError naming every role that asks for a node or a share of devices that does not exist.
    """
    problems = placement_problems(config, num_nodes)
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(actor for started in started_roles(config) for actor in _place_role(started, num_nodes))


def placement_problems(config: RunConfig, num_nodes: int) -> list[str]:
    """What cannot be placed; each text begins with the key of the run file."""
    return [text for started in started_roles(config) for text in _problems(started, num_nodes)]


@dataclass(frozen=True, slots=True)
class StartedRole:
    """A role, or the actors of one of the run's own models."""

    key: str
    """Of the run file."""
    prefix: str
    """Of the names of its actors."""
    role: RoleName
    settings: RoleSettings
    sizes: tuple[int, ...] = ()
    """GPUs of actors, which take these numbers in turn; empty: all of a node have as many."""

    def num_devices(self, index: int) -> int:
        """GPUs of the actor of that index."""
        devices, count = len(self.settings.device_ids), self.settings.count
        return self.sizes[index % len(self.sizes)] if self.sizes and devices else devices // count


def _sizes(engine: EngineSettings, sglang: Table) -> tuple[int, ...]:
    actors = engine.actors(sglang) if engine.groups else ()
    return tuple(sum(shape.num_gpus for shape in servers) for servers in actors)


def started_roles(config: RunConfig) -> tuple[StartedRole, ...]:
    """In start order: a memory manager only where memory is shared, no rollout actors for recorded groups."""
    has_prompts = not config.data.is_recorded
    is_started = {
        "memory": config.memory.share == "switch",
        "gateway": has_prompts and bool(config.roles.gateway.count),
        "rollout": has_prompts,
    }
    roles: list[StartedRole] = []
    for role in START_ORDER:
        if role == "model":
            models = config.models.items() if has_prompts else ()
            roles += [
                StartedRole(f"models.{name}", f"model/{name}", role, settings, _sizes(settings.engine, settings.sglang))
                for name, settings in models
            ]
        elif is_started.get(role, True):
            sizes = _sizes(config.engine, config.sglang) if role == "rollout" else ()
            roles.append(StartedRole(f"roles.{role}", role, role, config.roles[role], sizes))
    return tuple(roles)


def _problems(started: StartedRole, num_nodes: int) -> list[str]:
    problems: list[str] = []
    key, settings = started.key, started.settings
    if settings.nodes != "*":
        beyond = [str(node) for node in settings.nodes if node >= num_nodes]
        if beyond:
            have = "one node, node 0" if num_nodes == 1 else f"{num_nodes} nodes, 0 to {num_nodes - 1}"
            problems.append(f"{key}.nodes names node {', '.join(beyond)}, but this run has {have} (--nnodes)")
    num_devices = len(settings.device_ids)
    needed = sum(map(started.num_devices, range(settings.count)))
    if started.sizes and needed != num_devices:
        problems.append(f"{key}.devices names {num_devices} GPUs, and the servers of engine.groups need {needed}")
    elif not started.sizes and num_devices % settings.count:
        problems.append(
            f"{key}.devices names {num_devices} GPUs, which do not divide among {settings.count} actors a node"
        )
    num_actors = settings.count * (num_nodes if settings.nodes == "*" else len(settings.nodes))
    if isinstance(settings, RolloutRole) and settings.quorum > num_actors:
        problems.append(f"{key}.quorum = {settings.quorum}, but the run has {num_actors} {started.role} actors")
    return problems


def _place_role(started: StartedRole, num_nodes: int) -> list[ActorSpec]:
    role, settings = started.role, started.settings
    nodes = tuple(range(num_nodes)) if settings.nodes == "*" else settings.nodes
    is_gang = role == "trainer"
    devices = settings.device_ids
    actors: list[ActorSpec] = []
    for group_rank, node in enumerate(nodes):
        first = 0
        for local in range(settings.count):
            index = node if role == "memory" else group_rank * settings.count + local
            own_devices = devices[first : first + started.num_devices(local)]
            first += len(own_devices)
            rank = RankSpec(
                gang=role, rank=index, world_size=len(nodes) * settings.count, local_rank=local,
                local_world_size=settings.count, group_rank=group_rank,
            )  # fmt: skip
            spec = make_spec(role, settings, index, node, own_devices, started.prefix)
            actors.append(replace(spec, visible_devices=devices, rank=rank) if is_gang else spec)
    return actors


def make_spec(
    role: RoleName, settings: RoleSettings, index: int, node: int, devices: tuple[int, ...], prefix: str = ""
) -> ActorSpec:
    """One actor at its place, with its own devices, in no gang. `prefix`: of its name; empty: the role."""
    return ActorSpec(
        name=f"{prefix or role}/{index}" if role in NUMBERED else role, role=role,
        kind=getattr(settings, "kind", role), index=index, node=node, devices=devices, visible_devices=devices,
        python=settings.python, env=dict(settings.env), threads=settings.threads, max_restarts=settings.max_restarts,
        when_hung=settings.when_hung, quorum=settings.quorum if isinstance(settings, RolloutRole) else 0,
    )  # fmt: skip


def server_of(actor: ActorSpec, config: RunConfig) -> str:
    """Address of this actor's attached server; empty: it launches its own."""
    urls = config.engine.attach
    return actor.attach if actor.attach or not urls else urls[actor.index % len(urls)]


@dataclass(slots=True)
class RunActor:
    """One actor; the facts concern its newest attempt."""

    spec: ActorSpec
    pid: int = 0
    epoch: int = 0
    started_s: float = 0.0
    started_wall_s: float = 0.0
    gone_by_s: float = math.inf
    """When its process, which has to end, must have vanished."""

    @property
    def process(self) -> str:
        """Process and node in words, for a person who looks for it."""
        return f"{self.spec.name} (process {self.pid or 'unknown'} on node {self.spec.node})"


class RunActors(dict[str, RunActor]):
    """All actors of the run by their names, in start order."""

    @property
    def specs(self) -> tuple[ActorSpec, ...]:
        return tuple(member.spec for member in self.values())

    def on_node(self, node: int) -> list[str]:
        return [name for name, member in self.items() if member.spec.node == node]


WHY_FIXED: dict[str, str] = {
    "trainer": "its ranks form one gang, whose size is part of how parameters and optimizer are divided",
    "memory": "each node with shared devices has one",
    "model": "the run file says how many there are",
}


@dataclass(frozen=True, slots=True)
class Present:
    """Actors and nodes of a live run."""

    actors: tuple[ActorSpec, ...]
    nodes: tuple[int, ...]
    """Nodes that are members now."""
    leaving: tuple[ActorSpec, ...] = ()
    """Actors about to leave: their names, devices and servers are in use until they are gone."""
    foreign_names: Collection[str] = ()
    """Of actors that other programs host."""
    late: Collection[int] = ()
    """Nodes that came late: they may have rollout actors whatever `roles.rollout.nodes` says."""


def scale(
    config: RunConfig, role: str, count: int, present: Present, devices: str = "", attach: str = "", *,
    staffs_node: bool = False,
) -> tuple[list[ActorSpec], list[str]]:  # fmt: skip
    """How to reach `count` actors of the role in the whole run: those to start, or the names of those to end, highest
    number first. `devices`: GPUs of each node, beside the role's own, that new actors may use. `attach`: servers for
    new actors, "URL,URL,...". `staffs_node`: new ones have the shapes of a node's actors, in their order; else each has
    the first one that fits. Raises ConfigError with the reason."""
    check_has_rollouts(config)
    check_leaver(config, role, count)
    actors = sorted((actor for actor in present.actors if actor.role == role), key=lambda actor: actor.index)
    if count <= len(actors):
        return [], [actor.name for actor in reversed(actors[count:])]
    if devices and choose_channel(config) == "cuda_ipc" and (config.engine.attach or not has_reader(config, 0)):
        raise ConfigError(
            "weights travel by cuda_ipc: an engine on a GPU without a trainer rank reads memory of the first rank, and "
            "this run was started with none that does",
            remedy="launch servers, and name such a GPU, or that of the first rank, in roles.rollout.devices; or use "
            'weights.channel = "nccl": both in the next run',
        )
    joining: list[ActorSpec] = []
    for server in _free_servers(config, attach, count - len(actors), (*actors, *present.leaving)):
        spec = _one_more(config, present, joining, devices, [len(joining)] if staffs_node else None)
        joining.append(replace(spec, attach=server))
    return joining, []


def staff_node(config: RunConfig, node: int, present: Present) -> tuple[ActorSpec, ...]:
    """The rollout actors of a late node, as many as the role has on each. Raises ConfigError with the reason."""
    num_actors = sum(actor.role == "rollout" for actor in present.actors)
    on_node = dataclasses.replace(present, nodes=(node,))
    return tuple(scale(config, "rollout", num_actors + config.roles.rollout.count, on_node, staffs_node=True)[0])


def distance_problem(config: RunConfig, is_same_machine: bool) -> str:
    """Why new weights cannot reach engines on a late node; empty if they can."""
    channel = choose_channel(config)
    if channel == "cuda_ipc" or (channel == "shm" and not is_same_machine):
        why = {"shm": "memory of the trainer's machine", "cuda_ipc": "memory of the trainer's GPUs"}[channel]
        return (
            f"weights travel by {channel} in this run: engines read {why}, which another machine cannot -- start the "
            'run with weights.channel = "disk" (its directory must be on a shared file system), "tcp", or "nccl" '
            "for servers on GPUs"
        )
    return ""


def check_has_rollouts(config: RunConfig) -> None:
    """Raises ConfigError for a run without rollout actors."""
    if config.data.is_recorded:
        raise ConfigError(
            'this run trains on recorded groups (data.preset = "recorded"): no rollout actor takes part',
            remedy="start another run, on prompts",
        )


def check_leaver(config: RunConfig, role: str, num_left: int) -> None:
    """Check that the role may shrink to that number. Raises ConfigError."""
    settings = config.roles.rollout
    if role != "rollout":
        why = WHY_FIXED.get(role, "a run has exactly one")
        raise ConfigError(f"no {role} can join or leave a run: {why}", remedy="only rollout actors join and leave")
    if config.memory.share == "switch":
        raise ConfigError(
            "rollout actors and trainer take turns on their devices: who takes part is fixed for the run",
            remedy='use memory.share = "none" in the next run',
        )
    if num_left < max(1, settings.quorum):
        why = f"roles.rollout.quorum = {settings.quorum}" if settings.quorum > 1 else "a run needs one that generates"
        raise ConfigError(f"{num_left} rollout actors are too few: {why}", remedy="`myxa pause` stops generation")


def _free_servers(config: RunConfig, attach: str, num: int, holders: Sequence[ActorSpec]) -> Sequence[str]:
    """One for each of `num` new actors: of `attach`, else of the run file; empty texts where servers are launched."""
    configured = config.engine.attach if config.roles.rollout.kind == "sglang" else ()
    if not configured and attach:
        raise ConfigError("this run has no attached servers", remedy="leave --attach out: new actors have their own")
    if not configured:
        return [""] * num
    with raised_as(ConfigError, "--attach", ValueError, remedy="name each server once, as http://host:port"):
        urls = check_urls(tuple(part.strip() for part in attach.split(",") if part.strip()))
    in_use = {server_of(actor, config).rstrip("/") for actor in holders}
    free_urls = [url for url in urls or configured if url.rstrip("/") not in in_use]
    if len(free_urls) < num or len(urls) > num:
        raise _no_room(f"{num} more rollout actors need a server each", free_urls, holders, "servers with --attach")
    return free_urls[:num]


def _one_more(
    config: RunConfig, present: Present, joining: Sequence[ActorSpec], devices: str, places: Sequence[int] | None
) -> ActorSpec:
    """One beside those that are there and `joining`, of the lowest free number whose shape fits. `places`: among the
    actors of a node, whose shapes it may have; None: any."""
    settings, staying = config.roles.rollout, (*present.actors, *joining)
    holders, extra_devices = (*staying, *present.leaving), parse_devices(devices) if devices else ()
    numbers = {number_of(name) for name in (*(actor.name for actor in holders), *present.foreign_names)}
    (started,) = (role for role in started_roles(config) if role.role == "rollout")
    num = len(started.sizes) or 1
    lowest = sorted(
        next(number for number in itertools.count(place % num, num) if number not in numbers)
        for place in (range(num) if places is None else places)
    )
    nodes = present.nodes if settings.nodes == "*" else (*settings.nodes, *present.late)
    load = {
        node: sum(actor.role == "rollout" and actor.node == node for actor in staying)
        for node in present.nodes
        if node in nodes
    }
    free_devices = {node: _free_devices(settings.device_ids, extra_devices, holders, node) for node in load}
    shares = {index: started.num_devices(index) for index in lowest}
    for index, share in shares.items():
        if roomy := [node for node in free_devices if len(free_devices[node]) >= share]:
            node = min(roomy, key=lambda node: (load[node], node))
            return make_spec("rollout", settings, index, node, free_devices[node][:share])
    needed = " or ".join(map(str, sorted({*shares.values()} - {0})))
    gpus = f"{needed} GPU{'' if needed == '1' else 's'} on " if needed else ""
    need = f"a rollout actor of this run needs {gpus}a node of roles.rollout.nodes"
    shown = [f"node {node}: {', '.join(map(str, numbers)) or 'none'}" for node, numbers in free_devices.items()]
    raise _no_room(need, shown, holders, "GPUs with --devices")


def _free_devices(
    role_devices: tuple[int, ...], extra_devices: tuple[int, ...], actors: Sequence[ActorSpec], node: int
) -> tuple[int, ...]:
    """Unused GPUs of the role, then unused ones of those that were named."""
    on_node = [actor for actor in actors if actor.node == node]
    used = {device for actor in on_node if actor.role == "rollout" for device in actor.devices}
    used_by_any = {device for actor in on_node for device in (*actor.devices, *actor.visible_devices)}
    spare = [device for device in extra_devices if device not in used_by_any and device not in role_devices]
    return (*(device for device in role_devices if device not in used), *spare)


def _no_room(need: str, free: Iterable[str], holders: Iterable[ActorSpec], resources: str) -> ConfigError:
    names = ", ".join(actor.name for actor in holders if actor.role == "rollout") or "none is there"
    return ConfigError(
        f"{need}, free are {'; '.join(free) or 'none'}",
        remedy=f"name as many unused {resources}, or wait until one that holds some is gone: {names}",
    )


def number_of(name: str) -> int | None:
    """7 for "rollout/7"; None: not the name of a rollout actor."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])
