"""What a trainer rank holds on its device, part by part. Reads a reference model's configuration, for its size.

Bytes a parameter (n of this rank, N of the model, dp data-parallel replicas):

    torch, ddp     masters 4, gradients 4, AdamW's moments 8, in bfloat16 2 more for the weights as they are used
    torch, fsdp    the same / ranks, and the largest unit (a layer, or embedding and head) gathered twice
    megatron       weights 2 (bfloat16) or 4, main gradients 4, masters 4 (bfloat16) and moments 8; the last two / dp
                   with a distributed optimizer (Megatron-core's own table: "theoretical memory" = 18 bytes a parameter,
                   6 + 12 / dp when distributed)

The same as `planned` of both backends' residence.py says to the memory manager, but experts are cut as they are.
A reference model (algo.kl_coef) is one more set of weights, with the torch trainer of a size of its own; a critic is a
second model that is trained, after the policy's pass and its activations. Weights that
travel between devices are staged: a copy in the engine's number type for each version in flight. A CUDA context took
0.8 GiB, an NCCL group 0.65 GiB where it was measured (docs/benchmarks.md, `memory_gang` and `memory_communicators`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...actors.backends.megatron.layout import ParallelLayout
from ...actors.models.model_config import ModelConfig
from ...actors.models.reference import reference_parameters
from ...actors.models.value_head import critic_config, critic_parameters
from ...core.config import RunConfig
from ...core.errors import ConfigError
from ...memory.budget import ITEM_BYTES
from ..composition.memory_parts import takes_turns
from ..composition.weight_channels import choose_channel, is_between_devices
from ..memory_part import GIB, MIB, Part, count_text, total
from .activation_memory import StepShape, activation_parts, microbatch_tokens
from .batch import num_micro_batches
from .model_cut import PipelineStage, stages, weights_of_stage

CONTEXT_BYTES = int(0.8 * GIB)
GROUP_BYTES = int(0.65 * GIB)
SHARING_BUCKET_BYTES = 256 * MIB
"""Of the torch trainer's own gradient exchange (`torch_backend/parallel.py`)."""
VERSIONS_IN_FLIGHT = 2

LASTING = frozenset({"weights", "gradients", "optimizer", "reference model", "critic"})
"""Parts that are there between steps too."""


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
    """The models whose passes follow one another: the larger one says what a pass takes."""
    if not config.critic.enabled:
        return [model]
    try:
        return [model, critic_config(config.critic, model)]
    except ConfigError:  # told of critic.path
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
