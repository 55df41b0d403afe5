"""Where the engine's weights and cache lie: torch's own memory, or memory that a memory manager may take back.

Knows shapes and number types; must not know arenas: whoever lends memory hands in a function that makes the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Spec = tuple[Sequence[int], torch.dtype]
Allocate = Callable[[Sequence[Spec]], list[Tensor]]
"""Tensors of zeros, one for each (shape, number type)."""


def plain_zeros(specs: Sequence[Spec]) -> list[Tensor]:
    """In torch's own memory."""
    return [torch.zeros(tuple(shape), dtype=dtype) for shape, dtype in specs]
