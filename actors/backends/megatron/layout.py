"""How a model is cut over a trainer gang: tensor, pipeline, virtual-stage, context, expert, expert-tensor parallelism.

Knows numbers only: no torch, no megatron-core. Every complaint names the key of the run file, the cause and the remedy.

Library considered: megatron-core's ModelParallelConfig checks some of this, late (while the model is built) and by
assertions that name its own fields, not the user's keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from ....core.config.learning import MegatronSettings
from ....core.errors import ConfigError
from ...models.model_config import EMBEDDING, ModelConfig

MAX_SHOWN = 64
BY_TEXT = "pipeline_model_parallel_layout"
ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
UNEVEN_FIELDS = frozenset({BY_TEXT, *ENDS, *COUNTED})
"""Fields of TransformerConfig by which layers are placed on stages by hand."""
REPEATED = (re.compile(r"\(([^)]+)\)\*(\d{1,4})(?!\d)"), re.compile(r"(.)\*(\d{1,4})(?!\d)"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Degrees of parallelism; the data-parallel degree is what the gang's size leaves."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Virtual stages per rank (interleaved schedule); 1 = off."""
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False

    @classmethod
    def of(cls, settings: MegatronSettings) -> ParallelLayout:
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    @property
    def model_size(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def expert_size(self) -> int:
        return self.etp * self.ep * self.pp

    @property
    def sequence_multiple(self) -> int:
        """Every packed sequence is padded to a multiple of so many tokens: two chunks per context rank, each divisible
        over the tensor-parallel group under sequence parallelism."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)

    def dp(self, world_size: int) -> int:
        """Data-parallel replicas of a gang of that size. Raises ConfigError if the layout does not fit the gang."""
        for size, keys in ((self.model_size, "tp * pp * cp"), (self.expert_size, "etp * ep * pp")):
            if world_size < 1 or world_size % size:
                raise ConfigError(
                    f"megatron: {keys} = {size} does not divide the {world_size} rank(s) of roles.trainer",
                    remedy=f"set roles.trainer.count to a multiple of {size}, or lower one of {keys}",
                )
        return world_size // self.model_size

    def replicas(self, world_size: int) -> tuple[int, int]:
        """Ranks that share the optimizer of a dense parameter, and of one of an expert: with a distributed optimizer
        each holds the state of its part."""
        return max(1, world_size // self.model_size) * self.cp, max(1, world_size // self.expert_size)

    def dp_rank_of(self, rank: int, world_size: int) -> int:
        """Which replica a rank belongs to: its ranks train the same samples. megatron-core numbers ranks with tensor
        parallelism innermost, then context, data and pipeline parallelism."""
        return rank // (self.tp * self.cp) % self.dp(world_size)

    def stages(self, num_layers: int, overrides: Mapping[str, Any]) -> list[int]:
        """The pipeline rank of each layer, by megatron-core's rules. `overrides`: `[megatron.model]`, where layers may
        be placed on stages by hand. Raises ConfigError where it does not place every layer."""
        placing = sorted(UNEVEN_FIELDS.intersection(overrides))
        try:
            chunks = self._chunks(num_layers, overrides)
        except (TypeError, ArithmeticError):  # values of another type are refused by their own check
            chunks = []
        if len(chunks) != self.pp * self.vpp or sum(chunks) != num_layers or min(chunks) < 0:
            key, shown = placing[0] if placing else BY_TEXT, "" if len(chunks) > MAX_SHOWN else f": {chunks}"
            raise ConfigError(
                f"megatron.model.{key}: does not place the model's {num_layers} layers on pp x vpp = {self.pp} x "
                f"{self.vpp} stages{shown}",
                remedy="mend it: the layers of all stages together are the model's, and those between are alike",
            )
        return [place % self.pp for place, count in enumerate(chunks) for _ in range(count)]

    def _chunks(self, num_layers: int, overrides: Mapping[str, Any]) -> list[int]:
        """Layers of each virtual stage, in the order of the model."""
        if layout := overrides.get(BY_TEXT):
            if isinstance(layout, list):
                return [list(row).count("decoder") for row in cast("list[list[str]]", layout)]
            text = str(layout).replace(",", "")
            for pattern in REPEATED:
                text = pattern.sub(lambda match: match[1] * int(match[2]), text)
            return [stage.count("t") for stage in text.split("|")] if set(text) <= set("EtmL|") else []
        size, (embedding, loss) = self.pp * self.vpp, [bool(overrides.get(name)) for name in COUNTED]
        first, last = (overrides.get(name) for name in ENDS)
        if first is None and last is None:
            chunks = [(num_layers + embedding + loss) // size] * size
            chunks[0] -= embedding
            chunks[-1] -= loss
            return chunks
        between = self.pp - (first is not None) - (last is not None)
        share = (num_layers - (first or 0) - (last or 0)) // max(between, 1)
        ranks = [share] * self.pp
        ranks[0], ranks[-1] = share if first is None else first, share if last is None else last
        return [count // self.vpp for count in ranks] * self.vpp

    def check_model(self, config: ModelConfig, overrides: Mapping[str, Any] | None = None) -> None:
        """Raise ConfigError naming the first degree that cannot cut this model. `overrides`: `[megatron.model]`; where
        it places layers on stages, their number need not divide."""
        heads = f"num_attention_heads = {config.num_heads}"
        groups = f"num_key_value_heads = {config.num_kv_heads}"
        latent = config.kv_lora_rank and config.kv_lora_rank + config.rotary_dim
        for key, degree, length, size in (
            ("tp", self.tp, config.num_heads, heads),
            ("tp", self.tp, config.num_kv_heads, groups),
            ("tp", self.tp, config.intermediate_size, f"intermediate_size = {config.intermediate_size}"),
            ("tp", self.tp, config.shared_intermediate_size, f"shared experts, {config.shared_intermediate_size} wide"),
            ("tp", self.tp, config.q_lora_rank, f"q_lora_rank = {config.q_lora_rank}"),
            ("tp", self.tp, latent, f"kv_lora_rank + qk_rope_head_dim = {latent}"),
            ("etp", self.etp, config.moe_intermediate_size, f"moe_intermediate_size = {config.moe_intermediate_size}"),
            ("ep", self.ep, config.num_experts, f"num_experts = {config.num_experts}"),
        ):
            if length % degree:
                raise _wrong(key, degree, f"does not divide the model's {size}", f"choose a divisor of {length}")
        self._check_experts(config)
        if overrides and UNEVEN_FIELDS.intersection(overrides):
            self.stages(config.num_layers, overrides)
        elif config.num_layers % (self.pp * self.vpp):
            raise _wrong(
                "pp",
                self.pp,
                f"times vpp = {self.vpp} does not divide the model's {config.num_layers} layers",
                "choose other stages, or place layers by megatron.model.pipeline_model_parallel_layout",
            )

    def _check_experts(self, config: ModelConfig) -> None:
        if not config.num_experts:
            for key, degree in (("ep", self.ep), ("etp", self.etp)):
                if degree > 1:
                    raise _wrong(key, degree, f"but a {config.model_type} model has no experts", "leave it at 1")
        elif self.tp > 1 and not self.sequence_parallel:
            raise _wrong(
                "tp",
                self.tp,
                "with experts needs sequence parallelism (megatron-core trains them no other way)",
                "set megatron.sequence_parallel = true",
            )


def _wrong(key: str, value: object, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"megatron.{key} = {str(value).lower()}: {why}", remedy=remedy)


def check_routing(num_experts: int, megatron: MegatronSettings) -> None:
    """Raise ConfigError where choices of experts cannot be replayed."""
    if not num_experts:
        raise ConfigError("megatron.routing_replay: the model has no experts", remedy="leave it out")
    level = megatron.model.get("recompute_granularity")
    key, recompute = ("recompute", megatron.recompute) if level is None else ("model.recompute_granularity", level)
    if recompute != "none":
        raise ConfigError(
            f'megatron.{key} = "{recompute}" would choose experts a second time, against megatron.routing_replay',
            remedy='set megatron.recompute = "none", or leave routing_replay out',
        )


def optimizer_bytes(
    settings: MegatronSettings, item_bytes: int, dense: int, expert: int, world_size: int
) -> tuple[int, int]:
    """What a rank with so many parameters of `item_bytes` each holds of float32 masters, where there are such, and of
    moments."""
    dense_replicas, expert_replicas = ParallelLayout.of(settings).replicas(world_size)
    updated = dense + expert
    if settings.distributed_optimizer:
        updated = int(dense / dense_replicas + expert / expert_replicas)
    return 4 * updated if item_bytes == 2 else 0, 8 * updated


LAYER = re.compile(r"model\.layers\.(\d+)\.")


def rank_parameters(
    model: ModelConfig, layout: ParallelLayout, overrides: Mapping[str, Any] | None = None
) -> tuple[int, int]:
    """Of a rank of the fullest stage: dense parameters (shared over tp, pp, cp), of experts (ep, etp, pp).

    Counted over the shapes of the model's tensors (`ModelConfig.tensor_shapes`), as Megatron-core cuts them: matrices
    by tp, experts by ep and etp, vectors, routers and gates whole. The first pipeline stage has the embedding and the
    last one the head; where the first layers have no experts, one between them can be the fullest."""
    stages, last = stages_of(model, layout, overrides or {}), layout.pp - 1
    dense, expert = [0] * layout.pp, [0] * layout.pp
    for name, shape in model.tensor_shapes().items():
        match, size = LAYER.match(name), math.prod(shape)
        layer = int(match[1]) if match else -1
        stage = stages[layer] if 0 <= layer < len(stages) else 0 if name == EMBEDDING else last
        if ".experts." in name:
            expert[stage] += size // (layout.ep * layout.etp)
            continue
        is_cut = len(shape) == 2 and not name.endswith("gate.weight")
        dense[stage] += size // layout.tp if is_cut else size
        if name == EMBEDDING and model.tie_word_embeddings and last:
            dense[last] += size // layout.tp
    return max(zip(dense, expert, strict=True), key=sum)


def stages_of(model: ModelConfig, layout: ParallelLayout, overrides: Mapping[str, Any]) -> list[int]:
    """The pipeline rank of each layer; of a layout that does not fit, which is refused elsewhere, about that."""
    try:
        return layout.stages(model.num_layers, overrides)
    except ConfigError:
        share = -(-model.num_layers // layout.pp)
        return [layer // share for layer in range(model.num_layers)]
