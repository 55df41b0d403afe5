"""How many actors of a role there are to be from now on: who joins and where, and who leaves. Pure.

Only rollout actors come and go. Must not know processes; refuses with the reason what cannot be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from ...core.config import RoleName, RunConfig, parse_devices
from ...core.errors import ConfigError
from ..actor_spec import ActorSpec
from ..composition.weight_channels import choose_channel
from .attached_servers import deal_out
from .placement import make_spec
from .reserved_names import number_of
from .roster import ActorRecord

WHY_FIXED: dict[str, str] = {
    "trainer": "its ranks form one gang, whose size is part of how parameters and optimizer are divided",
    "memory": "each node with shared devices has one",
}


@dataclass(frozen=True, slots=True)
class Present:
    """Who is there and what is free."""

    actors: tuple[ActorSpec, ...]
    """All actors of the run that are there and stay."""
    nodes: tuple[int, ...]
    """Nodes that take part now."""
    taken: Collection[str] = ()
    """Further names that nobody may get."""
    leaving: tuple[ActorSpec, ...] = ()
    """Actors on their way out: their names and devices are in use until they are gone."""
    late: Mapping[int, str] = field(default_factory=dict[int, str])
    """Nodes among these that came later, and the GPUs that they named ("": those of the role). Rollout actors may be
    on them whatever `roles.rollout.nodes` says: that is what they came for."""

    @classmethod
    def of(
        cls,
        roster: Sequence[ActorRecord],
        specs: Mapping[str, ActorSpec],
        nodes: tuple[int, ...],
        foreign_names: Collection[str] = (),
        late: Mapping[int, str] | None = None,
    ) -> Present:
        """As the run supervisor knows it; `foreign_names`: of actors that other programs host."""
        leaving = [record.name for record in roster if record.is_leaving]
        return cls(
            actors=tuple(specs[r.name] for r in roster if not (r.is_over or r.is_leaving)),
            nodes=nodes,
            taken={*foreign_names, *leaving},
            leaving=tuple(specs[name] for name in leaving),
            late=dict(late or {}),
        )


@dataclass(frozen=True, slots=True)
class Staffing:
    """What is to be done."""

    joining: tuple[ActorSpec, ...] = ()
    leaving: tuple[str, ...] = ()
    """The highest number first."""


def staff(
    config: RunConfig, role: RoleName, count: int, present: Present, devices: str = "", attach: str = ""
) -> Staffing:
    """How to come to `count` actors of the role in the whole run. `devices`: GPUs of each node, beside the role's own,
    that new actors may use. `attach`: servers for new actors, "URL,URL,...". Raises ConfigError with the reason if that
    cannot be."""
    there = [actor for actor in present.actors if actor.role == role]
    _check(config, role, count, len(there))
    if count <= len(there):
        ordered = sorted(there, key=lambda actor: actor.index, reverse=True)
        return Staffing(leaving=tuple(actor.name for actor in ordered[: len(there) - count]))
    _check_growth(config, devices)
    given = parse_devices(devices) if devices else ()
    joining: list[ActorSpec] = []
    for servers in deal_out(config, attach, count - len(there), (*there, *present.leaving)):
        one = _one_more(config, (*present.actors, *joining), present, given)
        joining.append(replace(one, attach=servers))
    return Staffing(joining=tuple(joining))


def staff_node(config: RunConfig, node: int, count: int, present: Present) -> tuple[ActorSpec, ...]:
    """The rollout actors of a node that came late; `count` 0: as many as the role has on every node. Raises ConfigError
    with the reason if such a run cannot have them there."""
    wanted = count or config.roles.rollout.count
    there = sum(actor.role == "rollout" for actor in present.actors)
    check_leaver(config, "rollout", there + wanted)
    deal_out(config, "", wanted, [actor for actor in present.actors if actor.role == "rollout"])
    joining: list[ActorSpec] = []
    for _ in range(wanted):
        joining.append(_one_more(config, (*present.actors, *joining), present, (), (node,)))
    return tuple(joining)


def check_distance(config: RunConfig, is_same_machine: bool) -> None:
    """Whether new weights can reach engines on a node that came late. Raises ConfigError with the reason."""
    channel = choose_channel(config)
    if channel == "cuda_ipc" or (channel == "shm" and not is_same_machine):
        why = {"shm": "memory of the trainer's machine", "cuda_ipc": "memory of the trainer's GPUs"}[channel]
        raise ConfigError(
            f"weights travel by {channel} in this run: engines read {why}, which another machine cannot",
            remedy='start the run with weights.channel = "disk" (its directory must be on a shared file system), '
            'or "nccl" for servers on GPUs',
        )


def check_leaver(config: RunConfig, role: RoleName, num_left: int) -> None:
    """Whether so few are enough. Raises ConfigError."""
    settings = config.roles.rollout
    if role != "rollout":
        raise ConfigError(f"{role} cannot leave a run: {WHY_FIXED.get(role, 'a run has exactly one')}")
    if settings.restart == "gang":
        raise ConfigError(
            'the rollout actors are a gang (roles.rollout.restart = "gang"): none of them can go or come alone',
            remedy='use restart = "one" in the next run',
        )
    if config.memory.share == "switch":
        raise ConfigError(
            "rollout actors and trainer take turns on their devices: who takes part is fixed for the run",
            remedy='use memory.share = "none" in the next run',
        )
    if num_left < max(1, settings.quorum):
        why = f"roles.rollout.quorum = {settings.quorum}" if settings.quorum > 1 else "a run needs one that generates"
        raise ConfigError(f"{num_left} rollout actors are too few: {why}", remedy="`myxa pause` stops generation")


def _check(config: RunConfig, role: RoleName, count: int, num_there: int) -> None:
    if role != "rollout":
        why = WHY_FIXED.get(role, "a run has exactly one")
        raise ConfigError(f"the number of {role} actors is fixed: {why}", remedy="only rollout actors come and go")
    check_leaver(config, role, count)


def _check_growth(config: RunConfig, devices: str) -> None:
    if devices and choose_channel(config) == "cuda_ipc":
        raise ConfigError(
            "weights travel by cuda_ipc, which needs every engine on a GPU of the trainer; another one has none there",
            remedy='use weights.channel = "nccl" in the next run',
        )


def _one_more(
    config: RunConfig,
    actors: Sequence[ActorSpec],
    present: Present,
    given: tuple[int, ...],
    only: tuple[int, ...] = (),
) -> ActorSpec:
    settings = config.roles.rollout
    numbers = {number_of(name) for name in (*(actor.name for actor in actors), *present.taken)}
    index = next(number for number in range(len(numbers) + 1) if number not in numbers)
    wanted = present.nodes if settings.nodes == "*" else (*settings.nodes, *present.late)
    allowed = only or tuple(node for node in present.nodes if node in wanted)
    share = len(settings.device_ids) // settings.count
    load = {node: sum(actor.role == "rollout" and actor.node == node for actor in actors) for node in allowed}
    holders = (*actors, *present.leaving)
    own_of = {node: _devices_of(config, present, node) for node in allowed}
    free = {node: _free_devices(own_of[node], given, holders, node) for node in allowed}
    roomy = [node for node in sorted(allowed, key=lambda node: (load[node], node)) if len(free[node]) >= share]
    if not roomy:
        raise _no_room(share, free, given, present.leaving)
    node = roomy[0]
    return make_spec("rollout", settings, index, node, free[node][:share])


def _devices_of(config: RunConfig, present: Present, node: int) -> tuple[int, ...]:
    named = present.late.get(node, "")
    return parse_devices(named) if named else config.roles.rollout.device_ids


def _free_devices(
    own: tuple[int, ...], given: tuple[int, ...], actors: Sequence[ActorSpec], node: int
) -> tuple[int, ...]:
    """GPUs of the role that no rollout actor has, then those that were named and nobody has."""
    here = [actor for actor in actors if actor.node == node]
    used = {device for actor in here if actor.role == "rollout" for device in actor.devices}
    used_by_any = {device for actor in here for device in (*actor.devices, *actor.visible_devices)}
    spare = [device for device in given if device not in used_by_any and device not in own]
    return (*(device for device in own if device not in used), *spare)


def _no_room(
    share: int, free: dict[int, tuple[int, ...]], given: tuple[int, ...], leaving: Sequence[ActorSpec]
) -> ConfigError:
    if not free:
        return ConfigError("no node of roles.rollout.nodes takes part any more", remedy="start the run again")
    left = "; ".join(f"node {node}: {', '.join(map(str, own)) or 'none'}" for node, own in free.items())
    remedy = "name GPUs that nobody uses with --devices" if not given else "those of --devices are in use or too few"
    if names := ", ".join(actor.name for actor in leaving if actor.devices and actor.node in free):
        remedy = f"wait until {names} is gone, which still holds some; or {remedy}"
    return ConfigError(
        f"a rollout actor of this run needs {share} GPU{'s' if share > 1 else ''}, free are {left}", remedy=remedy
    )
