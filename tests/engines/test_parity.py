"""Log-probs of the engine against a full forward of transformers, in every way a sequence can be batched or moved."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engines.contract import ask

from myxa.actors.engines.embedded.model import Decoder

TOLERANCE = 1e-5


def ragged(count: int, seed: int):
    rng = np.random.default_rng(seed)
    return [
        ask(
            f"r{i}", rng.integers(0, 256, rng.integers(1, 60)), max_new_tokens=int(rng.integers(1, 60)),
            temperature=(1.0, 0.7, 0.0, 1.6)[i % 4], ignore_eos=i % 3 == 0,
        )
        for i in range(count)
    ]  # fmt: skip


def worst_gap(judge, requests, results) -> float:
    """Largest difference of a log-prob to the full forward; greedy tokens must be the judge's too."""
    worst = 0.0
    for request in requests:
        got = results[request.request_id]
        wanted = judge.logprobs(request.input_ids, got.ids, request.sampling.temperature)
        worst = max(worst, float(np.abs(wanted - got.logprobs).max()))
        if request.sampling.temperature == 0:
            logits = judge.logits(request.input_ids, got.ids)
            assert float((logits.max(-1) - logits[np.arange(len(got.ids)), got.ids]).max()) < TOLERANCE
    return worst


@pytest.mark.parametrize("num_slots", [1, 64])
def test_ragged_requests_on_few_or_many_slots(num_slots, folders, make_core, run_core, judge):
    requests = ragged(16, seed=1)
    results = run_core(make_core(folders[0], num_slots=num_slots), requests)
    assert worst_gap(judge(folders[0]), requests, results) <= TOLERANCE
    for request in requests:
        got = results[request.request_id]
        assert (got.finish == "length") == (len(got.ids) == request.sampling.max_new_tokens) or got.finish == "stop"


@pytest.mark.parametrize("kind", ["qwen3+linear", "qwen2+yarn", "llama+llama3", "mistral"])
def test_the_dense_families(kind, family, make_core, run_core, judge):
    folder = family(kind)
    requests = ragged(12, seed=3)
    results = run_core(make_core(folder, num_slots=7), requests)
    assert worst_gap(judge(folder), requests, results) <= TOLERANCE


def test_members_of_a_group_share_one_prefill(folders, make_core, run_core, judge, monkeypatch):
    prompts = [np.arange(5, 25), np.arange(30, 37)]
    requests = [ask(f"g{i}", prompts[i % 2], max_new_tokens=8, ignore_eos=True) for i in range(16)]
    forwarded = []
    inner = Decoder.hidden

    def forward(self, weights, ids, *rest, **named):
        forwarded.append(len(ids))
        return inner(self, weights, ids, *rest, **named)

    monkeypatch.setattr(Decoder, "hidden", forward)
    results = run_core(make_core(folders[0]), requests)
    assert forwarded == [20 + 7] + [16] * 7, "tokens per forward pass: both prompts once, then a token for each member"
    assert worst_gap(judge(folders[0]), requests, results) <= TOLERANCE
    assert len({tuple(r.ids) for r in results.values()}) == 16, "members draw on their own"


def test_long_prompts_are_prefilled_over_several_steps(folders, make_core, run_core, judge, monkeypatch):
    monkeypatch.setattr("myxa.actors.engines.embedded.core.PREFILL_TOKENS", 100)
    requests = [ask(f"p{i}", np.arange(i, i + 40), max_new_tokens=9, ignore_eos=True) for i in range(12)]
    core = make_core(folders[0])
    most = []
    results = run_core(core, requests, before_step=lambda n: most.append(core.num_running))
    assert most[:5] == [0, 2, 4, 6, 8]
    assert worst_gap(judge(folders[0]), requests, results) <= TOLERANCE


def test_retract_matches_a_full_forward_of_each_tokens_own_version(folders, make_core, run_core, judge, load):
    """Weights change every 7 steps and the cache is rebuilt: each token belongs to exactly one version's forward."""
    core = make_core(folders[0], num_slots=4)
    requests = [ask(f"r{i}", 5 + i, max_new_tokens=30, ignore_eos=True, temperature=0.9) for i in range(5)]

    def swap(number: int) -> None:
        if number and number % 7 == 0:
            version = (core.version + 1) % 3
            core.swap(load(folders[version]), version, "retract")

    results = run_core(core, requests, swap)
    for request in requests:
        got = results[request.request_id]
        assert len(got.ids) == 30
        assert set(got.versions) == {0, 1, 2}
        for version, folder in enumerate(folders):
            wanted = judge(folder).logprobs(request.input_ids, got.ids, 0.9)
            assert np.abs(wanted - got.logprobs)[got.versions == version].max() <= TOLERANCE


def test_in_place_keeps_the_old_cache(folders, make_core, run_core, judge, load):
    """Tokens before the swap match version 0; the ones after match no single version, but the mixture the engine has:
    keys and values of the old weights under queries of the new ones."""
    core = make_core(folders[0])
    requests = [ask(f"r{i}", 10, max_new_tokens=30, ignore_eos=True) for i in range(4)]
    results = run_core(core, requests, lambda n: core.swap(load(folders[1]), 1, "in_place") if n == 12 else None)
    for request in requests:
        got = results[request.request_id]
        assert got.versions.tolist() == [0] * 12 + [1] * 18, "one token for each of twelve steps"
        before, after = (judge(folders[k]).logprobs(request.input_ids, got.ids, 1.0) - got.logprobs for k in (0, 1))
        assert np.abs(before)[:12].max() <= TOLERANCE
        assert np.abs(before)[12:].max() > 0.01
        assert np.abs(after)[12:].max() > 0.01


def test_bfloat16_is_close_but_not_equal(folders, make_core, run_core, judge):
    requests = ragged(10, seed=8)
    results = run_core(make_core(folders[0], dtype="bfloat16"), requests)
    requests = [r for r in requests if r.sampling.temperature]
    assert TOLERANCE < worst_gap(judge(folders[0]), requests, results) < 0.3
