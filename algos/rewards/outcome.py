"""What a user's function may return, what an answer's length costs, and pass@k.

The soft over-long punishment of DAPO (arXiv 2503.14476, equation 13), for n tokens:

    L_max - L_buffer >= n              0
    L_max - L_buffer < n <= L_max      (L_max - L_buffer - n) / L_buffer, from 0 down to -1
    L_max < n                          -1

pass@k is the chance that at least one of k answers to a prompt solves it, estimated from n answers of which c solve it
(Chen et al. 2021, arXiv:2107.03374): 1 - C(n - c, k) / C(n, k). The plain estimate 1 - (1 - c/n)^k is biased downwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from decimal import Decimal
from math import comb
from numbers import Real
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

T = TypeVar("T")

LARGEST = float(np.finfo(np.float32).max)
"""Rewards are carried as float32."""
SCALAR_KEY = "reward"
"""In a returned dict, the number that is learnt from; the others are shown as metrics."""


class Unusable(ValueError):
    """What was returned instead of what is wanted."""


class RewardOutcome(msgspec.Struct, frozen=True):
    """A judged completion."""

    value: float
    parts: dict[str, float] = {}
    """Named components, for metrics only."""


def outcome_of(returned: object) -> RewardOutcome:
    """A function's return value as an outcome. Raises Unusable."""
    if not isinstance(returned, Mapping):
        return RewardOutcome(number_of(returned))
    table = cast("Mapping[object, object]", returned)
    if SCALAR_KEY not in table:
        keys = ", ".join(repr(key) for key in table) or "nothing"
        raise Unusable(f'returned a dict without "{SCALAR_KEY}"; it has {keys}')
    parts: dict[str, float] = {}
    for key, value in table.items():
        if not isinstance(key, str):
            raise Unusable(f"returned a dict with the key {key!r}, which is not text")
        if key != SCALAR_KEY:
            parts[key] = number_of(value, f' as "{key}"')
    return RewardOutcome(number_of(table[SCALAR_KEY], f' as "{SCALAR_KEY}"'), parts)


def outcomes_of(returned: object, num_answers: int) -> tuple[RewardOutcome, ...]:
    """What a function of a whole group returned, as one outcome for each answer. Raises Unusable."""
    places = [f"answer {index}" for index in range(num_answers)]
    return tuple(each_of(returned, places, "rewards", lambda entry, _: outcome_of(entry)))


def each_of(returned: object, places: Sequence[str], noun: str, judge: Callable[[object, int], T]) -> list[T]:
    """One entry for each of `places`, such as "answer 0", as `judge` takes it, with its number. Raises Unusable; what
    `judge` says is said with the place."""
    count = len(places)
    if not is_in_order(returned):
        raise Unusable(f"returned a value of type {type(returned).__name__}, not a sequence of {count} {noun}")
    entries = list(cast("Iterable[object]", returned))
    if len(entries) != count:
        raise Unusable(f"returned {len(entries)} {noun} for {count} {places[0].partition(' ')[0]}s")
    judged: list[T] = []
    for index, entry in enumerate(entries):
        try:
            judged.append(judge(entry, index))
        except Unusable as error:
            raise Unusable(f"{error}, for {places[index]}") from error
    return judged


def is_in_order(value: object) -> bool:
    """Whether it has entries, in an order: no text, mapping or set."""
    kind = type(value)
    is_sequence = issubclass(kind, Iterable) and issubclass(kind, Sized) and _shape_of(value) != ()
    return is_sequence and not issubclass(kind, str | bytes | bytearray | Mapping | Set)


def number_of(value: object, place: str = "") -> float:
    """A finite number that float32 holds, as a Python float. Raises Unusable."""
    scalar = _scalar(value)
    if scalar is None:
        shape_text = f" and of shape {shape}" if (shape := _shape_of(value)) else ""
        raise Unusable(f"returned a value of type {type(value).__name__}{shape_text}{place}, not a number")
    try:
        number = float(scalar)
    except OverflowError:
        raise Unusable(f"returned a number{place} that is too large") from None
    if not math.isfinite(number):
        raise Unusable(f"returned {number}{place}")
    if abs(number) > LARGEST:
        raise Unusable(f"returned {number:g}{place}, which is too large for a float32")
    return number


def _scalar(value: object) -> Real | Decimal | None:
    """The number that it is: also of numpy and of arrays of any library that have no dimension."""
    if isinstance(value, Real | Decimal):
        return value
    if isinstance(value, np.generic) or _shape_of(value) == ():
        item = cast("Any", value).item()
        return item if isinstance(item, Real) else None
    return None


def _shape_of(value: object) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return tuple(cast("tuple[int, ...]", shape)) if isinstance(shape, tuple) else None


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int) -> float:
    """Between -1 and 0, for an answer of `num_tokens` tokens where `max_tokens` are L_max. `buffer`, from 1 to
    `max_tokens`: over how many tokens before it the punishment grows."""
    return -min(max(num_tokens - (max_tokens - buffer), 0) / buffer, 1.0)


def pass_at(k: int, num_solved: int, num_answers: int) -> float:
    """Of one prompt. Raises ValueError unless 1 <= k <= n and 0 <= c <= n."""
    if not (1 <= k <= num_answers and 0 <= num_solved <= num_answers):
        raise ValueError(f"pass@{k} of {num_solved} solved of {num_answers} answers")
    return 1.0 - comb(num_answers - num_solved, k) / comb(num_answers, k)


def pass_rates(counts: Iterable[tuple[int, int]]) -> dict[int, float]:
    """K -> mean of pass@k over prompts, given (solved, answers) of each: for 1, 2, 4, ... up to the fewest answers that
    any prompt has. Empty without prompts."""
    pairs = list(counts)
    fewest = min((num_answers for _, num_answers in pairs), default=0)
    ks = [1 << power for power in range(fewest.bit_length()) if 1 << power <= fewest]
    return {k: sum(pass_at(k, solved, answers) for solved, answers in pairs) / len(pairs) for k in ks}
