"""Memory of each device in each phase of the run, against its size. Pure.

Without `memory.share = "switch"` there is one phase, in which everything is there at once. With it there are three: the
trainer's turn (the engine keeps its context), the hand-over (weights of both and the staged version), the engine's turn
(the trainer keeps its context). Devices of one kind are alike, so one of each role set is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...actors.models.model_config import ModelConfig
from ...core.config import RunConfig
from ...core.errors import ConfigError, EngineError, MyxaError
from ..actor_spec import ActorSpec
from ..composition.memory_parts import MIB, takes_turns
from ..memory_part import Part, size_text, total
from ..preflight.finding import ConfigFinding
from .engine_memory import EngineEstimate, embedded_memory, server_memory
from .picture import used_devices
from .trainer_memory import RankMemory, trainer_memory

STAYS = frozenset({"context", "communicators"})
"""Of who has not its turn."""
TIGHT = 0.95
"""Of a device; above, what is left out here may not fit."""


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """One kind of device in one phase."""

    devices: str
    """Like "node 0, GPU 0-3"."""
    phase: str
    parts: tuple[Part, ...]
    capacity_bytes: int | None
    """None: not known."""

    @property
    def num_bytes(self) -> int:
        """All parts."""
        return total(self.parts)

    @property
    def fits(self) -> bool:
        """Whether there is room, as far as is known."""
        return self.capacity_bytes is None or self.num_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that can be said of memory."""

    loads: tuple[DeviceLoad, ...]
    engine: EngineEstimate | None
    trainer: RankMemory


@dataclass(frozen=True, slots=True)
class Capacities:
    """Bytes of a GPU and of this host's memory; None: not known."""

    gpu: int | None
    host: int | None


def memory_of(
    config: RunConfig, model: ModelConfig, actors: Sequence[ActorSpec], capacities: Capacities
) -> tuple[Memory, list[ConfigFinding]]:
    """All kinds of devices and phases, and what does not fit."""
    trainers = [actor for actor in actors if actor.role == "trainer"]
    rollouts = [actor for actor in actors if actor.role == "rollout"]
    trainer = trainer_memory(config, model, max(1, len(trainers)))
    engine, findings = None, list[ConfigFinding]()
    if _launches_servers(config) and rollouts and rollouts[0].devices:
        engine = server_memory(config, model, len(rollouts[0].devices), capacities.gpu)
    loads = list(_gpu_loads(config, trainers, rollouts, trainer, engine, capacities.gpu))
    try:
        loads += _host_loads(config, model, trainer, capacities.host)
    except EngineError as error:
        findings.append(ConfigFinding("engine.context_length", error))
    findings += [_too_full(config, load) for load in loads if not load.fits or _is_tight(load)]
    findings += _engine_findings(config, engine, capacities.gpu)
    findings += _workspace_findings(config, trainer)
    return Memory(tuple(loads), engine, trainer), findings


def _launches_servers(config: RunConfig) -> bool:
    return config.roles.rollout.kind == "sglang" and not config.engine.attach and config.algo.kind != "sft"


# -- GPUs --------------------------------------------------------------------------------------------------------------


def _gpu_loads(
    config: RunConfig,
    trainers: Sequence[ActorSpec],
    rollouts: Sequence[ActorSpec],
    trainer: RankMemory,
    engine: EngineEstimate | None,
    capacity: int | None,
) -> list[DeviceLoad]:
    used_by_trainer = {(actor.node, device) for actor in trainers for device in used_devices(actor)}
    serving = rollouts if engine else ()
    used_by_engine = {(actor.node, device) for actor in serving for device in actor.devices}
    mine = tuple(part.of("trainer") for part in trainer.parts)
    theirs = tuple(part.of("rollout") for part in engine.parts) if engine else ()
    kinds: tuple[tuple[set[tuple[int, int]], tuple[Part, ...], tuple[Part, ...]], ...] = (
        (used_by_trainer & used_by_engine, mine, theirs),
        (used_by_trainer - used_by_engine, mine, ()),
        (used_by_engine - used_by_trainer, (), theirs),
    )
    loads: list[DeviceLoad] = []
    for devices, first, second in kinds:
        if devices:
            name = device_names(devices)
            phases = _phases(config, first, second)
            loads += [DeviceLoad(name, phase, parts, capacity) for phase, parts in phases]
    return loads


def _phases(config: RunConfig, mine: tuple[Part, ...], theirs: tuple[Part, ...]) -> list[tuple[str, tuple[Part, ...]]]:
    if not (takes_turns(config) and mine and theirs):
        return [("all the time", (*mine, *theirs))]
    reserve = (Part("reserve", config.memory.reserve_mb * MIB, "memory.reserve_mb"),)
    stays_mine = tuple(part for part in mine if part.name in STAYS)
    stays_theirs = tuple(part for part in theirs if part.name in STAYS)
    handed = tuple(part for part in mine if part.name in ("weights", "staged versions"))
    taken = tuple(part for part in theirs if part.name in ("weights", "update"))
    return [
        ("trainer's turn", (*mine, *stays_theirs, *reserve)),
        ("hand-over", (*handed, *taken, *stays_mine, *stays_theirs, *reserve)),
        ("engine's turn", (*(part for part in theirs if part.name != "update"), *stays_mine, *reserve)),
    ]


