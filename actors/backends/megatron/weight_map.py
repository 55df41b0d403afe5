"""The parameters of this rank's model chunks, each with the HuggingFace tensors that it is cut from.

Knows module trees and the grid's numbers; touches no values and no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from ....core.errors import TrainError
from ...models.model_config import ModelConfig
from .families import EMBEDDING, HEAD, Family, Rule, family_of
from .mcore import Grid
from .weight_cut import CutRequest, Piece, Shape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class MappedWeight:
    """A parameter, or one expert's part of a parameter that holds all experts of this rank."""

    parameter: nn.Parameter
    rule: Rule
    prefix: str
    """Before the rule's HuggingFace names; for experts it ends before the expert's number."""
    expert: int | None = None
    """Which of this rank's experts, from 0."""
    num_experts_here: int = 0
    is_tied_copy: bool = False
    """The head of a later stage that repeats the embedding: loaded from it, never exported."""

    def part(self, tensor: Tensor) -> Tensor:
        """The expert's part of a tensor shaped like the parameter, or all of it."""
        return tensor if self.expert is None else tensor[self.expert]

    def names(self, ep_rank: int) -> tuple[str, ...]:
        """HuggingFace names; for an expert those of its counterpart on an expert-parallel rank."""
        if self.expert is None:
            return tuple(self.prefix + name for name in self.rule.names)
        number = ep_rank * self.num_experts_here + self.expert
        return tuple(f"{self.prefix}{number}.{name}" for name in self.rule.names)

    def pieces(
        self, config: ModelConfig, shapes: Mapping[str, Shape], rank: int, size: int, ep_rank: int
    ) -> tuple[Piece, ...]:
        """What rank `rank` of the `size` that share this weight holds of the HuggingFace tensors."""
        return tuple(self.rule.cut(CutRequest(self.names(ep_rank), shapes, config, rank, size)))


def map_weights(chunks: Sequence[nn.Module], config: ModelConfig, grid: Grid) -> Iterator[MappedWeight]:
    """All weights of this rank in the order of its layers. Raises TrainError for a parameter that no rule knows."""
    family = family_of(config.model_type)
    for chunk in chunks:
        model = unwrapped(chunk)
        for name, parameter in model.named_parameters():
            match = _LAYER.fullmatch(name)
            if match is None:
                yield _of_model(family, name, parameter, config)
                continue
            layer = cast(Any, model).decoder.layers[int(match[1])]
            yield from _of_layer(family, match[2], parameter, int(layer.layer_number) - 1, config.num_experts, grid)


def unwrapped(chunk: nn.Module) -> nn.Module:
    """The GPTModel inside of data-parallel and half-precision wrappers."""
    model = chunk
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def _of_model(family: Family, name: str, parameter: nn.Parameter, config: ModelConfig) -> MappedWeight:
    rule = _find(family.model, name)
    if config.tie_word_embeddings and rule.names == (HEAD,):
        return MappedWeight(parameter, replace(rule, names=(EMBEDDING,)), "", is_tied_copy=True)
    return MappedWeight(parameter, rule, "")


def _of_layer(
    family: Family, name: str, parameter: nn.Parameter, layer: int, num_experts: int, grid: Grid
) -> Iterator[MappedWeight]:
    prefix = f"model.layers.{layer}."
    if all(rule.parameter != name for rule in family.expert):
        yield MappedWeight(parameter, _find(family.layer, name), prefix)
        return
    here = num_experts // grid.ep.size()
    rule = _find(family.expert, name)
    for expert in range(here):
        yield MappedWeight(parameter, rule, f"{prefix}mlp.experts.", expert, here)


def _find(rules: Sequence[Rule], name: str) -> Rule:
    for rule in rules:
        if rule.parameter == name:
            return rule
    raise TrainError(
        f"no rule says which HuggingFace weights parameter {name} is made of",
        remedy="a bug in backends/megatron/families, or a megatron-core that names its parameters otherwise",
    )
