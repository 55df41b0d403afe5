"""The data sources of a run: one without a name, or several by name; the ratio of draws, and which source is next.

The choice of the next source is Tijdeman's for the chairman assignment problem (Discrete Mathematics 32, 1980): of the
sources that a draw would not put too far ahead, the one that would be too far behind first. With k sources of shares s,
after any number t of draws each has had within 1 - 1/(2k - 2) of s * t. So every batch has the ratios, to less than two
prompts (one, if there are two sources). In whole numbers, so that it is the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from ...core.config.data import MAX_WEIGHT, MIN_WEIGHT
from ...core.errors import LedgerError
from ...core.protocols import PromptData
from ...core.samples import Prompt
from ...core.suggestion import suggest
from ..ledger.states import Row


class Sources:
    """Prompts by the rows of the ledger. Raises what the sources raise (DataError)."""

    def __init__(self, source: PromptData) -> None:
        self._by_name = source.by_name
        self.weights: Mapping[str, float] = source.weights if len(source.by_name) > 1 else {}
        """The run file's; empty: there is nothing to choose."""

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of names; "" alone: there is one source, without a name."""
        return tuple(self._by_name)

    def num_rows(self, name: str) -> int:
        return len(self._by_name[name])

    def has(self, name: str, draw: int) -> bool:
        return name in self._by_name and self._by_name[name].row_of(draw) is not None

    def place(self, name: str, draw: int) -> tuple[int, int]:
        """(pass, row of the pass) of a draw that the source has."""
        source = self._by_name[name]
        row = source.row_of(draw)
        assert row is not None, f"draw {draw} of {name or 'the data'}"
        return draw // len(source), row

    def prompt(self, row: Row) -> Prompt:
        """What a group that was drawn answers. Raises LedgerError if its source does not have it any more."""
        source = self._by_name.get(row.source)
        prompt = None if source is None else source.prompt(row.draw_of_source)
        if prompt is None:
            raise LedgerError(
                f"group {row.group_id} was draw {row.draw_of_source}{f' of {row.source}' if row.source else ''}, "
                "which the data no longer has",
                remedy="was data.max_passes lowered for a run that continues?",
            )
        return msgspec.structs.replace(prompt, group_id=row.group_id, draw=row.draw)


Shares = Mapping[str, int]
"""Source -> its share as a whole number, lowest terms; none is 0."""


def parse_mix(text: str, names: Sequence[str]) -> dict[str, Fraction]:
    """Weights of "math:0.7,code:0.3". Raises ValueError unless it names every source once, not all weights 0."""
    weights: dict[str, Fraction] = {}
    for part in text.split(","):
        name, colon, number = (word.strip() for word in part.partition(":"))
        if not colon:
            raise ValueError(f"{part.strip()!r} is no NAME:WEIGHT: write {_example(names)}")
        if name not in names:
            raise ValueError(f"there is no source {name!r}; {suggest(name, names)}")
        if name in weights:
            raise ValueError(f"{name} has two weights")
        weights[name] = _weight(name, number)
    if missing := [name for name in names if name not in weights]:
        raise ValueError(f"it says nothing of {', '.join(missing)}: write {missing[0]}:0 to switch it off")
    if not any(weights.values()):
        raise ValueError("no source has a weight: give one of them more than 0")
    return weights


def _weight(name: str, number: str) -> Fraction:
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"the weight of {name} is {number!r}, which is no number") from None
    if value < 0 or not (value == 0 or MIN_WEIGHT <= value <= MAX_WEIGHT):
        raise ValueError(f"the weight of {name} is {number}: must be 0, or from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    return Fraction(repr(value))


def mix_text(weights: Mapping[str, float]) -> str:
    return ",".join(f"{name}:{repr(weight).removesuffix('.0')}" for name, weight in sorted(weights.items()))


def shares_of(weights: Mapping[str, Fraction]) -> dict[str, int]:
    """In whole numbers without a common divisor, sources without a weight left out."""
    some = {name: weight for name, weight in sorted(weights.items()) if weight}
    scale = math.lcm(*(weight.denominator for weight in some.values()))
    whole = {name: int(weight * scale) for name, weight in some.items()}
    divisor = math.gcd(*whole.values())
    return {name: weight // divisor for name, weight in whole.items()}


def next_source(shares: Shares, counts: Mapping[str, int]) -> str:
    """From which source the next draw is, `counts` having been drawn by these shares before."""
    if len(shares) == 1:
        return next(iter(shares))
    whole, slack = sum(shares.values()), 2 * len(shares) - 2
    after = sum(counts.get(name, 0) for name in shares) + 1

    def is_due(name: str) -> bool:
        return slack * (shares[name] * after - counts.get(name, 0) * whole) >= whole

    def late_at(name: str) -> Fraction:
        return Fraction(slack * (counts.get(name, 0) + 1) - 1, shares[name])

    return min((name for name in shares if is_due(name)), key=lambda name: (late_at(name), name))


def _example(names: Sequence[str]) -> str:
    return ",".join(f"{name}:{1 / len(names):.2g}" for name in names)
