"""`model_type` of a config.json -> the family's rules."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .....core.errors import ModelError
from .glm4 import GLM4
from .llama import LLAMA
from .qwen2 import QWEN2
from .qwen3 import QWEN3, QWEN3_MOE
from .rule import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "glm4": GLM4}
)


def family_of(model_type: str) -> Family:
    """The rules of a family. Raises ModelError for one that has none."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise ModelError(
            f"the Megatron trainer has no weight table for models of type {model_type}",
            remedy=f"use one of {', '.join(FAMILIES)}, or add a table under backends/megatron/families",
        )
    return family
