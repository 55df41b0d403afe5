"""The planner's promises as properties over random batches."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.algos.packing import plan_shards

MAX_TOKENS = 100
batches = st.lists(st.tuples(st.integers(1, 140), st.integers(0, 12)), min_size=0, max_size=60)
ranks = st.integers(1, 5)
minibatch_counts = st.integers(1, 4)


def plan_of(rows, num_ranks, minibatches, max_tokens=MAX_TOKENS):
    return plan_shards([n for n, _ in rows], num_ranks, max_tokens, minibatches, [g for _, g in rows])


def load(rows, micro):
    return sum(rows[i][0] for i in micro)


@settings(max_examples=200, deadline=None)
@given(batches, ranks, minibatch_counts)
def test_what_every_plan_promises(rows, num_ranks, minibatches):
    plan = plan_of(rows, num_ranks, minibatches)
    assert plan == plan_of(rows, num_ranks, minibatches), "it is deterministic"
    micros = [micro for rank in plan for part in rank for micro in part]
    assert sorted(i for micro in micros for i in micro) == list(range(len(rows))), "every sample exactly once"
    assert all(micro == sorted(micro) for micro in micros)
    assert len(plan) == num_ranks and all(len(rank) == minibatches for rank in plan)
    assert all(len({len(rank[m]) for rank in plan}) == 1 for m in range(minibatches)), "as many micros on each rank"
    assert all(load(rows, micro) <= MAX_TOKENS or len(micro) == 1 for micro in micros), "over the limit only alone"
    groups = [{rows[i][1] for rank in plan for micro in rank[m] for i in micro} for m in range(minibatches)]
    sizes = [len(part) for part in groups]
    assert sum(sizes) == len({g for _, g in rows}), "no group in two mini-batches"
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=150, deadline=None)
@given(batches, ranks)
def test_ranks_and_microbatches_are_balanced_and_padding_is_little(rows, num_ranks):
    """Without oversize samples two micro-batches, and two ranks, differ by at most the longest sample."""
    rows = [(min(n, MAX_TOKENS), g) for n, g in rows]
    plan = plan_of(rows, num_ranks, 1)
    longest = max((n for n, _ in rows), default=0)
    loads = [load(rows, micro) for rank in plan for micro in rank[0]]
    totals = [sum(load(rows, micro) for micro in rank[0]) for rank in plan]
    assert max(loads, default=0) - min(loads, default=0) <= longest
    assert max(totals) - min(totals) <= longest
    rounds = range(len(plan[0][0]))
    assert all(any(rank[0][position] for rank in plan) for position in rounds), "no round of empty micro-batches only"


def test_few_microbatches_are_used():
    """400 samples of 1 to 100 tokens: a plan at most a tenth over the least possible number of bins."""
    rows = [(1 + (37 * i) % 100, i // 8) for i in range(400)]
    plan = plan_of(rows, 4, 1, max_tokens=512)
    bins = sum(len(rank[0]) for rank in plan)
    least = -(-sum(n for n, _ in rows) // 512)
    assert bins <= least * 1.1 + 4


def test_tokens_of_minibatches_are_even():
    rows = [(1 + (37 * i) % 90, i // 4) for i in range(128)]
    plan = plan_of(rows, 2, 4)
    loads = [sum(load(rows, micro) for rank in plan for micro in rank[m]) for m in range(4)]
    assert max(loads) - min(loads) < 0.05 * sum(loads) / 4
