"""Sums and maxima of a step, over micro-batches and then over ranks, and the metrics made of them.

Knows names and numbers. Must not know what they mean. Nothing is read from the device until `reduced`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .tensors import floats


class Ranks(Protocol):
    """Over whom a tally is added up."""

    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks. Collective."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over ranks. Collective."""
        ...


class Tally:
    """Named sums and maxima. All ranks must name the same ones, in any order."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sums so far."""
        return tuple(self._sums)

    def add(self, name: str, value: Tensor | float) -> None:
        """Add to a sum."""
        value = torch.as_tensor(value, dtype=torch.float64).detach()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def top(self, name: str, values: Tensor) -> None:
        """Raise a maximum to the largest of `values` (none: stays)."""
        floor = torch.full((1,), float("-inf"), dtype=torch.float64, device=values.device)
        value = torch.cat([values.detach().double(), floor]).max()
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def reduced(self, world: Ranks) -> tuple[dict[str, float], dict[str, float]]:
        """(sums, maxima) over all ranks. Collective. A maximum over nothing is 0."""
        sums, maxima = sorted(self._sums), sorted(self._maxima)
        totals = floats(world.sum(_stack(self._sums, sums, world.device))) if sums else []
        tops = floats(world.max(_stack(self._maxima, maxima, world.device))) if maxima else []
        return (
            dict(zip(sums, totals, strict=True)),
            {name: (0.0 if top == float("-inf") else top) for name, top in zip(maxima, tops, strict=True)},
        )


def _stack(values: dict[str, Tensor], names: list[str], device: torch.device) -> Tensor:
    return torch.stack([values[name].to(device) for name in names])
