"""How many of a model's parameters each trainer rank holds: by tensor, pipeline and expert parallelism. Pure.

Counted over the shapes of the model's tensors (`ModelConfig.tensor_shapes`), as Megatron-core cuts them: matrices by
tp, experts by ep and etp, vectors and routers whole; layers in equal runs over pipeline stages, the embedding on the
first stage, final norm and head on the last, which has a copy of a tied embedding.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ...actors.backends.megatron.layout import ParallelLayout
from ...actors.models.model_config import ModelConfig

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
