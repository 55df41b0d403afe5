"""How fast the channels of a head turn with the position, for every implementation of our models. Needs torch.

Stretched positions (`rope_scaling`) are transformers' own (`modeling_rope_utils`): YaRN, Llama 3.1's, linear.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from ...core.errors import ModelError, raised_as
from .model_config import ModelConfig


def rotary_speeds(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position of each pair of channels, float32 [rotary_dim / 2] (RoFormer, arXiv 2104.09864, equation
    34), and what cosines and sines are multiplied by. Raises ModelError where transformers cannot say it."""
    if config.rope_scaling is None:
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
        return 1.0 / config.rope_theta**exponents, 1.0
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    what = f"transformers makes no rotary positions of rope_scaling = {dict(config.rope_scaling)}"
    with raised_as(ModelError, what, Exception, remedy="mend config.json"):  # what is missing or impossible in it
        parsed: Any = AutoConfig.for_model(**copy.deepcopy(dict(config.source)))
        speeds, gain = cast(Any, ROPE_INIT_FUNCTIONS)[parsed.rope_parameters["rope_type"]](parsed, torch.device("cpu"))
        return speeds, float(gain)


def rotary_angles(config: ModelConfig, positions_T: Tensor) -> Tensor:
    """Angles of the pairs of channels at integer positions, float32 [T, rotary_dim / 2]."""
    return torch.outer(positions_T.float(), _speeds_on(config, positions_T.device))


@lru_cache(maxsize=16)
def _speeds_on(config: ModelConfig, device: torch.device) -> Tensor:
    """Copied once to each device, not once for each batch."""
    return rotary_speeds(config)[0].to(device)


@lru_cache(maxsize=16)
def rotary_gain(config: ModelConfig) -> float:
    """What cosines and sines are multiplied by, and the logits of attention therefore with its square."""
    return rotary_speeds(config)[1]
