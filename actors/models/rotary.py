"""How fast the channels of a head turn with the position, for every implementation of our models. Needs torch.

The formulas, and their order of operations, are those of transformers' `modeling_rope_utils`; tests compare to the bit.
RoFormer (arXiv 2104.09864), equation 34; YaRN (arXiv 2309.00071), sections 3.2 to 3.4; Llama 3.1's has no paper.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from .model_config import ModelConfig, RopeScaling


def rotary_speeds(config: ModelConfig) -> Tensor:
    """Radians per position of each pair of channels, float32 [rotary_dim / 2]."""
    dim, scaling = config.rotary_dim, config.rope_scaling
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    wavelengths = config.rope_theta**exponents
    if scaling is None:
        return 1.0 / wavelengths
    match scaling.kind:
        case "linear":
            return 1.0 / wavelengths / scaling.factor
        case "llama3":
            return _llama3(1.0 / wavelengths, scaling)
        case "yarn":
            return _yarn(wavelengths, config.rope_theta, dim, scaling)


def _llama3(speeds: Tensor, scaling: RopeScaling) -> Tensor:
    """Channels that turn less than `low_freq_factor` times in the original context are stretched fully, those that turn
    more than `high_freq_factor` times not at all, those between in proportion."""
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context
    lengths = 2 * math.pi / speeds
    stretched = torch.where(lengths > original / low, speeds / scaling.factor, speeds)
    share = (original / lengths - low) / (high - low)
    between = (1 - share) * stretched / scaling.factor + share * stretched
    is_between = ~(lengths < original / high) & ~(lengths > original / low)
    return torch.where(is_between, between, stretched)


def _yarn(wavelengths: Tensor, theta: float, dim: int, scaling: RopeScaling) -> Tensor:
    """Channels that turn more than `beta_fast` times in the original context keep their speed, those that turn less
    than `beta_slow` times are stretched, those between by a ramp over the number of the channel."""
    low, high = (
        dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def rotary_angles(config: ModelConfig, positions_T: Tensor) -> Tensor:
    """Angles of the pairs of channels at integer positions, float32 [T, rotary_dim / 2]."""
    return torch.outer(positions_T.float(), _speeds_on(config, positions_T.device))


@lru_cache(maxsize=16)
def _speeds_on(config: ModelConfig, device: torch.device) -> Tensor:
    """Copied once to each device, not once for each batch."""
    return rotary_speeds(config).to(device)


def rotary_gain(config: ModelConfig) -> float:
    """What cosines and sines are multiplied by, and the logits of attention therefore with its square."""
    return 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
