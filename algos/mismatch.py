"""How far the engine's log-probs (behaviour) lie from the trainer's (train) for the same tokens.

The canary of asynchronous learning: with equal weights and a faithful engine all are 0 up to rounding; growth means
staleness, another precision, or a bug. Knows log-prob tensors. Must not know losses. With x = train - behaviour and
q = exp(x), exponents bounded to +-20:

    diff_abs   mean |x|
    k1         mean (behaviour - train)     estimates KL(behaviour || train); signed, so it may hide errors
    k3         mean (q - 1 - x)             the same, never negative
    chi2       mean q^2 - 1                 chi-square divergence; variance of the importance weights
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kl import MAX_EXPONENT
from .segments import Segments


def mismatch_sums(train_T: Tensor, behaviour_T: Tensor, segments: Segments) -> dict[str, Tensor]:
    """Masked token sums (0-dim, detached) of diff_abs, k1, k3, chi2; divide by the number of unmasked tokens.

    Additive over micro-batches and ranks.
    """
    x_T = segments.kept((train_T - behaviour_T).detach())
    q_T = torch.exp(x_T.clamp(-MAX_EXPONENT, MAX_EXPONENT))
    return {
        "mismatch_diff_abs": x_T.abs().sum(),
        "mismatch_k1": (-x_T).sum(),
        "mismatch_k3": segments.kept(q_T - 1 - x_T).sum(),
        "mismatch_chi2": segments.kept(q_T.square() - 1).sum(),
    }


def mismatch_metrics(train_T: Tensor, behaviour_T: Tensor, segments: Segments) -> dict[str, float]:
    """All token-level figures plus those that need whole samples, for one scored batch on one rank.

    ppl_ratio       mean over samples of perplexity(train) / perplexity(behaviour)
    sequence_chi2   mean over samples of (product of q)^2 - 1
    Fully masked samples are left out; a batch without any token gives zeros (and a ppl_ratio of 1).
    """
    num_tokens = max(int(segments.mask_T.sum()), 1)
    metrics = {name: float(total) / num_tokens for name, total in mismatch_sums(train_T, behaviour_T, segments).items()}
    present_S = segments.count_S() > 0
    if not bool(present_S.any()):
        return {**metrics, "mismatch_ppl_ratio": 1.0, "mismatch_sequence_chi2": 0.0}
    x_T = (train_T - behaviour_T).detach().double()
    mean_S = segments.mean_S(x_T)[present_S].clamp(-MAX_EXPONENT, MAX_EXPONENT)
    total_S = segments.sum_S(x_T)[present_S].clamp(-MAX_EXPONENT, MAX_EXPONENT)
    metrics["mismatch_ppl_ratio"] = float(torch.exp(-mean_S).mean())
    metrics["mismatch_sequence_chi2"] = float((torch.exp(2 * total_S) - 1).mean())
    return metrics
