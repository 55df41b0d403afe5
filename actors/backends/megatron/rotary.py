"""Rotary positions of packed sequences: tables once per micro-batch, one elementwise operation per layer.

Formula: RoFormer (https://arxiv.org/abs/2104.09864), eq. 34, on the first `rotary_dim` channels of a head.

Library considered: megatron-core's RotaryEmbedding. For packed sequences it brings the sequence lengths to the host in
every layer and cuts (since 0.19 also rotates) sequence by sequence: thousands of launches for many short samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.model_config import ModelConfig, RopeScaling
from ..fusing import fused


@dataclass(frozen=True, slots=True)
class Rotary:
    """Which channels of a head are rotated, how fast, and in which pairs."""

    theta: float
    dim: int
    """Rotated channels, even; those after them pass unchanged."""
    is_interleaved: bool = False
    """Pairs are neighbours, not (i, i + dim / 2)."""
    scaling: RopeScaling | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> Rotary:
        return cls(config.rope_theta, config.rotary_dim, config.is_rope_interleaved, config.rope_scaling)

    def tables(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, dim] of integer positions; computed in float32, as HuggingFace does."""
        angles = torch.outer(positions_T.float(), self._speeds(positions_T.device))
        angles = angles.repeat_interleave(2, dim=-1) if self.is_interleaved else torch.cat([angles, angles], dim=-1)
        return angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)

    def _speeds(self, device: torch.device) -> Tensor:
        """Radians per position [dim / 2], float32."""
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        speeds = 1.0 / self.theta**exponents
        return speeds if self.scaling is None else _scaled(speeds, self.scaling)

    def rotate(self, x_Thd: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Heads [T, heads, head_dim] with their leading channels rotated; same shape and dtype."""
        return _rotated(x_Thd, *tables, self.dim, self.is_interleaved)


@fused
def _rotated(x_Thd: Tensor, cos: Tensor, sin: Tensor, dim: int, is_interleaved: bool) -> Tensor:
    turning, rest = x_Thd[..., :dim], x_Thd[..., dim:]
    if is_interleaved:
        quarter = torch.stack([-turning[..., 1::2], turning[..., 0::2]], dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        quarter = torch.cat([-second, first], dim=-1)
    turned = turning * cos + quarter * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def _scaled(speeds: Tensor, scaling: RopeScaling) -> Tensor:
    """Speeds stretched as in Llama 3.1: channels that turn less than `low_freq_factor` times in the original context
    fully, those that turn more than `high_freq_factor` times not at all, those between in proportion."""
    turns = scaling.original_context * speeds / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * speeds + (1.0 - kept) * speeds / scaling.factor
