"""What an engine holds: weights, key-value cache, graphs. Pure.

    weights of SGLang           bytes of engine.dtype x N / GPUs of the server
    a token in the cache        2 (key and value) x layers x kv heads / GPUs x head size x bytes
    cache of SGLang             sglang.mem_fraction_static x device - weights (the fraction counts both)
    update                      2 x weights.bucket_mb while new weights arrive
    embedded engine             `memory/budget.py`: two sets of weights, cache at its fullest, in 0.6 of what is free

Attached servers have their memory from whoever started them: nothing is said of it. Left out: activations of a prefill,
workspaces of attention kernels; SGLang keeps the rest of the device free for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...actors.models.model_config import ModelConfig
from ...core.config import RunConfig
from ...memory.budget import DEFAULT_SHARE, ITEM_BYTES, EngineBudget, plan_engine
from ..composition.memory_parts import GRAPH_BYTES
from ..composition.weight_channels import choose_channel, is_between_devices
from ..memory_part import MIB, Part, count_text
from .trainer_memory import CONTEXT_BYTES, GROUP_BYTES

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
