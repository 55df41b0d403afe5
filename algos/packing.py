"""Which rank trains which samples in which micro-batch: balanced, within the token limit, the same on every machine.

    whole batch --groups, evenly--> mini-batches --samples, by tokens--> bins <= max_tokens --dealt--> ranks

A mini-batch is an optimizer step, so groups stay whole in it; inside it any rank may train any sample. Bins are filled
by "longest first into the emptiest bin" (LPT, Graham 1969), which honours the limit as it goes; bins differ by at most
one sample. `binpacking` and `prtpy` do not fill a multiple of the ranks with none over the limit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Micro = list[int]
RankPlan = list[list[Micro]]
"""[minibatch][micro-batch] -> indexes of samples; an empty micro-batch only pads the count."""


def plan_shards(
    num_tokens: Sequence[int], num_ranks: int, max_tokens: int, minibatches: int, group_ids: Sequence[int]
) -> list[RankPlan]:
    """One plan per rank. `num_tokens[i]` is P + R of sample i, `group_ids[i]` its group; indexes are ascending.

    Every sample is in exactly one micro-batch of one rank. In each mini-batch all ranks have the same number of
    micro-batches. No micro-batch of several samples exceeds `max_tokens`; a longer sample sits alone. Mini-batches
    hold equally many groups (one more in some when it does not divide), chosen so that their tokens are even; with
    fewer groups than mini-batches the last ones are empty, without any micro-batch, and make no optimizer step.
    """
    plans: list[RankPlan] = [[] for _ in range(num_ranks)]
    for members in _split_groups(num_tokens, minibatches, group_ids):
        bins = _fill_bins(members, num_tokens, num_ranks, max_tokens)
        for plan, micros in zip(plans, _deal(bins, num_tokens, num_ranks), strict=True):
            plan.append(micros)
    return plans


def _split_groups(num_tokens: Sequence[int], minibatches: int, group_ids: Sequence[int]) -> list[list[int]]:
    """Sample indexes of each mini-batch: whole groups, numbers of groups even, tokens as even as that allows."""
    members: dict[int, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(index)
    groups = sorted(members.values(), key=lambda group: (-sum(num_tokens[i] for i in group), group[0]))
    share, extra = divmod(len(groups), minibatches)
    room = [share + (1 if m < extra else 0) for m in range(minibatches)]
    parts: list[list[int]] = [[] for _ in range(minibatches)]
    heap = [(0, m) for m in range(minibatches) if room[m]]
    for group in groups:
        load, m = heapq.heappop(heap)
        parts[m].extend(group)
        room[m] -= 1
        if room[m]:
            heapq.heappush(heap, (load + sum(num_tokens[i] for i in group), m))
    return [sorted(part) for part in parts]


def _fill_bins(members: Sequence[int], num_tokens: Sequence[int], num_ranks: int, max_tokens: int) -> list[Micro]:
    """The fewest bins found, a multiple of `num_ranks`, none of several samples over `max_tokens`; [] for nothing."""
    if not members:
        return []
    alone = [[i] for i in members if num_tokens[i] > max_tokens]
    packed = sorted((i for i in members if num_tokens[i] <= max_tokens), key=lambda i: (-num_tokens[i], i))
    needed = len(alone) + -(-sum(num_tokens[i] for i in packed) // max_tokens)
    count = max(1, -(-needed // num_ranks)) * num_ranks
    while True:
        # Ends: with a bin for every sample nothing can exceed the limit.
        bins = _longest_first(packed, num_tokens, count - len(alone), max_tokens)
        if bins is not None:
            return alone + bins
        count += num_ranks


def _longest_first(
    ordered: Sequence[int], num_tokens: Sequence[int], count: int, max_tokens: int
) -> list[Micro] | None:
    """`ordered` (longest first) into `count` bins, each sample to the emptiest; None if that breaks the limit."""
    if not count:
        return None if ordered else []
    bins: list[Micro] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for index in ordered:
        load, b = heap[0]
        if load + num_tokens[index] > max_tokens:
            return None
        bins[b].append(index)
        heapq.heapreplace(heap, (load + num_tokens[index], b))
    return bins


def _deal(bins: Sequence[Micro], num_tokens: Sequence[int], num_ranks: int) -> list[list[Micro]]:
    """Bins of like size go to the ranks in one round, the largest to the rank with least so far."""
    loads = [sum(num_tokens[i] for i in micro) for micro in bins]
    order = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    dealt: list[list[Micro]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda r: (totals[r], r))
        for rank, b in zip(ranks, order[start : start + num_ranks], strict=True):
            dealt[rank].append(sorted(bins[b]))
            totals[rank] += loads[b]
    return dealt
