"""Arithmetic of a dense decoder, for MFU.

    training a sequence of S tokens:  6 N S + 6 L h d S^2      (forward 2 N S + 2 L h d S^2, backward twice that)

N: weights in matrix products (embedding look-up left out, output head counted), L layers, h query heads of d. The
second term is causal attention: scores and weighted sum, 2 x 2 h d multiply-adds per pair, half of the S^2 pairs.
With adapters of n numbers the N weights stay as they are and need no gradients: 4 N S + 6 n S + 6 L h d S^2.
Recomputation counts as nothing. PEAK: dense bf16 of an H200 (SXM) by its datasheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from myxa.actors.models.model_config import ModelConfig

PEAK = 989e12


def matrix_weights(config: ModelConfig) -> int:
    """N: all matrices of the layers, and the output head."""
    shapes = config.tensor_shapes()
    in_layers = sum(shape[0] * shape[1] for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    return in_layers + config.vocab_size * config.hidden_size


def forward_flops(config: ModelConfig, lengths: Iterable[float]) -> float:
    """One forward pass over sequences of these lengths, packed or not."""
    attention = 2 * config.num_layers * config.num_heads * config.head_dim
    weights = matrix_weights(config)
    return float(sum(2 * weights * length + attention * length * length for length in lengths))


def train_flops(config: ModelConfig, lengths: Sequence[float], num_adapted: int = 0) -> float:
    """Forward and backward. `num_adapted`: numbers of the adapters that are trained in place of all weights; 0 =
    none."""
    spared = 2 * matrix_weights(config) - 6 * num_adapted if num_adapted else 0
    return 3 * forward_flops(config, lengths) - float(spared * sum(lengths))


def mfu(flops: float, seconds: float, num_gpus: int = 1) -> float:
    """Share of the GPUs' peak."""
    return flops / seconds / num_gpus / PEAK
