"""A user's functions over a whole batch: rewards to rewards, and rewards to advantages.

Knows groups and what the functions may return. Must not know shards or ranks. They run on the leader alone, so all
ranks train on the same numbers. Whatever is wrong with a function or its answer is a UserCodeError that names it, the
step and the group: another attempt would end the same way, so it ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from ...core.config import AlgoConfig
from ...core.errors import UserCodeError
from ...core.samples import F32, Group
from ..user_code import ADVANTAGE_FN, REWARD_POST_PROCESS, Expected, UserFunction, load_function, what_was_raised

NOT_IN_ORDER: tuple[type, ...] = (str, bytes, dict, set, frozenset)
REMEDY = "mend the function; docs/algorithms.md says what it gets and returns"


@dataclass(frozen=True, slots=True)
class BatchFunctions:
    """Those that the run file names."""

    reward_post_process: UserFunction | None = None
    advantage_fn: UserFunction | None = None

    @classmethod
    def load(cls, algo: AlgoConfig) -> BatchFunctions:
        """Raises ConfigError or UserCodeError for one that cannot be loaded."""
        return cls(
            _load(algo.reward_post_process, REWARD_POST_PROCESS),
            _load(algo.advantage_fn, ADVANTAGE_FN),
        )

    def __bool__(self) -> bool:
        return self.reward_post_process is not None or self.advantage_fn is not None

    def rewarded(self, step: int, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups with the rewards that advantages are to be made of. Raises UserCodeError."""
        if self.reward_post_process is None:
            return groups
        call = _Call(REWARD_POST_PROCESS, self.reward_post_process, step)
        return [
            msgspec.structs.replace(group, rewards=np.asarray(call.numbers(group, row, "reward"), dtype=np.float32))
            for group, row in call.rows(groups)
        ]

    def advantages(self, step: int, groups: Sequence[Group]) -> list[float | F32] | None:
        """Of every sample, one group after another: a number, or float32 [R]. None: the algorithm's own. Raises
        UserCodeError."""
        if self.advantage_fn is None:
            return None
        call = _Call(ADVANTAGE_FN, self.advantage_fn, step)
        return [value for group, row in call.rows(groups) for value in call.advantages(group, row)]


def _load(name: str, expected: Expected) -> UserFunction | None:
    return load_function(name, expected) if name else None


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a function for one batch."""

    expected: Expected
    function: UserFunction
    step: int

    def rows(self, groups: Sequence[Group]) -> list[tuple[Group, Sequence[object]]]:
        """What it returned for each group."""
        try:
            returned: Any = self.function.fn(list(groups))
        except (Exception, SystemExit) as error:
            raise self._wrong(f"raised {what_was_raised(error)}") from error
        rows = _sequence(returned)
        if rows is None:
            raise self._wrong(f"returned a value of type {type(returned).__name__}, not one entry for each group")
        if len(rows) != len(groups):
            raise self._wrong(f"returned {len(rows)} entries for {len(groups)} groups")
        pairs: list[tuple[Group, Sequence[object]]] = []
        for group, row in zip(groups, rows, strict=True):
            values = _sequence(row)
            if values is None or len(values) != len(group.samples):
                found = f"a value of type {type(row).__name__}" if values is None else f"{len(values)} values"
                raise self._wrong(f"returned {found} for the {len(group.samples)} samples of group {group.group_id}")
            pairs.append((group, values))
        return pairs

    def numbers(self, group: Group, row: Sequence[object], what: str) -> list[float]:
        """One number for each sample."""
        return [self._number(value, what, group, i) for i, value in enumerate(row)]

    def advantages(self, group: Group, row: Sequence[object]) -> list[float | F32]:
        """A number or an array for each sample."""
        found: list[float | F32] = []
        for i, value in enumerate(row):
            is_row = _sequence(value) is not None
            found.append(self._tokens(value, group, i) if is_row else self._number(value, "advantage", group, i))
        return found

    def _number(self, value: object, what: str, group: Group, i: int) -> float:
        array = self._array(value, what, group, i)
        if array.ndim:
            raise self._wrong(f"returned a {what} of shape {list(array.shape)}, not a number", group, i)
        return float(array)

    def _tokens(self, value: object, group: Group, i: int) -> F32:
        length = len(group.samples[i].response_ids)
        array = self._array(value, "advantage", group, i)
        if array.shape != (length,):
            raise self._wrong(f"returned advantages of shape {list(array.shape)} for {length} tokens", group, i)
        return array

    def _array(self, value: object, what: str, group: Group, i: int) -> F32:
        try:
            array = np.asarray(value)
            is_number = array.dtype.kind in "fiub"
        except Exception as error:  # a user's class may do anything when it is asked for its numbers
            raise self._wrong(f"returned a {what} that raised {what_was_raised(error)}", group, i) from error
        if not is_number:
            raise self._wrong(f"returned a {what} of type {type(value).__name__}, which is no number", group, i)
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not bool(np.isfinite(array).all()):
            bad = float(array[~np.isfinite(array)].flat[0])
            raise self._wrong(f"returned a {what} of {bad} as float32", group, i)
        return array

    def _wrong(self, what: str, group: Group | None = None, i: int = 0) -> UserCodeError:
        place = f"step {self.step}" if group is None else f"step {self.step}, group {group.group_id}, sample {i}"
        return UserCodeError(f'{self.expected.key} = "{self.function.name}" {what} ({place})', remedy=REMEDY)


def _sequence(value: object) -> Sequence[object] | None:
    """The value if it has a length and can be gone through in order; None for numbers, texts, mappings and sets."""
    if isinstance(value, NOT_IN_ORDER) or getattr(value, "ndim", 1) == 0:
        return None
    is_in_order = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return cast("Sequence[object]", value) if is_in_order else None
