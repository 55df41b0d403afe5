"""One row of a family's table, and the table."""

from __future__ import annotations

from dataclasses import dataclass

from ..weight_cut import Cut, whole


@dataclass(frozen=True, slots=True)
class Rule:
    """A Megatron parameter and the HuggingFace tensors that it is made of, both named from their layer on."""

    parameter: str
    names: tuple[str, ...]
    cut: Cut = whole


@dataclass(frozen=True, slots=True)
class Family:
    """All rules of a family. Rules of parameters that a model does not have (Transformer Engine's) do no harm."""

    model: tuple[Rule, ...]
    """Parameters outside of layers."""
    layer: tuple[Rule, ...]
    """Parameters of a layer."""
    expert: tuple[Rule, ...] = ()
    """Parameters of a layer that hold all its experts, one behind the other; names are those of one expert."""
