"""Estimates the memory of a run on each kind of device: trainer ranks, engines, and both against its size. Pure.

The estimate adds parts (`memory_part.Part`), each with the arithmetic it comes from. It reads configuration files of
models, no weights. From top to bottom: how parallelism cuts the model, activations of a step, a trainer rank, an
engine, then all devices in each phase of the run.

With `memory.share = "switch"` a run has three phases: the trainer's turn (the engine keeps its context), the hand-over
(weights of both and the staged version), the engine's turn (the trainer keeps its context). Otherwise everything is
on the device at the same time.

Not counted: fragments of the allocator, workspaces of libraries, activations of a prefill, attached servers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...actors.backends.megatron.layout import ParallelLayout
from ...actors.models.model_config import ModelConfig
from ...actors.models.second_model import critic_config, critic_parameters, reference_parameters
from ...core.config import RunConfig
from ...core.errors import ConfigError, EngineError, MyxaError
from ...memory.budget import DEFAULT_SHARE, ITEM_BYTES, EngineBudget, plan_engine
from ..actor_spec import ActorSpec
from ..composition.memory_parts import GRAPH_BYTES, takes_turns
from ..composition.weight_channels import choose_channel, is_between_devices
from ..memory_part import GIB, MIB, Part, count_text, size_text, total
from ..preflight.finding import ConfigFinding
from .batch import num_micro_batches

# -- how parallelism cuts the model ------------------------------------------------------------------------------------
#
# Counted over the shapes of the model's tensors (`ModelConfig.tensor_shapes`), as Megatron-core cuts them: matrices by
# tp, experts by ep and etp, vectors and routers whole; layers in equal runs over pipeline stages, the embedding on the
# first stage, final norm and head on the last, which has a copy of a tied embedding.

LAYER = re.compile(r"model\.layers\.(\d+)\.")
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Parameters of one rank."""

    dense: int
    """Shared by data parallelism over tp, pp and cp."""
    expert: int
    """Shared by data parallelism over ep, etp and pp."""

    @property
    def num_parameters(self) -> int:
        """All of them."""
        return self.dense + self.expert


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A pipeline stage."""

    number: int
    num_layers: int
    is_first: bool
    is_last: bool


def stages(model: ModelConfig, layout: ParallelLayout) -> tuple[PipelineStage, ...]:
    """All stages; layers that do not divide go to the first ones."""
    share, extra = divmod(model.num_layers, layout.pp)
    return tuple(
        PipelineStage(number, share + (number < extra), number == 0, number == layout.pp - 1)
        for number in range(layout.pp)
    )


def weights_of_stage(model: ModelConfig, layout: ParallelLayout, stage: PipelineStage) -> RankWeights:
    """What a rank of that stage holds."""
    share, extra = divmod(model.num_layers, layout.pp)
    start = stage.number * share + min(stage.number, extra)
    mine = range(start, start + stage.num_layers)
    dense = expert = 0
    for name, shape in model.tensor_shapes().items():
        match = LAYER.match(name)
        if match is not None:
            if int(match[1]) not in mine:
                continue
        elif not _is_outside_layer_here(name, model, stage):
            continue
        size = math.prod(shape)
        if ".experts." in name:
            expert += size // (layout.ep * layout.etp)
        elif len(shape) == 2 and not name.endswith(".mlp.gate.weight"):
            dense += size // layout.tp
        else:
            dense += size
    return RankWeights(dense, expert)


def _is_outside_layer_here(name: str, model: ModelConfig, stage: PipelineStage) -> bool:
    if name == EMBEDDING:
        return stage.is_first or (stage.is_last and model.tie_word_embeddings)
    return stage.is_last


# -- activations of a step ---------------------------------------------------------------------------------------------
#
# What a layer keeps for its backward pass, for each token, in numbers of the compute type (h: hidden size, f: inner
# width of the MLP, q, k, v: widths of the projections; attention is flash attention and keeps no scores):
#
#     torch     4h   input and output of both norms          megatron   4h
#               2q + 2k + v   before and after rotation                 3(q + k + v)   projection, normed, rotated
#               q    what attention gave                                q
#               4f   gate, up, silu(gate), their product                3f   gate and up (fused SwiGLU), their product
#
# The scheme is that of Korthikanti et al. (arXiv 2205.05198, section 4), without dropout, biases and attention scores.
# Which copies are kept follows `torch_backend/model.py` and `megatron/provider.py`; the 3 of Megatron's attention is
# chosen so that it matches four measurements of docs/benchmarks.md (`train`), see tests/plan/test_memory_estimate.py.
#
# Scoring (`backends/vocab_scores.py`) makes logits in chunks: CHUNK numbers at 2 bytes, once more in float32 and their
# gradient, together 8 bytes each in bfloat16 and 12 in float32; and the gradient of the head in float32.

CHUNK_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 25}
"""As in `backends/vocab_scores.py`, which imports torch; a test compares them."""
LOGIT_BYTES = {2: 8, 4: 12}
"""Bytes a logit of the chunk, by the bytes of the compute type."""
UNCUT = 4
"""Of h: what tensor parallelism leaves whole without sequence parallelism."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """One forward and backward pass of a rank."""

    num_tokens: int
    """Of a micro-batch, all its samples."""
    num_micro_batches: int
    """Of a step, on one data-parallel replica."""
    item_bytes: int
    """Of the compute type."""
    on_gpu: bool
    recomputes_layers: bool


def microbatch_tokens(config: RunConfig, model: ModelConfig) -> int:
    """Tokens of the largest micro-batch: the limit, or one sample that is longer than it (its prompt not counted)."""
    limit = config.trainer.max_tokens_per_microbatch
    if config.algo.kind == "sft":
        return limit
    context = config.engine.context_length or model.context_length
    return max(limit, min(context, config.rollout.max_new_tokens * config.rollout.max_turns))


def layer_numbers(model: ModelConfig, kind: str, layout: ParallelLayout) -> float:
    """Numbers that one layer keeps of one token on one rank, by the table above."""
    q, kv = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    k = kv // 2
    inner = model.intermediate_size
    if model.num_experts:
        # Every token goes through its chosen experts, wherever they are: on average so many tokens arrive on a rank.
        inner = model.experts_per_token * model.moe_intermediate_size
    if kind == "megatron":
        cut = 3 * (q + kv) + q + 3 * inner
    else:
        cut = 2 * q + 2 * k + k + q + 4 * inner
    stream = UNCUT * model.hidden_size
    return cut / layout.tp + (stream / layout.tp if layout.sequence_parallel else stream)


def activation_parts(
    model: ModelConfig, kind: str, layout: ParallelLayout, stage: PipelineStage, shape: StepShape
) -> list[Part]:
    """Activations of a rank of that stage, and what scoring takes on the last one."""
    tokens = -(-shape.num_tokens // layout.cp)
    each = layer_numbers(model, kind, layout) * shape.item_bytes
    in_flight = max(1, min(layout.pp - stage.number, shape.num_micro_batches))
    if shape.recomputes_layers:
        kept = stage.num_layers * model.hidden_size * shape.item_bytes * in_flight
        size, how = (kept + each) * tokens, f"{stage.num_layers} layers' inputs and one whole layer"
    else:
        size = stage.num_layers * each * tokens * in_flight
        how = f"{stage.num_layers} layers x {each / 1000:.1f} kB a token"
    how += f" x {count_text(tokens)} tokens" + (f" x {in_flight} micro-batches in flight" if in_flight > 1 else "")
    parts = [Part("activations", int(size), how)]
    if stage.is_last:
        parts.append(_scoring(model, layout, shape, tokens))
    return parts


def _scoring(model: ModelConfig, layout: ParallelLayout, shape: StepShape, tokens: int) -> Part:
    width = model.vocab_size // layout.tp
    chunk = min(CHUNK_LOGITS["cuda" if shape.on_gpu else "cpu"], tokens * width)
    head = 4 * width * model.hidden_size
    each = LOGIT_BYTES[shape.item_bytes]
    how = f"{count_text(chunk)} logits at a time x {each} B + gradient of the head 4 B x {count_text(head / 4)}"
    return Part("logits", each * chunk + head, how)


# -- a trainer rank ----------------------------------------------------------------------------------------------------
#
# Bytes a parameter (n of this rank, N of the model, dp data-parallel replicas):
#
#     torch, ddp     masters 4, gradients 4, AdamW's moments 8, in bfloat16 2 more for the weights as they are used
#     torch, fsdp    the same / ranks, and the largest unit (a layer, or embedding and head) gathered twice
#     megatron       weights 2 (bfloat16) or 4, main gradients 4, masters 4 (bfloat16) and moments 8; the last two / dp
#                    with a distributed optimizer (Megatron-core's own table: "theoretical memory" = 18 bytes a
#                    parameter, 6 + 12 / dp when distributed)
#
# `planned` of both backends' offload.py gives the memory manager the same, except that experts are cut here as they
# really are. A reference model (algo.kl_coef) is one more set of weights, for the torch trainer of its own size. A
# critic is a second trained model; its pass follows the policy's pass. Weights that travel between devices are staged:
# a copy in the engine's number type for each version in flight. A CUDA context took 0.8 GiB, an NCCL group 0.65 GiB
# where it was measured (docs/benchmarks.md, `memory_gang` and `memory_communicators`).

CONTEXT_BYTES = int(0.8 * GIB)
GROUP_BYTES = int(0.65 * GIB)
SHARING_BUCKET_BYTES = 256 * MIB
"""Of the torch trainer's own gradient exchange (`torch_backend/parallel.py`)."""
VERSIONS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The fullest rank's parts, by pipeline stage."""

    stage: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """All parts."""
        return total(self.parts)


