"""Is the gradient of each KL option that of the KL divergence? Exact expectations over a small softmax, no sampling.

    python bench/kl_exact.py

For each place (`algo.kl_in`), estimator (`kl_kind`) and `kl_unbiased`: the gradient of the trainer's own objective,
summed over all arms of a softmax by their probability under the drawing policy, against grad KL(policy || reference).
Unbiased estimates are drawn from a stale policy, under each correction. The exit status is 1 if an option that the run
file accepts is off by more than 1e-6, relative to the gradient's length.
"""

from __future__ import annotations

import itertools
import sys

import torch
from torch import Tensor

from myxa.algos.advantages import less_kl, token_advantages
from myxa.algos.objective import Normaliser, TokenBatch, objective_config, policy_objective
from myxa.algos.ratios import Segments, kl_terms
from myxa.core.config import AlgoConfig

NUM_ARMS, NUM_DRAWS, TOLERANCE = 5, 30, 1e-6
SPREADS = (0.02, 0.15, 0.6, 2.5)
"""Standard deviation of the distance between the logits of policy and reference."""
PLACES = ("loss", "reward", "advantage")
KINDS = ("k1", "k2", "k3")
WIDE = {"mis_low": 1e-6, "mis_high": 1e6, "tis_cap": 1e6}
"""Bounds of the corrections that remove nothing here."""


def is_accepted(place: str, kind: str, unbiased: bool) -> bool:
    """Whether a run file may ask for it."""
    try:
        AlgoConfig.model_validate(
            {"kind": "reinforce_pp", "kl_coef": 1.0, "kl_in": place, "kl_kind": kind, "kl_unbiased": unbiased}
        )
    except ValueError:
        return False
    return True


def kl(logits_A: Tensor, reference_A: Tensor) -> Tensor:
    """KL(policy || reference), 0-dim, from logits [A]."""
    live_A = logits_A.log_softmax(0)
    return (live_A.exp() * (live_A - reference_A.log_softmax(0))).sum()


def kl_gradient(logits_A: Tensor, reference_A: Tensor) -> Tensor:
    """Its gradient in the policy's logits, [A]."""
    leaf_A = logits_A.clone().requires_grad_()
    return torch.autograd.grad(kl(leaf_A, reference_A), leaf_A)[0]


def objective_gradient(
    logits_A: Tensor,
    reference_A: Tensor,
    config: AlgoConfig,
    *,
    drawn_A: Tensor | None = None,
    rewards_A: Tensor | None = None,
) -> Tensor:
    """Gradient of the objective in the policy's logits, [A], in expectation over arms drawn by `drawn_A` (logits;
    None: the policy itself). Each arm is a sample of one token; `rewards_A` are advantages as they are."""
    leaf_A = logits_A.clone().requires_grad_()
    live_A = leaf_A.log_softmax(0)
    drawn_by_A = (logits_A if drawn_A is None else drawn_A).log_softmax(0)
    judged_A = reference_A.log_softmax(0)
    total = live_A.new_zeros(())
    for arm in range(len(logits_A)):
        one = slice(arm, arm + 1)
        segments = Segments(torch.zeros(1, dtype=torch.long), 1)
        scalar_S = torch.zeros(1, dtype=live_A.dtype) if rewards_A is None else rewards_A[one]
        kl_T = kl_terms(config.kl_estimator, live_A[one].detach(), judged_A[one]) if config.kl_in != "loss" else None
        in_reward = config.kl_in == "reward"
        advantages_T = token_advantages(
            config.kind,
            scalar_S,
            segments,
            kl_T=kl_T if in_reward else None,
            kl_coef=config.kl_coef if in_reward else 0,
        )
        if kl_T is not None and not in_reward:
            advantages_T = less_kl(advantages_T, kl_T, config.kl_coef)
        batch = TokenBatch(
            logprobs_T=live_A[one],
            behaviour_T=drawn_by_A[one],
            advantages_T=advantages_T,
            segments=segments,
            proximal_T=live_A[one].detach(),
            reference_T=judged_A[one],
        )
        share = policy_objective(batch, config, Normaliser(tokens=1, samples=1, constant=1)).loss
        total = total + drawn_by_A[arm].exp() * share
    return torch.autograd.grad(total, leaf_A)[0]


def relative_error(
    place: str, kind: str, unbiased: bool, spread: float, correction: str = "behaviour", num_draws: int = NUM_DRAWS
) -> float:
    """Length of (expected gradient - grad KL) over the length of grad KL, mean over draws. Unbiased estimates are drawn
    by another policy than the one that is trained."""
    generator = torch.Generator().manual_seed(7)
    algo = AlgoConfig.model_construct(  # wrong ones too, which a run file may not have
        kind="reinforce_pp",
        loss="reinforce",
        correction=correction,
        minibatches=2,
        kl_coef=1.0,
        kl_in=place,
        kl_kind=kind,
        kl_unbiased=unbiased,
        **WIDE,  # pyright: ignore[reportArgumentType]
    )
    config = objective_config(algo)
    errors: list[float] = []
    for _ in range(num_draws):
        logits_A, away_A, stale_A = torch.randn(3, NUM_ARMS, dtype=torch.float64, generator=generator)
        reference_A = logits_A + spread * away_A
        drawn_A = logits_A + 0.3 * stale_A if unbiased else None
        wanted_A = kl_gradient(logits_A, reference_A)
        got_A = objective_gradient(logits_A, reference_A, config, drawn_A=drawn_A)
        errors.append(float((got_A - wanted_A).norm() / wanted_A.norm()))
    return sum(errors) / len(errors)


def main() -> int:
    print("| place | estimator | " + " | ".join(f"spread {spread:g}" for spread in SPREADS) + " | run file |")
    print("|---|---|" + "---|" * (len(SPREADS) + 1))
    worst = 0.0
    for place, kind, unbiased in itertools.product(PLACES, KINDS, (False, True)):
        if place != "loss" and unbiased:
            continue
        corrections = ("none", "behaviour", "decoupled", "tis", "icepop", "mis") if unbiased else ("behaviour",)
        errors = [max(relative_error(place, kind, unbiased, spread, one) for one in corrections) for spread in SPREADS]
        accepted = is_accepted(place, kind, unbiased)
        if accepted:
            worst = max(worst, *errors)
        name = f"{kind}, unbiased" if unbiased else kind
        cells = " | ".join(f"{error:.1e}" if 0 < error < 1e-3 else f"{error:.3f}" for error in errors)
        print(f"| {place} | {name} | {cells} | {'accepted' if accepted else 'refused'} |")
    print(f"\nworst error of what is accepted: {worst:.1e} (at most {TOLERANCE:g})")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
