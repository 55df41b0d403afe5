"""Estimators of KL(live policy || reference) from log-probs of sampled tokens.

Source: J. Schulman, "Approximating KL divergence" (2020), k1, k2, k3; the ratio-weighted variant is the unbiased
estimate of DeepSeek-V3.2 (arXiv 2512.02556, section on scaling GRPO). Knows tensors of log-probs, nothing else.

    x = live - reference
    k1 = x                      unbiased value; as a loss its gradient has mean 0, so it holds nothing back
    k2 = x^2 / 2                biased value, its gradient is that of the KL on on-policy tokens
    k3 = exp(-x) - 1 + x        unbiased value, never negative
    low_var_kl = k3 clamped to [-10, 10]
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.errors import ConfigError

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]

LOW_VAR_BOUND = 10.0
MAX_EXPONENT = 20.0
"""Exponents are bounded before `exp`, so that no ratio of two log-probs can overflow; e^20 is 5e8."""


def kl_terms(kind: KlKind, live_T: Tensor, reference_T: Tensor, ratio_T: Tensor | None = None) -> Tensor:
    """Per-token KL estimate, float [T] in nats, differentiable in `live_T` (and `ratio_T`).

    `ratio_T` (live / sampling policy, with gradient) makes it the unbiased variant: the estimate is multiplied by
    the ratio before low_var_kl's clamp. Raises ConfigError for an unknown kind.
    """
    x_T = live_T - reference_T.detach()
    if kind == "k1":
        k_T = x_T
    elif kind == "k2":
        k_T = x_T.square() / 2
    elif kind in ("k3", "low_var_kl"):
        k_T = torch.exp((-x_T).clamp(max=MAX_EXPONENT)) - 1 + x_T
    else:
        raise ConfigError(f'KL estimator "{kind}" is not known', remedy="use k1, k2, k3 or low_var_kl")
    if ratio_T is not None:
        k_T = ratio_T * k_T
    return k_T.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else k_T