def trainer_memory(config: RunConfig, model: ModelConfig, world_size: int) -> RankMemory:
    """Of the rank that needs most."""
    on_gpu = bool(config.roles.trainer.device_ids)
    found = [
        RankMemory(stage.number, tuple(_rank_parts(config, model, world_size, stage, on_gpu=on_gpu)))
        for stage in stages(model, trainer_layout(config))
    ]
    return max(found, key=lambda rank: rank.num_bytes)


def trainer_layout(config: RunConfig) -> ParallelLayout:
    """How the model is cut; the torch trainer does not cut it."""
    return ParallelLayout.of(config.megatron) if config.roles.trainer.kind == "megatron" else ParallelLayout()


def _rank_parts(
    config: RunConfig, model: ModelConfig, world_size: int, stage: PipelineStage, *, on_gpu: bool
) -> list[Part]:
    kind = config.roles.trainer.kind
    layout = trainer_layout(config)
    states = _megatron_states if kind == "megatron" else _torch_states
    parts = states(config, model, world_size, stage)
    shape = StepShape(
        num_tokens=microbatch_tokens(config, model),
        num_micro_batches=num_micro_batches(config, model, world_size),
        item_bytes=ITEM_BYTES[config.trainer.dtype],
        on_gpu=on_gpu,
        recomputes_layers=config.trainer.activation_checkpointing or config.megatron.recompute == "full",
    )
    passes = [activation_parts(model, kind, layout, stage, shape)]
    passes += [activation_parts(m, kind, layout, stages(m, layout)[0], shape) for m in _in_turn(config, model)[1:]]
    parts += max(passes, key=total)
    if is_between_devices(choose_channel(config)):
        parts.append(_staged(config, model))
    if on_gpu:
        parts += _device_parts(config, layout, world_size)
    return [part for part in parts if part.num_bytes]


