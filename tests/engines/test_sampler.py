"""Draws follow the distribution they claim, cut where they should be, and depend on nothing but seed and position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from myxa.actors.engines.embedded.slots import SAMPLING_FIELDS, DrawnTokens, draw_tiles, stream_state, uniforms
from myxa.actors.engines.embedded.slots import draw as draw_from

VOCAB = 12
LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -4.0, 0.9, 0.5, -0.2, 1.7, float("-inf"), -0.7])
MIN_P_VALUE = 1e-4
SEED = 11


def rows(count: int, *, seed: int = 0, **wish: Any) -> Any:
    """Each wish for all rows, or one for each; with a number each to draw by."""
    states = np.asarray([stream_state(seed * count + i) for i in range(count)], dtype=np.uint64)
    made = np.zeros(count, dtype=[*SAMPLING_FIELDS, ("number", np.float64)])
    for name, value in ({"temperature": 1.0, "top_p": 1.0, "top_k": -1} | wish).items():
        made[name] = value
    made["number"] = uniforms(states, np.full(count, 7))
    return made


def draw(logits: torch.Tensor, wishes: Any) -> DrawnTokens:
    return draw_from(logits, wishes, wishes["number"].copy())


def expected(temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0) -> np.ndarray:
    """The distribution, worked out the slow way."""
    probs = (LOGITS / temperature).double().softmax(-1).numpy()
    order = np.argsort(-probs)
    kept, before = [], 0.0
    for rank, token in enumerate(order):
        if rank == 0 or (before < top_p and (top_k < 0 or rank < top_k) and probs[token] >= min_p * probs.max()):
            kept.append(token)
        before += probs[token]
    cut = np.zeros(VOCAB)
    cut[kept] = probs[kept]
    return cut / cut.sum()


@pytest.mark.parametrize(("temperature", "top_p", "top_k", "min_p"), [
    (1.0, 1.0, -1, 0.0), (0.6, 1.0, -1, 0.0), (2.5, 1.0, -1, 0.0), (1.0, 0.8, -1, 0.0), (1.0, 1.0, 3, 0.0),
    (1.3, 0.9, 5, 0.0), (1.0, 1e-6, -1, 0.0), (1.0, 1.0, -1, 0.3), (1.3, 0.9, 6, 0.2), (1.0, 1.0, -1, 1.0),
])  # fmt: skip
def test_draws_follow_the_distribution(temperature, top_p, top_k, min_p):
    count = 20_000
    wishes = rows(count, seed=SEED, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    drawn = draw(LOGITS.expand(count, VOCAB).clone(), wishes)
    wanted = expected(temperature, top_p, top_k, min_p)
    found = np.bincount(drawn.ids, minlength=VOCAB)
    assert found[wanted == 0].sum() == 0, "a token outside the cut was drawn"
    support = wanted > 0
    if support.sum() > 1:
        wanted = wanted[support] * count
        halves = torch.tensor([support.sum() - 1, ((found[support] - wanted) ** 2 / wanted).sum()]).double() / 2
        assert torch.special.gammaincc(*halves) > MIN_P_VALUE, f"seed {SEED}"  # Pearson's test
    full = (LOGITS / temperature).log_softmax(-1).numpy()
    assert np.abs(drawn.logprobs - full[drawn.ids]).max() < 1e-6, "log-probs are of the distribution before the cut"


@pytest.mark.parametrize("drawing", [draw_from, draw_tiles])
def test_what_was_left_is_told_with_log_probs_over_it(drawing):
    wishes = rows(40, temperature=1.3, top_p=[0.9, 1.0] * 20, top_k=[6, -1] * 20, min_p=[0.2, 0.0] * 20)
    drawn = drawing(LOGITS.expand(40, VOCAB).clone(), wishes, wishes["number"].copy(), tells_kept=True)
    cut, whole = expected(1.3, 0.9, 6, 0.2), expected(1.3)
    assert sorted(drawn.kept) == list(range(0, 40, 2)), "rows from which some were cut"
    for row, token in enumerate(drawn.ids):
        probs = cut if row % 2 == 0 else whole
        assert drawn.logprobs[row] == pytest.approx(np.log(probs[token]), abs=1e-5)
    for kept in drawn.kept.values():
        assert kept.dtype == np.int32
        assert set(kept.tolist()) == set(np.flatnonzero(cut).tolist())
    untold = drawing(LOGITS.expand(40, VOCAB).clone(), wishes, wishes["number"].copy())
    assert not untold.kept
    assert np.array_equal(untold.ids, drawn.ids)


def test_rows_of_different_wishes_do_not_disturb_each_other():
    count = 30_000
    plain = rows(count, seed=3)
    three = {"temperature": [1.0, 0.0, 0.5], "top_p": [1.0, 0.5, 0.7], "top_k": [-1, 4, 2]}
    mixed = rows(count, seed=3, **{name: np.tile(values, count // 3) for name, values in three.items()})
    logits = LOGITS.expand(count, VOCAB).clone()
    drawn = draw(logits, mixed)
    assert np.array_equal(drawn.ids[0::3], draw(logits, plain).ids[0::3])
    assert set(drawn.ids[1::3]) == {int(LOGITS.argmax())}
    assert np.allclose(drawn.logprobs[1::3], LOGITS.log_softmax(-1).max(), atol=1e-6), "greedy reports temperature 1"
    cut = expected(0.5, 0.7, 2)
    assert set(drawn.ids[2::3]) <= set(np.flatnonzero(cut))


def test_numbers_are_uniform_and_streams_unrelated():
    states = np.asarray([stream_state(i) for i in range(200)], dtype=np.uint64)
    numbers = np.stack([uniforms(states, np.full(200, position)) for position in range(200)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    distance = (
        np.abs(np.sort(numbers.ravel()) - (np.arange(numbers.size) + 0.5) / numbers.size).max() + 0.5 / numbers.size
    )
    assert 2 * np.exp(-2 * numbers.size * distance**2) > MIN_P_VALUE  # of Kolmogorov and Smirnov
    assert len(np.unique(numbers)) == numbers.size
    for shift in (1, 2, 17):  # neighbours in position and in seed
        assert abs(np.corrcoef(numbers[shift:].ravel(), numbers[:-shift].ravel())[0, 1]) < 0.02
        assert abs(np.corrcoef(numbers[:, shift:].ravel(), numbers[:, :-shift].ravel())[0, 1]) < 0.02


def test_extreme_numbers_never_leave_the_support():
    logits = LOGITS.expand(2, VOCAB).clone()
    edge = rows(2)
    edge["number"] = (0.0, np.nextafter(1.0, 0.0))
    drawn = draw(logits, edge)
    assert drawn.ids[0] == 0
    assert np.isfinite(drawn.logprobs).all()
    assert 10 not in draw(logits, edge).ids, "a token of probability 0"


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_rows_with_nan_or_infinite_logits_are_marked(poison):
    logits = LOGITS.expand(3, VOCAB).clone()
    logits[1, 4] = poison
    drawn = draw(logits, rows(3))
    assert drawn.is_finite.tolist() == [True, False, True]
    assert drawn.ids.min() >= 0
    assert drawn.ids.max() < VOCAB


def test_any_seed_is_welcome():
    for seed in (0, -1, 2**70, -(2**70), 12345):
        assert 0 <= stream_state(seed) < 2**64
    assert len({stream_state(s) for s in range(-500, 500)}) == 1000