def device_names(devices: set[tuple[int, int]]) -> str:
    """{(0, 0), (0, 1), (1, 0)} -> "node 0: GPU 0-1; node 1: GPU 0"."""
    by_node: dict[int, list[int]] = {}
    for node, device in sorted(devices):
        by_node.setdefault(node, []).append(device)
    return "; ".join(f"node {node}: GPU {ranges(numbers)}" for node, numbers in by_node.items())


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# -- the host ----------------------------------------------------------------------------------------------------------


def _host_loads(config: RunConfig, model: ModelConfig, trainer: RankMemory, available: int | None) -> list[DeviceLoad]:
    """What ranks and engines on the CPU take of a node's memory, when everything is at its fullest."""
    parts: list[Part] = []
    if not config.roles.trainer.device_ids:
        ranks = config.roles.trainer.count
        parts += [_times(part.of("trainer"), ranks, "ranks") for part in trainer.parts]
    if config.roles.rollout.kind == "embedded" and config.algo.kind != "sft":
        count = config.roles.rollout.count
        room = available if available is not None else 1 << 62
        parts += [_times(part.of("rollout"), count, "engines") for part in embedded_memory(config, model, room)]
    if not parts:
        return []
    return [DeviceLoad("each node's host memory", "all the time", tuple(parts), available)]


def _times(part: Part, count: int, what: str) -> Part:
    if count == 1:
        return part
    return Part(part.name, part.num_bytes * count, f"{count} {what} x ({part.how})", part.owner)


# -- findings ----------------------------------------------------------------------------------------------------------


def _is_tight(load: DeviceLoad) -> bool:
    return load.capacity_bytes is not None and load.num_bytes > TIGHT * load.capacity_bytes


def _too_full(config: RunConfig, load: DeviceLoad) -> ConfigFinding:
    assert load.capacity_bytes is not None
    largest = max(load.parts, key=lambda part: part.num_bytes)
    key, remedy = _remedy(config, largest)
    needs, has = size_text(load.num_bytes), size_text(load.capacity_bytes)
    on_host = load.devices.endswith("host memory")
    if load.fits:
        text = f"{key}: {load.devices}, {load.phase}: {needs} of {has} leaves little for what is not counted here"
        return ConfigFinding(key, ConfigError(text, remedy=remedy), is_warning=True)
    text = (
        f"{key}: {load.devices}, {load.phase}: {needs} do not fit into {has}; most of it is the {largest.owner}'s "
        f"{largest.name}, {size_text(largest.num_bytes)}"
    )
    return ConfigFinding(key, ConfigError(text, remedy=remedy), is_warning=on_host)


def _remedy(config: RunConfig, largest: Part) -> tuple[str, str]:
    """The key to turn and how, by the largest part."""
    is_megatron = config.roles.trainer.kind == "megatron"
    if largest.name in ("activations", "logits"):
        again = 'megatron.recompute = "full"' if is_megatron else "trainer.activation_checkpointing = true"
        return "trainer.max_tokens_per_microbatch", f"lower it, or set {again}"
    if largest.name == "kv cache":
        if config.roles.rollout.kind == "sglang":
            return "sglang.mem_fraction_static", "lower it, or give trainer and engine devices of their own"
        return "engine.max_running", "lower it, or engine.context_length"
    if largest.owner == "rollout":
        return "roles.rollout.devices", "give the engine more GPUs"
    more = "megatron.tp, more ranks" if is_megatron else 'more ranks with trainer.strategy = "fsdp"'
    return "roles.trainer.devices", f'cut the model further ({more}), or take turns: memory.share = "switch"'


def _engine_findings(config: RunConfig, engine: EngineEstimate | None, capacity: int | None) -> list[ConfigFinding]:
    if engine is None or capacity is None:
        return []
    key = "sglang.mem_fraction_static" if engine.is_share_known else "roles.rollout.devices"
    error: MyxaError
    if engine.full_sequences < 1:
        error = ConfigError(
            f"{key}: after the weights there is room for {engine.cache_tokens:,} tokens in the cache, and one sequence "
            f"may have {engine.context_length:,}",
            remedy="raise it, lower engine.context_length, or give the engine more GPUs",
        )
        return [ConfigFinding(key, error)]
    if engine.full_sequences < config.rollout.num_samples:
        error = ConfigError(
            f"{key}: the cache holds {engine.cache_tokens:,} tokens, {engine.full_sequences} sequences of the whole "
            f"context: not the {config.rollout.num_samples} samples of one group",
            remedy="set engine.context_length to what answers need, or give the engine more memory",
        )
        return [ConfigFinding(key, error, is_warning=True)]
    return []


def _workspace_findings(config: RunConfig, trainer: RankMemory) -> list[ConfigFinding]:
    """The room that the memory manager makes for a step, against what the step will take."""
    if not (takes_turns(config) and config.memory.workspace_mb):
        return []
    needs = total(part for part in trainer.parts if part.name in ("activations", "logits"))
    if needs <= config.memory.workspace_mb * MIB:
        return []
    error = ConfigError(
        f"memory.workspace_mb = {config.memory.workspace_mb}: a micro-batch takes about {size_text(needs)}",
        remedy=f"set it to {-(-needs // MIB // 256) * 256 + 256}, or lower trainer.max_tokens_per_microbatch",
    )
    return [ConfigFinding("memory.workspace_mb", error, is_warning=True)]