def _torch_states(config: RunConfig, model: ModelConfig, world_size: int, stage: PipelineStage) -> list[Part]:
    num = model.num_parameters
    shards = world_size if config.trainer.strategy == "fsdp" else 1
    cut = f" / {shards} ranks" if shards > 1 else ""
    text = count_text(num)
    parts = [
        Part("weights", 4 * num // shards, f"float32 masters 4 B x {text}{cut}"),
        Part("gradients", 4 * num // shards, f"4 B x {text}{cut}"),
        Part("optimizer", 8 * num // shards, f"AdamW's two moments 8 B x {text}{cut}"),
    ]
    critic = critic_parameters(config.critic, model)
    if critic:
        parts.append(Part("critic", 16 * critic // shards, f"the same together 16 B x {count_text(critic)}{cut}"))
    if shards > 1:
        unit = max(
            max(2 * m.vocab_size * m.hidden_size, m.num_parameters // m.num_layers) for m in _in_turn(config, model)
        )
        parts.append(Part("gathered", 8 * unit, f"largest unit of {count_text(unit)}, gathered 4 B, twice"))
    elif config.trainer.dtype == "bfloat16":
        used = max(num, critic)
        parts.append(Part("weights in bfloat16", 2 * used, f"as products use them 2 B x {count_text(used)}"))
    if world_size > 1 and shards == 1:
        parts.append(Part("gradient exchange", SHARING_BUCKET_BYTES, "one bucket at a time"))
    if kept := reference_parameters(config.algo, model):
        parts.append(Part("reference model", 4 * kept // shards, f"4 B x {count_text(kept)}{cut}"))
    return parts


def _in_turn(config: RunConfig, model: ModelConfig) -> list[ModelConfig]:
    """The models whose passes follow one another: the larger pass counts."""
    if not config.critic.enabled:
        return [model]
    try:
        return [model, critic_config(config.critic, model)]
    except ConfigError:  # a finding of critic.path
        return [model]


def _megatron_states(config: RunConfig, model: ModelConfig, world_size: int, stage: PipelineStage) -> list[Part]:
    settings, layout = config.megatron, trainer_layout(config)
    held = weights_of_stage(model, layout, stage)
    item = ITEM_BYTES[config.trainer.dtype]
    num = count_text(held.num_parameters)
    dp = max(1, world_size // layout.model_size) * layout.cp if settings.distributed_optimizer else 1
    expert_dp = max(1, world_size // layout.expert_size) if settings.distributed_optimizer else 1
    state = (4 if item == 2 else 0) + 8
    here = 1.0 - settings.offload_optimizer
    optimizer = int(state * here * (held.dense / dp + held.expert / expert_dp))
    words = "masters and moments" if item == 2 else "moments"
    shared = f" / {dp} replicas" if dp > 1 else ""
    parts = [
        Part("weights", item * held.num_parameters, f"{config.trainer.dtype} {item} B x {num}"),
        Part("gradients", 4 * held.num_parameters, f"float32 4 B x {num}"),
        Part("optimizer", optimizer, f"{words} {state} B x {num}{shared}"),
    ]
    if config.algo.keeps_reference:
        parts.append(Part("reference model", item * held.num_parameters, f"{item} B x {num}"))
    return parts


def _staged(config: RunConfig, model: ModelConfig) -> Part:
    versions = 1 if takes_turns(config) else VERSIONS_IN_FLIGHT
    item = ITEM_BYTES[config.engine.dtype]
    how = f"{versions} version{'s' if versions > 1 else ''} x {item} B x {count_text(model.num_parameters)}"
    return Part("staged versions", versions * item * model.num_parameters, how)


def _device_parts(config: RunConfig, layout: ParallelLayout, world_size: int) -> list[Part]:
    groups = num_groups(layout, world_size) + (choose_channel(config) == "nccl")
    return [
        Part("communicators", groups * GROUP_BYTES, f"{groups} NCCL groups x 0.65 GiB"),
        Part("context", CONTEXT_BYTES, "of CUDA, as measured"),
    ]


def num_groups(layout: ParallelLayout, world_size: int) -> int:
    """Groups of more than one rank that a rank works in: the gang, and each kind of parallelism."""
    if world_size <= 1:
        return 0
    dp = max(1, world_size // layout.model_size)
    degrees = (dp * layout.cp, layout.tp, layout.pp, layout.cp, layout.ep, layout.etp)
    cut = [degree for degree in degrees if degree > 1]
    return 1 if cut == [world_size] else 1 + len(cut)


# -- an engine ---------------------------------------------------------------------------------------------------------
#
#     weights of SGLang           bytes of engine.dtype x N / GPUs of the server
#     a token in the cache        2 (key and value) x layers x kv heads / GPUs x head size x bytes
#     cache of SGLang             sglang.mem_fraction_static x device - weights (the fraction counts both)
#     update                      2 x weights.bucket_mb while new weights arrive
#     embedded engine             `memory/budget.py`: two sets of weights, cache at its fullest, in 0.6 of what is free
#
# SGLang keeps the rest of the device free for activations of a prefill and workspaces of attention kernels.

SGLANG_SHARE = 0.85
"""About what SGLang chooses when sglang.mem_fraction_static is not set; it looks at the device then."""


@dataclass(frozen=True, slots=True)
class EngineEstimate:
    """One engine on each of its GPUs."""

    parts: tuple[Part, ...]
    cache_bytes: int
    token_bytes: int
    """Of one token in the cache, on one GPU."""
    context_length: int
    max_running: int
    is_share_known: bool
    """Whether the run file says how much the server may take."""

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds."""
        return max(0, self.cache_bytes // self.token_bytes)

    @property
    def full_sequences(self) -> int:
        """Sequences of the whole context that fit."""
        return self.cache_tokens // self.context_length


def token_bytes(model: ModelConfig, dtype: str, num_gpus: int = 1) -> int:
    """Of one token in the cache, on each of so many GPUs."""
    heads = -(-model.num_kv_heads // num_gpus)
    return 2 * model.num_layers * heads * model.head_dim * ITEM_BYTES[dtype]


def server_memory(config: RunConfig, model: ModelConfig, num_gpus: int, capacity: int | None) -> EngineEstimate:
    """Of a launched SGLang server on each of its GPUs. `capacity`: bytes of a GPU, None: not known."""
    engine = config.engine
    item = ITEM_BYTES[engine.dtype]
    share = config.sglang.get("mem_fraction_static")
    is_known = isinstance(share, int | float)
    fraction = float(share) if isinstance(share, int | float) else SGLANG_SHARE
    weights = item * model.num_parameters // num_gpus
    per_token = token_bytes(model, engine.dtype, num_gpus)
    context = engine.context_length or model.context_length
    cut = f" / {num_gpus} GPUs" if num_gpus > 1 else ""
    if capacity is not None:
        cache = max(0, int(capacity * fraction) - weights)
        said = f"sglang.mem_fraction_static = {fraction:g}" if is_known else f"about {fraction:g}, SGLang's own choice,"
        how = f"{said} of the device, less weights: {count_text(cache // per_token)} tokens x {per_token / 1000:.0f} kB"
    else:
        cache = engine.max_running * context * per_token
        how = f"at most {engine.max_running} sequences x {context} tokens x {per_token / 1000:.0f} kB"
    parts = [
        Part("weights", weights, f"{engine.dtype} {item} B x {count_text(model.num_parameters)}{cut}"),
        Part("kv cache", cache, how),
        Part("graphs", GRAPH_BYTES, "captured graphs and workspaces, an estimate"),
        Part("context", CONTEXT_BYTES, "of CUDA, as measured"),
    ]
    if is_between_devices(choose_channel(config)):
        bucket = config.weights.bucket_mb * MIB
        parts.append(Part("update", 2 * min(bucket, weights), f"2 x weights.bucket_mb = {config.weights.bucket_mb}"))
    groups = (num_gpus > 1) + (choose_channel(config) == "nccl")
    if groups:
        parts.append(Part("communicators", groups * GROUP_BYTES, f"{groups} NCCL group{'s'[: groups - 1]} x 0.65 GiB"))
    return EngineEstimate(tuple(parts), cache, per_token, context, engine.max_running, is_known)


def embedded_memory(config: RunConfig, model: ModelConfig, available_bytes: int) -> tuple[Part, ...]:
    """Of one embedded engine in the host's memory. Raises EngineError where it does not fit."""
    budget = embedded_budget(config, model, available_bytes)
    item = ITEM_BYTES[config.engine.dtype]
    weights = f"two versions x {item} B x {count_text(model.num_parameters)}"
    cache = f"at most, {budget.num_slots} sequences x {budget.context_length} tokens"
    return (Part("weights", budget.weight_bytes, weights), Part("kv cache", budget.kv_bytes, cache))


def embedded_budget(config: RunConfig, model: ModelConfig, available_bytes: int) -> EngineBudget:
    """As the engine itself will plan. Raises EngineError where not one sequence fits."""
    return plan_engine(
        model,
        dtype=config.engine.dtype,
        max_running=config.engine.max_running,
        context_length=config.engine.context_length,
        available_bytes=available_bytes,
        share=DEFAULT_SHARE / config.roles.rollout.count,
    )


# -- all devices -------------------------------------------------------------------------------------------------------

STAYS = frozenset({"context", "communicators"})
"""Parts that stay on the device while the other side uses it."""
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
    """Memory of the whole run."""

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


def used_devices(actor: ActorSpec) -> tuple[int, ...]:
    """GPUs that the actor's process works on: a rank takes one of its gang's by its local rank."""
    if actor.rank is None or not actor.visible_devices:
        return actor.devices
    return (actor.visible_devices[actor.rank.local_rank % len(actor.visible_devices)],)


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
            return "sglang.mem_fraction_static", "lower it, or give trainer and engine their own devices"
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
    """The workspace that the memory manager reserves for a step, against what the step needs."""
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
