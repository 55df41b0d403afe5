"""Estimates the memory of a run on its GPUs: trainer ranks, launched engines, and both against their size. Pure.

It adds parts (`memory_part.Part`), each with its arithmetic, from the models' config files alone. With `memory.share =
"switch"` there are three phases: the trainer's turn, the hand-over (weights of both and the staged version), the
engine's turn. Not counted: fragments, workspaces of libraries, activations of a prefill, attached servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ...actors.backends.megatron.layout import ParallelLayout, optimizer_bytes, rank_parameters, stages_of
from ...actors.models.adapters import num_adapted
from ...actors.models.hf_folder import critic_parameters
from ...actors.models.model_config import ITEM_BYTES, ModelConfig
from ...actors.weights.publish import max_unreleased
from ...core.config import RunConfig
from ...core.config.loading import Finding
from ...core.errors import ConfigError, MyxaError
from ...core.host_memory import available_bytes
from ...core.weight_channel import SENT_CHANNELS
from ..actor_spec import ActorSpec
from ..composition.memory_parts import GRAPH_BYTES, pool_bytes, takes_turns, trainer_plan
from ..composition.weight_channels import choose_channel, held_fp8
from ..memory_part import GIB, MIB, Part, count_text, size_text, total
from .check import CheckedRun, looked, warnings
from .node import gpus
from .run_arithmetic import longest_answer, num_micro_batches, trainer_layout

# -- activations of a step ---------------------------------------------------------------------------------------------
#
# What a layer keeps for its backward pass, for each token, in numbers of the compute type (h: hidden size, f: inner
# width of the MLP, q, k, v: widths of the projections; attention is flash attention and keeps no scores):
#
#     torch     4h   input and output of both norms          megatron   4h
#               2q + 2k + v   before and after rotation                 3(q + k + v)   projection, normed, rotated
#               q    what attention gave                                q
#               4f   gate, up, silu(gate), their product                3f   gate and up (fused SwiGLU), their product
#                                                                       eh   the token as each of its e experts gets it
#     with MLA, in place of Megatron's q, k and v (l: both latents, v: width of all values):
#               2l   before and after their norms     4q   rotated q and k, padded values, attended     v   cut again
#
# The scheme is that of Korthikanti et al. (arXiv 2205.05198, section 4), without dropout, biases and attention scores.
# Which copies are kept follows `torch_backend/model.py` and `megatron/provider.py`; the 3 of Megatron's attention is
# chosen so that it matches four measurements of docs/benchmarks.md (`train`), see tests/plan/test_memory_estimate.py.
#
# Scoring (`backends/vocab_scores.py`) makes logits in chunks: CHUNK numbers at 2 bytes, once more in float32 and their
# gradient, together 8 bytes each in bfloat16 and 12 in float32; and the gradient of the head in float32. The torch
# trainer keeps up to KEPT_LOGITS where it has the GPU for itself and recomputes nothing; they become their gradient.

CHUNK_LOGITS = 1 << 28
"""On a GPU, as in `backends/vocab_scores.py`, which imports torch; a test compares them."""
KEPT_LOGITS = 5 << 29
"""The most that the torch trainer keeps from the forward to the backward pass, as there."""
LOGIT_BYTES = {2: 8, 4: 12}
"""Bytes a logit of the chunk, by the bytes of the compute type."""


def layer_numbers(model: ModelConfig, kind: str, layout: ParallelLayout) -> float:
    """Numbers that one layer keeps of one token on one rank, by the table above."""
    q, k = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # Every token goes through its chosen experts, wherever they are: on average so many tokens arrive on a rank.
    inner = model.experts_per_token * model.moe_intermediate_size + model.shared_intermediate_size
    inner = inner if model.num_experts else model.intermediate_size
    attention = 4 * q + 6 * k
    if model.kv_lora_rank:
        attention = 2 * (model.q_lora_rank + model.kv_lora_rank) + 4 * q + model.num_heads * model.v_head_dim
    copies = model.experts_per_token * model.hidden_size
    cut = attention + 3 * inner + copies if kind == "megatron" else 3 * q + 3 * k + 4 * inner
    stream = 4 * model.hidden_size
    return cut / layout.tp + (stream / layout.tp if layout.sequence_parallel else stream)


def pass_parts(
    config: RunConfig, model: ModelConfig, num_tokens: int, *, layers: int, in_flight: int, is_last: bool
) -> list[Part]:
    """Activations of a stage of so many layers, for micro-batches of so many tokens, and what scoring takes on the last
    one."""
    kind, layout, item = config.roles.trainer.kind, trainer_layout(config), ITEM_BYTES[config.trainer.dtype]
    tokens = -(-num_tokens // layout.cp)
    layer_bytes = layer_numbers(model, kind, layout) * item
    if config.trainer.activation_checkpointing or config.megatron.recompute == "full":
        size = (layers * model.hidden_size * item * in_flight + layer_bytes) * tokens
        how = f"{layers} layers' inputs and one whole layer"
    else:
        size = layers * layer_bytes * tokens * in_flight
        how = f"{layers} layers x {layer_bytes / 1000:.1f} kB a token"
    how += f" x {count_text(tokens)} tokens" + (f" x {in_flight} micro-batches in flight" if in_flight > 1 else "")
    parts = [Part("activations", int(size), how)]
    if is_last:
        width, logit = model.vocab_size // layout.tp, LOGIT_BYTES[item]
        chunk = min(CHUNK_LOGITS, tokens * width)
        keeps = kind == "torch" and config.memory.share == "none" and tokens * width <= KEPT_LOGITS
        logits_bytes = tokens * width * item if keeps and not config.trainer.activation_checkpointing else 0
        head = 0 if config.lora.rank else width * model.hidden_size
        how = f"{count_text(chunk)} logits at a time x {logit} B"
        how = f"{count_text(tokens * width)} logits x {item} B, kept for the backward pass" if logits_bytes else how
        how += f" + gradient of the head 4 B x {count_text(head)}" if head else ""
        parts.append(Part("logits", (logits_bytes or logit * chunk) + 4 * head, how))
    return parts


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
# really are. A reference model (algo.kl_coef) is one more set of weights, for the torch trainer of its own size, but
# with adapters ([lora]), which train n numbers of their own beside frozen weights: it is the policy without them. A
# critic is a second trained model; its pass follows the policy's pass. Weights that travel between devices are staged:
# a copy in the engine's number type of the newest version, which engines that come late read, and of the next one.
# A CUDA context took 0.8 GiB, an NCCL group 0.65 GiB where it was measured (docs/benchmarks.md, `memory_gang` and
# `memory_communicators`).

CONTEXT = Part("context", int(0.8 * GIB), "of CUDA, as measured")
GROUP_BYTES = int(0.65 * GIB)


def trainer_memory(config: RunConfig, model: ModelConfig, world_size: int) -> tuple[Part, ...]:
    """Of the rank that needs most."""
    layout, is_megatron = trainer_layout(config), config.roles.trainer.kind == "megatron"
    parts = (_megatron_states if is_megatron else _torch_states)(config, model, world_size)
    tokens = config.trainer.max_tokens_per_microbatch
    if not config.algo.is_given:  # one sample may be longer than the limit
        tokens = max(tokens, longest_answer(config, model))
    num_passes, placed = num_micro_batches(config, model, world_size), config.megatron.model if is_megatron else {}
    counts = Counter(stages_of(model, layout, placed))
    parts += max(
        (
            pass_parts(
                config, model, tokens, layers=counts[stage], in_flight=max(1, min(layout.pp - stage, num_passes)),
                is_last=stage == layout.pp - 1,
            )
            for stage in range(layout.pp)
        ),
        key=total,
    )  # fmt: skip
    if (channel := choose_channel(config)) in SENT_CHANNELS:
        num, (item, _) = 1 if takes_turns(config) else max_unreleased(channel), _held(config, model)
        # Each stage has a sender; beside an engine every rank stages all of the model.
        cut = ParallelLayout() if channel == "cuda_ipc" else ParallelLayout(pp=layout.pp, vpp=layout.vpp)
        sent = sum(rank_parameters(model, cut, placed if cut.pp > 1 else None))
        how = f"{num} version{'s' if num > 1 else ''} x {item} B x {count_text(sent)}"
        parts.append(Part("staged versions", num * item * sent, how))
    if config.roles.trainer.device_ids:
        parts += [_groups(_num_groups(layout, world_size) + (channel == "nccl")), CONTEXT]
    return tuple(part for part in parts if part.num_bytes)


def _groups(number: int) -> Part:
    how = f"{number} NCCL group{'s' if number > 1 else ''} x 0.65 GiB"
    return Part("communicators", number * GROUP_BYTES, how)


def _torch_states(config: RunConfig, model: ModelConfig, world_size: int) -> list[Part]:
    num = model.num_parameters
    shards = world_size if config.trainer.strategy == "fsdp" else 1
    cut = f" / {shards} ranks" if shards > 1 else ""
    critic = critic_parameters(config.critic, model)
    adapters, item = _adapted(config, model), 4 if config.trainer.impl == "hf" else ITEM_BYTES[config.trainer.dtype]
    rows = [
        ("weights", item if adapters else 4, num, _frozen(config) or "float32 masters"),
        ("adapters", 4, adapters, "float32 masters"),
        ("gradients", 4, adapters or num, ""),
        ("optimizer", 8, adapters or num, "AdamW's two moments"),
        ("critic", 16, critic, "trained whole: the same together"),
        ("reference model", 4, num * _has_reference_copy(config), ""),
    ]
    parts = [_of_each(name, item_bytes, count, how, cut, shards) for name, item_bytes, count, how in rows]
    if shards > 1:
        unit = max(2 * model.vocab_size * model.hidden_size, num // model.num_layers)
        parts.append(Part("gathered", 8 * unit, f"largest unit of {count_text(unit)}, gathered 4 B, twice"))
    elif config.trainer.dtype == "bfloat16" and (critic or not adapters or item == 4):
        parts.append(_of_each("weights in bfloat16", 2, max(num, critic), "as products use them"))
    return parts


def _megatron_states(config: RunConfig, model: ModelConfig, world_size: int) -> list[Part]:
    settings, layout, dtype = config.megatron, trainer_layout(config), config.trainer.dtype
    item, (dense, expert) = ITEM_BYTES[dtype], rank_parameters(model, layout, settings.model)
    num = dense + expert
    dp = layout.replicas(world_size)[0] if settings.distributed_optimizer else 1
    state, how = (12, "masters and moments") if item == 2 else (8, "moments")
    adapters = -(-_adapted(config, model) // layout.pp)  # about half of each adapter is on all of its ranks
    trained = (adapters, 0) if adapters else (dense, expert)
    optimizer = int((1.0 - settings.offload_optimizer) * sum(optimizer_bytes(settings, item, *trained, world_size)))
    cut = f" / {dp} replicas" if dp > 1 else ""
    return [
        _of_each("weights", item, num, " ".join(filter(None, (dtype, _frozen(config))))),
        _of_each("adapters", item, adapters, dtype),
        _of_each("gradients", 4, adapters or num, "float32"),
        replace(_of_each("optimizer", state, adapters or num, how, cut), num_bytes=optimizer),
        _of_each("reference model", item, num * _has_reference_copy(config)),
    ]


def _adapted(config: RunConfig, model: ModelConfig) -> int:
    """Numbers in the adapters; 0 without, or with targets that are a finding of `fit`."""
    return 0 if any(looked("lora", num_adapted, config.lora, model)) else num_adapted(config.lora, model)


def _frozen(config: RunConfig) -> str:
    """What the weights are beside adapters; empty without."""
    is_both = config.algo.keeps_reference and not _has_reference_copy(config)
    return ("frozen, the reference model too" if is_both else "frozen") if config.lora.rank else ""


def _has_reference_copy(config: RunConfig) -> bool:
    """Adapters leave the reference model as it was: it is the policy without them, unless another folder is named."""
    return config.algo.keeps_reference and not (config.lora.rank and not config.algo.ref_path)


def _of_each(name: str, item: int, count: int, how: str = "", cut: str = "", shards: int = 1) -> Part:
    """So many bytes of each of `count` parameters, shared by the shards."""
    return Part(name, item * count // shards, f"{how} {item} B x {count_text(count)}{cut}".strip())


def _num_groups(layout: ParallelLayout, world_size: int) -> int:
    """Groups of more than one rank that a rank works in: by data, and by each kind of parallelism."""
    dp = max(1, world_size // layout.model_size)
    return sum(size > 1 for size in (dp * layout.cp, layout.tp, layout.pp, layout.cp, layout.ep, layout.etp))


# -- an engine ---------------------------------------------------------------------------------------------------------
#
#     weights of SGLang           bytes of engine.dtype (FP8: 1) x N / GPUs of the server (of a replica)
#     a token in the cache        2 (key and value) x layers x kv heads / GPUs of a replica of attention x head size x
#                                 bytes; with MLA layers x (latent + rotated channels) x bytes on each GPU
#     cache of SGLang             sglang.mem_fraction_static x device - weights (the fraction counts both)
#     update                      2 x weights.bucket_mb while new weights arrive
#
# SGLang keeps the rest of the device free for activations of a prefill and workspaces of attention kernels.

SGLANG_SHARE = 0.85
"""About what SGLang chooses when sglang.mem_fraction_static is not set; it looks at the device then."""


def token_bytes(model: ModelConfig, dtype: str, num_gpus: int = 1) -> int:
    """Of one token in the cache, on each of so many GPUs."""
    width = 2 * -(-model.num_kv_heads // num_gpus) * model.head_dim
    if model.kv_lora_rank:
        width = model.kv_lora_rank + model.rotary_dim
    return model.num_layers * width * ITEM_BYTES[dtype]


def _held(config: RunConfig, model: ModelConfig) -> tuple[int, str]:
    """Bytes and name of the number type in which engines hold most weights."""
    is_fp8 = False
    with suppress(MyxaError):  # a finding of `fit`
        is_fp8 = held_fp8(config, model) is not None
    return (1, "fp8") if is_fp8 else (ITEM_BYTES[config.engine.dtype], config.engine.dtype)


def server_memory(config: RunConfig, model: ModelConfig, num_gpus: int, capacity: int | None) -> tuple[Part, ...]:
    """Of a launched SGLang server on each of its GPUs. `capacity`: bytes of a GPU, None: not known."""
    engine, channel, (item, dtype) = config.engine, choose_channel(config), _held(config, model)
    replicas = config.sglang.get("dp_size", 1)
    alone = max(1, num_gpus // max(1, replicas if isinstance(replicas, int) else 1))
    num_gpus = num_gpus if config.sglang.get("enable_dp_attention") else alone
    weights = item * model.num_parameters // num_gpus
    per_token = token_bytes(model, engine.dtype, alone)
    context = engine.context_length or model.context_length
    if capacity is None:
        cache = engine.max_running * context * per_token
        how = f"at most {engine.max_running} sequences x {context} tokens x {per_token / 1000:.0f} kB"
    else:
        is_said = "mem_fraction_static" in config.sglang
        share = float(config.sglang.get("mem_fraction_static", SGLANG_SHARE))
        fraction = f"sglang.mem_fraction_static = {share:g}" if is_said else f"about {share:g}, SGLang's own choice,"
        cache = max(0, int(capacity * share) - weights)
        tokens = f"{count_text(cache // per_token)} tokens x {per_token / 1000:.0f} kB"
        how = f"{fraction} of the device, less weights: {tokens}"
    cut = f" / {num_gpus} GPUs" if num_gpus > 1 else ""
    update = 2 * min(config.weights.bucket_mb * MIB, weights) * (channel in SENT_CHANNELS)
    parts = (
        Part("weights", weights, f"{dtype} {item} B x {count_text(model.num_parameters)}{cut}"),
        Part("kv cache", cache, how),
        Part("graphs", GRAPH_BYTES, "captured graphs and workspaces, an estimate"),
        CONTEXT,
        Part("update", update, f"2 x weights.bucket_mb = {config.weights.bucket_mb}"),
        _groups((num_gpus > 1) + (channel == "nccl")),
    )
    return tuple(part for part in parts if part.num_bytes or part.name == "kv cache")


RATES = {"tcp": (1, "a link of 10 Gbit/s"), "disk": (1, "a folder that is read"), "nccl": (10, "100 Gbit/s")}
"""Channel -> GB a second that it is taken to bring into an engine, and why."""


def slow_transfer(run: CheckedRun) -> Iterator[Finding]:
    """Whether a whole version arrives within `weights.transfer_s`."""
    config, model, channel = run.config, run.model, choose_channel(run.config)
    reads = channel != "disk" or config.roles.rollout.kind == "sglang"
    if model is None or not config.generates or config.lora.rollout == "adapter" or channel not in RATES or not reads:
        return
    (rate, why), num_gb = RATES[channel], _held(config, model)[0] * model.num_parameters / 1e9
    needed_s, limit_s = num_gb / rate, config.weights.transfer_s
    yield from warnings(
        (needed_s > limit_s, "weights.transfer_s",
         (f"= {limit_s:g}: a version of {num_gb:.0f} GB takes about {needed_s:.0f} s by {channel} at {rate} GB/s "
         f"({why}); an engine that needs longer is rebuilt"), f"set it to {2 * needed_s:.0f}, or measure the link"),
    )  # fmt: skip


# -- all devices -------------------------------------------------------------------------------------------------------

STAYS = ("context", "communicators")
"""Parts that stay on the device while the other side uses it."""
TIGHT = 0.95
"""Of a device; above, what is left out here may not fit."""
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """One kind of device in one phase."""

    devices: str
    """Like "node 0: GPU 0-3"."""
    phase: str
    parts: tuple[Part, ...]
    capacity_bytes: int | None
    """None: not known."""
    num_bytes: int
    fits: bool
    """Whether there is room, as far as is known."""

    @classmethod
    def of(cls, devices: str, phase: str, parts: Iterable[Part], capacity: int | None) -> DeviceLoad:
        parts = tuple(parts)
        return cls(devices, phase, parts, capacity, total(parts), total(parts) <= (capacity or UNLIMITED))


def memory(run: CheckedRun) -> tuple[tuple[DeviceLoad, ...], tuple[Finding, ...]]:
    """All kinds of devices and phases, and what does not fit; nothing where model, placement or layout say nothing."""
    config, model, capacity = run.config, run.model, run.device_bytes
    trainers, rollouts = run.of("trainer"), run.of("rollout")
    if model is None or not run.actors:
        return (), ()
    if config.roles.trainer.kind == "megatron":
        layout = trainer_layout(config)
        if any(looked("megatron", layout.check_model, model, config.megatron.model)):  # a finding of `fit`
            return (), ()
        if wrong := tuple(looked("megatron", layout.dp, len(trainers))):
            return (), wrong
    if capacity is None and run.is_here and config.roles.trainer.device_ids + config.roles.rollout.device_ids:
        capacity = min((gpu.num_bytes for gpu in run.once(gpus).found if gpu.num_bytes), default=None)
    trainer = trainer_memory(config, model, max(1, len(trainers)))
    launches = config.roles.rollout.kind == "sglang" and not config.engine.attach and config.generates
    engine: tuple[Part, ...] = ()
    if launches and rollouts and rollouts[0].devices:
        num_gpus, shapes = len(rollouts[0].devices), config.engine.shapes(config.sglang)
        sizes = [shape.num_gpus if config.engine.groups else num_gpus for shape in shapes]
        servers = [
            server_memory(config.of_server(shape), model, size, capacity)
            for shape, size in zip(shapes, sizes, strict=True)
        ]
        engine = max(servers, key=total)  # of the fullest kind
    loads = (
        *_gpu_loads(config, trainers, rollouts, trainer, engine, capacity),
        *(_pools(run, model, trainers) if engine and takes_turns(config) else ()), *_written_loads(config, model),
    )  # fmt: skip
    return loads, tuple(finding for load in loads for finding in _too_full(load))


def memory_findings(run: CheckedRun) -> tuple[Finding, ...]:
    return run.once(memory)[1]


def _pools(run: CheckedRun, model: ModelConfig, trainers: Sequence[ActorSpec]) -> Iterator[DeviceLoad]:
    """Host memory for what leaves the devices."""
    rank_bytes = pool_bytes(run.config, trainer_plan(trainers[0], run.config, model))
    host_bytes = available_bytes() if run.is_here else None
    for node, ranks in sorted(Counter(trainer.node for trainer in trainers).items()):
        how = f"{ranks} rank{'s' if ranks > 1 else ''} x {size_text(rank_bytes)}, pinned: memory.host_pool_gb"
        yield DeviceLoad.of(
            f"node {node}: host memory", "trainer is away", [Part(POOL, ranks * rank_bytes, how)], host_bytes
        )


def _written_loads(config: RunConfig, model: ModelConfig) -> Iterator[DeviceLoad]:
    """What rebuilt versions take beside devices."""
    has_deltas = config.weights.full_every > 1
    if not config.generates or not (has_deltas or config.weights.channel == "tcp"):
        return
    version = _of_each("weights", ITEM_BYTES[config.engine.dtype], model.num_parameters, config.engine.dtype)
    if has_deltas:
        yield DeviceLoad.of("host of trainer/0", "memory", [replace(version, name="base of deltas")], None)
    if config.weights.channel == "tcp":
        version = replace(version, num_bytes=2 * version.num_bytes, how=f"2 x {version.how}, while one is fetched")
    yield DeviceLoad.of("host of each rollout actor", "disk of TMPDIR", [version], None)


def _gpu_loads(
    config: RunConfig,
    trainers: Sequence[ActorSpec],
    rollouts: Sequence[ActorSpec],
    trainer: tuple[Part, ...],
    engine: tuple[Part, ...],
    capacity: int | None,
) -> Iterator[DeviceLoad]:
    of_trainer = {(actor.node, device) for actor in trainers for device in used_devices(actor)}
    of_engine = {(actor.node, device) for actor in rollouts if engine for device in actor.devices}
    mine = [replace(part, owner="trainer") for part in trainer]
    theirs = [replace(part, owner=rollouts[0].name.rpartition("/")[0]) for part in engine]
    for devices, first, second in (
        (of_trainer & of_engine, mine, theirs),
        (of_trainer - of_engine, mine, []),
        (of_engine - of_trainer, [], theirs),
    ):
        for phase, parts in _phases(config, first, second) if devices else ():
            yield DeviceLoad.of(device_names(devices), phase, parts, capacity)


def used_devices(actor: ActorSpec) -> tuple[int, ...]:
    """GPUs that the actor's process works on: a rank takes one of its gang's by its local rank."""
    if actor.rank is None or not actor.visible_devices:
        return actor.devices
    return (actor.visible_devices[actor.rank.local_rank % len(actor.visible_devices)],)


def _phases(config: RunConfig, mine: list[Part], theirs: list[Part]) -> Iterator[tuple[str, list[Part]]]:
    if not (takes_turns(config) and mine and theirs):
        yield "all the time", [*mine, *theirs]
        return

    def of(parts: list[Part], *names: str) -> list[Part]:
        return [part for part in parts if part.name in names]

    reserve = Part("reserve", config.memory.reserve_mb * MIB, "memory.reserve_mb")
    handed = [*of(mine, "weights", "staged versions"), *of(theirs, "weights", "update")]
    yield "trainer's turn", [*mine, *of(theirs, *STAYS), reserve]
    yield "hand-over", [*handed, *of([*mine, *theirs], *STAYS), reserve]
    yield "engine's turn", [*(part for part in theirs if part.name != "update"), *of(mine, *STAYS), reserve]


def device_names(devices: set[tuple[int, int]]) -> str:
    """{(0, 0), (0, 1), (1, 0)} -> "node 0: GPU 0-1; node 1: GPU 0"."""
    nodes = sorted({node for node, _ in devices})
    return "; ".join(
        f"node {node}: GPU {ranges(sorted(number for place, number in devices if place == node))}" for node in nodes
    )


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# -- findings ----------------------------------------------------------------------------------------------------------


def _too_full(load: DeviceLoad) -> Iterator[Finding]:
    if load.capacity_bytes is None or load.num_bytes <= TIGHT * load.capacity_bytes:
        return
    largest = max(load.parts, key=lambda part: part.num_bytes)
    owner = "trainer" if largest.owner == "trainer" else "rollout"
    key, remedy = REMEDIES.get(largest.name, (f"roles.{owner}.devices", "give it more GPUs"))
    place, has = f"{key}: {load.devices}, {load.phase}: {size_text(load.num_bytes)}", size_text(load.capacity_bytes)
    most = f"most of it is the {largest.owner}'s {largest.name}, {size_text(largest.num_bytes)}"
    text = f"{place} of {has} leaves little for what is not counted here"
    error = ConfigError(text if load.fits else f"{place} do not fit into {has}; {most}", remedy=remedy)
    yield Finding(key, error, "warning" if load.fits else "error")


POOL = "parameters and optimizer"
_AGAIN = (
    "trainer.max_tokens_per_microbatch",
    "lower it, or set trainer.activation_checkpointing or megatron.recompute",
)
REMEDIES = {
    "activations": _AGAIN,
    "logits": _AGAIN,
    POOL: ("memory.share", "give trainer and engine their own devices, or take machines with more memory"),
    "kv cache": ("sglang.mem_fraction_static", "lower it, or give trainer and engine their own devices"),
}
"""Largest part -> the key to turn, and how."""
