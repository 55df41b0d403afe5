"""What a reward function may return, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set, Sized
from decimal import Decimal
from numbers import Real
from typing import Any, cast

import msgspec
import numpy as np

LARGEST = float(np.finfo(np.float32).max)
"""Rewards are carried as float32."""
SCALAR_KEY = "reward"
"""In a returned dict, the number that is learnt from; the others are shown as metrics."""


class RewardOutcome(msgspec.Struct, frozen=True):
    """A judged completion."""

    value: float
    parts: dict[str, float] = {}
    """Named components, for metrics only."""


def outcome_of(returned: object) -> RewardOutcome:
    """A function's return value as an outcome. Raises TypeError or ValueError saying what was returned instead."""
    if not isinstance(returned, Mapping):
        return RewardOutcome(_number(returned, ""))
    table = cast("Mapping[object, object]", returned)
    if SCALAR_KEY not in table:
        keys = ", ".join(repr(key) for key in table) or "nothing"
        raise ValueError(f'returned a dict without "{SCALAR_KEY}"; it has {keys}')
    parts: dict[str, float] = {}
    for key, value in table.items():
        if not isinstance(key, str):
            raise TypeError(f"returned a dict with the key {key!r}, which is not text")
        if key != SCALAR_KEY:
            parts[key] = _number(value, f' as "{key}"')
    return RewardOutcome(_number(table[SCALAR_KEY], f' as "{SCALAR_KEY}"'), parts)


def outcomes_of(returned: object, num_answers: int) -> tuple[RewardOutcome, ...]:
    """What a function of a whole group returned, as one outcome for each answer. Raises TypeError or ValueError saying
    what was returned instead."""
    kind = type(returned)
    is_sequence = issubclass(kind, Iterable) and issubclass(kind, Sized)
    if not is_sequence or issubclass(kind, str | bytes | bytearray | Mapping | Set):
        raise TypeError(f"returned a value of type {kind.__name__}, not a sequence of {num_answers} rewards")
    rewards = list(cast("Iterable[object]", returned))
    if len(rewards) != num_answers:
        raise ValueError(f"returned {len(rewards)} rewards for {num_answers} answers")
    outcomes: list[RewardOutcome] = []
    for index, one in enumerate(rewards):
        try:
            outcomes.append(outcome_of(one))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}, for answer {index}") from error
    return tuple(outcomes)


def _number(value: object, where: str) -> float:
    scalar = _scalar(value)
    if scalar is None:
        raise TypeError(f"returned a value of type {_type_of(value)}{where}, not a number")
    try:
        number = float(scalar)
    except OverflowError:
        raise ValueError(f"returned a number{where} that is too large") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number}{where}")
    if abs(number) > LARGEST:
        raise ValueError(f"returned {number:g}{where}, which is too large for a float32")
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


def _type_of(value: object) -> str:
    shape = _shape_of(value)
    return type(value).__name__ + (f" and of shape {shape}" if shape else "")
