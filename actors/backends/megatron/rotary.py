"""Rotary positions of packed sequences: tables once per micro-batch, one elementwise operation per layer.

Formula: RoFormer (https://arxiv.org/abs/2104.09864), eq. 34, on the first `rotary_dim` channels of a head.

Library considered: megatron-core's RotaryEmbedding. For packed sequences it brings the sequence lengths to the host in
every layer and cuts (since 0.19 also rotates) sequence by sequence: thousands of launches for many short samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.model_config import ModelConfig
from ...models.rotary import rotary_angles, rotary_gain
from ..vocab_scores import fused


@dataclass(frozen=True, slots=True)
class Rotary:
    """Which channels of a head are rotated, how fast, and in which pairs."""

    config: ModelConfig

    def tables(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, dim] of integer positions; computed in float32, as HuggingFace does."""
        angles, gain = rotary_angles(self.config, positions_T), rotary_gain(self.config)
        is_interleaved = self.config.is_rope_interleaved
        angles = angles.repeat_interleave(2, dim=-1) if is_interleaved else torch.cat([angles, angles], dim=-1)
        return (angles.cos() * gain)[:, None].to(dtype), (angles.sin() * gain)[:, None].to(dtype)

    def rotate(self, x_Thd: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Heads [T, heads, head_dim] with their leading channels rotated; same shape and dtype."""
        return _rotated(x_Thd, *tables, self.config.rotary_dim, self.config.is_rope_interleaved)


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
