"""`myxa plan` says what a run optimises, with the numbers of this run."""

from __future__ import annotations

import pytest

from myxa.core.config import RunConfig
from myxa.launch.checks.objective_text import objective_lines


def told(**algo) -> dict[str, str]:
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "algo": algo})
    return {line[:12].strip(): line[13:] for line in objective_lines(config)}


@pytest.mark.parametrize(
    ("algo", "part", "text"),
    [
        ({"kind": "gspo"}, "minimised", "mean(L), L = -min(r A, clip(r, 0.9997, 1.0004) A)"),
        ({"kind": "gspo"}, "ratio r", "pi / behaviour, the policy that sampled the token; geometric mean over the sample"),
        ({"kind": "gspo"}, "mean", "over the tokens of each sample, then over samples"),
        ({"kind": "cispo"}, "minimised", "mean(L), L = -sg(clip(r, 0, 5)) A log pi"),
        ({"kind": "ppo"}, "left out", "no group"),
        ({"kind": "dr_grpo"}, "advantage A", "R - mean of its group"),
        ({"kind": "grpo", "normalise_std": False}, "advantage A", "R - mean of its group"),
        ({"minibatches": 4}, "weight w", "w = min(proximal / behaviour, 2)"),
        ({"minibatches": 4}, "minimised", "mean(w L), L = -min(r A, clip(r, 0.8, 1.2) A)"),
        ({"kl_coef": 0.1, "kl_kind": "k2"}, "KL",
         "k = x^2 / 2 (k2), x = log pi - log reference; reference: the initial model"),
        ({"kl_coef": 0.1}, "KL", ("k = exp(-x) - 1 + x (k3), x = log pi - log reference, weighted by pi / behaviour; "
         "reference: the initial model")),
        ({"kl_coef": 0.1, "kl_in": "advantage"}, "advantage A", "(R - mean) / std of its group, less 0.1 k per token"),
        ({"kl_coef": 0.1, "kl_in": "advantage"}, "left out", "no group"),
        ({"kind": "ppo", "kl_coef": 0.1, "kl_in": "reward"}, "KL",
         "k = x (k1), x = log pi - log reference; reference: the initial model"),
    ],
)  # fmt: skip
def test_b_f2_the_formula_has_the_numbers_of_the_run(algo, part, text):
    assert told(**algo)[part] == text
