"""Who waits gets his share: of slots that come back at once, none is for whoever asks first alone."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.actors.buffer.groups import FairShare

FREE = 16


def test_nothing_is_kept_for_one_that_left_or_may_take_none():
    shares = FairShare()
    shares.waits("rollout/1", 0)
    assert shares.limit("rollout/0", 100, FREE, {}) == FREE
    shares.waits("rollout/1", 100)
    assert shares.limit("rollout/0", 100, FREE, {}) == FREE // 2
    shares.leaves("rollout/1")
    assert shares.limit("rollout/0", 100, FREE, {}) == FREE


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1),
    st.integers(0, 60),
    st.randoms(use_true_random=False),
)
def test_all_that_is_free_is_taken_in_whatever_order_they_come_and_nobody_is_far_ahead(actors, num_free, lot):
    shares, held = FairShare(), Counter({name: num for name, (_, num) in actors.items()})
    room = {name: room for name, (room, _) in actors.items()}
    for name in actors:
        shares.waits(name, room[name])
    left, at_first = num_free, Counter(held)
    for _ in range(len(actors) + 1):
        for name in lot.sample(sorted(actors), len(actors)):
            taken = min(room[name], shares.limit(name, room[name], left, held))
            assert 0 <= taken <= left
            if taken:
                shares.leaves(name)
                held[name], room[name], left = held[name] + taken, room[name] - taken, left - taken
                if room[name]:
                    shares.waits(name, room[name])
    assert left == max(0, num_free - sum(each for each, _ in actors.values())), "no slot stays free while there is room"
    for name, (at_most, _) in actors.items():
        assert held[name] >= min(at_first[name] + at_most, even_level(actors, num_free)), "nobody is left behind"


def even_level(actors: dict[str, tuple[int, int]], num_free: int) -> int:
    """Groups in hand to which one group after the other, each to whoever has fewest and room, brings all."""
    level = 0
    while sum(min(room, max(0, level + 1 - num)) for room, num in actors.values()) <= num_free and level < 200:
        level += 1
    return level
