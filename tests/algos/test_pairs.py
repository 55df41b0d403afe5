"""The losses of pairs, value and gradient, against the formulas as TRL's trainers have them, and who is whose other
half."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from myxa.algos.objective import Normaliser, TokenBatch, objective_config, policy_objective
from myxa.algos.ratios import Segments
from myxa.core.config import AlgoConfig
from myxa.core.errors import TrainError

BETA, SMOOTHING, MARGIN, CENTER = 0.3, 0.2, 0.7, 0.01


def batch(seed: int, *, num_pairs: int = 5, longest: int = 6) -> tuple[TokenBatch, list[tuple[int, int]]]:
    """Samples of unequal length in any order; of each pair the numbers of the better and the worse one. Scores
    (`longest` = 1) have margins."""
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    places = rng.sample(range(2 * num_pairs), 2 * num_pairs)
    pairs = list(zip(places[::2], places[1::2], strict=True))
    sample_T = torch.repeat_interleave(
        torch.arange(2 * num_pairs), torch.tensor([rng.randint(1, longest) for _ in places])
    )
    pair_S, signs_S = torch.zeros(2 * num_pairs, dtype=torch.int64), torch.zeros(2 * num_pairs, dtype=torch.float64)
    for number, (better, worse) in enumerate(pairs):
        pair_S[[better, worse]] = number
        signs_S[better] = 1 if longest > 1 else (1 + MARGIN * number) / 2
        signs_S[worse] = -signs_S[better]

    def drawn() -> Tensor:
        return -torch.rand(len(sample_T), generator=noise, dtype=torch.float64) - 0.05

    live_T = drawn().requires_grad_()
    segments = Segments(sample_T, 2 * num_pairs)
    tokens = TokenBatch(live_T, drawn(), signs_S[sample_T], segments, reference_T=drawn(), pair_S=pair_S)
    return tokens, pairs


def by_hand(name: str, tokens: TokenBatch, pairs: list[tuple[int, int]]) -> Tensor:
    """Pair by pair, from the log-probs of its tokens."""
    assert tokens.reference_T is not None
    found: list[Tensor] = []
    for pair in pairs:
        rows = [tokens.segments.sample_T == one for one in pair]
        live = [tokens.logprobs_T[row] for row in rows]
        chosen, rejected = (one.sum() for one in live)
        ref_chosen, ref_rejected = (tokens.reference_T[row].sum() for row in rows)
        logits = (chosen - rejected) - (ref_chosen - ref_rejected)
        if name == "dpo":
            loss = -logsigmoid(BETA * logits) * (1 - SMOOTHING) - logsigmoid(-BETA * logits) * SMOOTHING
        elif name == "hinge":
            loss = relu(1 - BETA * logits)
        elif name == "ipo":
            chosen_gain = (chosen - ref_chosen) / rows[0].sum()
            loss = (chosen_gain - (rejected - ref_rejected) / rows[1].sum() - 1 / (2 * BETA)) ** 2
        elif name == "simpo":
            gap = live[0].mean() - live[1].mean() - MARGIN / BETA
            loss = -logsigmoid(BETA * gap) * (1 - SMOOTHING) - logsigmoid(-BETA * gap) * SMOOTHING
        elif name == "bradley_terry":
            loss = -logsigmoid(chosen - rejected - MARGIN * len(found)) + CENTER * (chosen + rejected) ** 2
        else:
            a, b = live[0].mean(), live[1].mean()
            odds = (a - b) - (torch.log1p(-torch.exp(a)) - torch.log1p(-torch.exp(b)))
            loss = -a - BETA * logsigmoid(odds)
        found.append(loss)
    return torch.stack(found).mean()


def config(name: str) -> AlgoConfig:
    if name == "bradley_terry":
        return objective_config(AlgoConfig(kind="reward", center_coef=CENTER))
    more = {"label_smoothing": SMOOTHING} if name in ("dpo", "simpo") else {}
    more |= {"simpo_margin": MARGIN} if name == "simpo" else {}
    return objective_config(AlgoConfig.model_validate({"kind": "dpo", "loss": name, "beta": BETA, **more}))


@pytest.mark.parametrize("name", ["dpo", "ipo", "hinge", "simpo", "orpo", "bradley_terry"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_and_gradient_are_those_of_the_formula(name: str, seed: int) -> None:
    tokens, pairs = batch(seed, longest=1 if name == "bradley_terry" else 6)
    found = policy_objective(tokens, config(name), Normaliser(tokens=1, samples=2 * len(pairs)))
    wanted = by_hand(name, tokens, pairs)
    (own,) = torch.autograd.grad(found.loss, tokens.logprobs_T)
    (theirs,) = torch.autograd.grad(wanted, tokens.logprobs_T)
    torch.testing.assert_close(found.loss, wanted, rtol=0, atol=1e-9)
    torch.testing.assert_close(own, theirs, rtol=0, atol=1e-9)


def test_metrics_are_means_over_pairs() -> None:
    tokens, pairs = batch(4)
    assert tokens.reference_T is not None
    parts = policy_objective(tokens, config("dpo"), Normaliser(tokens=1, samples=2 * len(pairs))).parts
    gain_S = BETA * tokens.segments.sum_S(tokens.logprobs_T.detach() - tokens.reference_T)
    margins = torch.stack([gain_S[better] - gain_S[worse] for better, worse in pairs])
    assert float(parts["margin"]) == pytest.approx(float(margins.mean()))
    assert float(parts["accuracy"]) == pytest.approx(float((margins > 0).double().mean()))
    better = torch.stack([gain_S[one] for one, _ in pairs])
    assert float(parts["rewards/chosen"]) == pytest.approx(float(better.mean()))
    assert float(parts["rewards/chosen"] - parts["rewards/rejected"]) == pytest.approx(float(margins.mean()))


@pytest.mark.parametrize("pair_S", [[0, 0, 1, 2], [0, 0, 1, 1], [0, 1]])
def test_half_a_pair_is_refused(pair_S: list[int]) -> None:
    """Also two answers of a pair that are both the better one."""
    signs_S = torch.tensor([1.0, -1.0, 1.0, 1.0][: len(pair_S)])
    segments, zeros = Segments(torch.arange(len(pair_S)), len(pair_S)), torch.zeros(len(pair_S))
    tokens = TokenBatch(zeros, zeros, signs_S, segments, reference_T=zeros, pair_S=torch.tensor(pair_S))
    with pytest.raises(TrainError, match="half a pair"):
        policy_objective(tokens, config("dpo"), Normaliser(tokens=1, samples=4))


def test_a_micro_batch_of_nothing_counts_nothing() -> None:
    none, segments = torch.zeros(0, requires_grad=True), Segments(torch.zeros(0, dtype=torch.int64), 0)
    ids = torch.zeros(0, dtype=torch.int64)
    tokens = TokenBatch(none, none, none, segments, reference_T=none.detach(), pair_S=ids)
    found = policy_objective(tokens, config("dpo"), Normaliser(tokens=1, samples=4))
    assert float(found.loss.detach()) == 0.0
    assert all(float(part) == 0.0 for part in found.parts.values())
