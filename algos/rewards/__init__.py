"""Rewards as pure functions of a completion; nothing here knows processes, actors or files."""

from __future__ import annotations

from .catalogue import BUILTINS, RewardFunction, RewardValue, as_the_only_one, bind_builtin
from .extraction import boxed, extract, opens_thought
from .length import overlong_penalty
from .numbers import last_number, parse_number
from .outcome import SCALAR_KEY, RewardOutcome, outcome_of, outcomes_of

__all__ = [
    "BUILTINS",
    "SCALAR_KEY",
    "RewardFunction",
    "RewardOutcome",
    "RewardValue",
    "as_the_only_one",
    "bind_builtin",
    "boxed",
    "extract",
    "last_number",
    "opens_thought",
    "outcome_of",
    "outcomes_of",
    "overlong_penalty",
    "parse_number",
]
