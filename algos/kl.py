"""Estimators of KL(live policy || reference) from log-probs of sampled tokens.

Source: J. Schulman, "Approximating KL divergence" (2020), k1, k2, k3; the ratio-weighted variant is the unbiased
estimate of DeepSeek-V3.2 (arXiv 2512.02556, section on scaling GRPO).

    x = live - reference
    k1 = x                      unbiased value; as a loss its gradient has mean 0
    k2 = x^2 / 2                biased value
    k3 = exp(-x) - 1 + x        unbiased value, never negative

As a loss, E[grad k] on the policy's own tokens is grad KL(live || reference) for k2; for k3 it is grad KL(reference ||
live). Weighted by live / behaviour, k1 and k3 have the right value and gradient whatever policy the tokens are from. As
a constant factor of grad log pi (rewards, advantages) only k1 gives grad KL. `AlgoConfig` refuses the other cases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.config.learning import KlKind

MAX_EXPONENT = 20.0
"""Exponents are bounded before `exp`, so that no ratio of two log-probs can overflow; e^20 is 5e8."""


def kl_terms(kind: KlKind, live_T: Tensor, reference_T: Tensor, ratio_T: Tensor | None = None) -> Tensor:
    """Per-token KL estimate, float [T] in nats, differentiable in `live_T` (and `ratio_T`). `ratio_T` (live / sampling
    policy, with gradient) makes it the unbiased variant: the estimate is multiplied by the ratio."""
    x_T = live_T - reference_T.detach()
    if kind == "k1":
        k_T = x_T
    elif kind == "k2":
        k_T = x_T.square() / 2
    else:
        k_T = torch.exp((-x_T).clamp(max=MAX_EXPONENT)) - 1 + x_T
    return k_T if ratio_T is None else ratio_T * k_T
