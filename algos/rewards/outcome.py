"""What a reward function may return, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import cast

import msgspec

SCALAR_KEY = "reward"
"""In a returned dict, the number that is learnt from; the others are shown as metrics."""


class RewardOutcome(msgspec.Struct, frozen=True):
    """A judged completion."""

    value: float
    parts: dict[str, float] = {}
    """Named components, for metrics only."""


def outcome_of(returned: object) -> RewardOutcome:
    """A function's return value as an outcome. Raises TypeError or ValueError saying what is wrong with it."""
    if not isinstance(returned, Mapping):
        return RewardOutcome(_number(returned, "the reward"))
    table = cast("Mapping[object, object]", returned)
    if SCALAR_KEY not in table:
        keys = ", ".join(repr(key) for key in table) or "nothing"
        raise ValueError(f'the returned dict has no "{SCALAR_KEY}", only {keys}')
    parts: dict[str, float] = {}
    for key, value in table.items():
        if not isinstance(key, str):
            raise TypeError(f"the returned dict has the key {key!r}, which is not text")
        if key != SCALAR_KEY:
            parts[key] = _number(value, f'"{key}"')
    return RewardOutcome(_number(table[SCALAR_KEY], f'"{SCALAR_KEY}"'), parts)


def _number(value: object, what: str) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"{what} is of type {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}")
    return number
