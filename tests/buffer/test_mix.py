"""Ratios of sources: what a text says, and how near to it the draws stay."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxa.actors.buffer.cursor import mix_text, next_source, parse_mix, shares_of

NAMES = ("code", "math")
weights = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 10**6)), min_size=1, max_size=6).filter(any)


@given(weights, st.integers(1, 120))
def test_every_source_stays_near_its_share(numbers: list[int], num_draws: int) -> None:
    """Tijdeman's bound, from the first draw on; so within twice as much in any stretch of them."""
    shares = shares_of({f"s{number}": Fraction(weight) for number, weight in enumerate(numbers)})
    bound = 1 - Fraction(1, 2 * len(shares) - 2) if len(shares) > 1 else Fraction(0)
    counts: Counter[str] = Counter()
    offs: dict[str, list[Fraction]] = {name: [Fraction(0)] for name in shares}
    for drawn in range(1, num_draws + 1):
        counts[next_source(shares, counts)] += 1
        for name, share in shares.items():
            offs[name].append(counts[name] - Fraction(share * drawn, sum(shares.values())))
    for found in offs.values():
        assert max(map(abs, found)) <= bound
        assert max(found) - min(found) <= 2 * bound
    assert {name for name, count in counts.items() if count} <= set(shares), "no weight, no draw"


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(1e-9, 1e9) | st.just(0.0), min_size=1).filter(
    lambda found: any(found.values())
))  # fmt: skip
def test_a_mix_is_written_as_it_is_read(found: dict[str, float]) -> None:
    parsed = parse_mix(mix_text(found), sorted(found))
    assert {name: float(weight) for name, weight in parsed.items()} == found


def test_equal_ratios_are_the_same_however_they_are_written() -> None:
    told = {tuple(shares_of(parse_mix(text, NAMES)).items()) for text in ("math:0.7,code:0.3", "code:3, math:7.0")}
    assert told == {(("code", 3), ("math", 7))}
    assert shares_of(parse_mix("math:1,code:0", NAMES)) == {"math": 1}


REFUSED = {
    "math:0.5": "code", "math:0.5,cod:1": "code", "math:0.5,physics:1,code:1": "physics", "math:-1,code:1": "-1",
    "math:0,code:0": "weight", "math:1,code:1,math:1": "math", "math:nan,code:1": "nan", "math:inf,code:1": "inf",
    "math:1e-300,code:1": "1e-300", "math:half,code:1": "half", "math:,code:1": "math", "math,code": "'math'", "": "''",
}  # fmt: skip


@pytest.mark.parametrize(("text", "named"), REFUSED.items())
def test_what_is_no_mix_is_refused_with_the_reason(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_mix(text, NAMES)
