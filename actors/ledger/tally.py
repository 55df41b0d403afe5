"""Counts of groups by state and by reason, and how long they were: what the run report says of bias."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from .states import Row, State

TRAINED_LENGTH = "trained"
_MASKED = "masked "


def masked_text(masked: Mapping[str, int]) -> str:
    """What a transition says of a group's members that nothing is learnt from: reasons, and how many for each."""
    return _MASKED + orjson.dumps(dict(masked), option=orjson.OPT_SORT_KEYS).decode() if masked else ""


class Tally:
    """Kept up to date change by change; built once by SQL."""

    SQL = (
        "SELECT state, reason, COUNT(*), SUM(num_tokens >= 0), SUM(MAX(num_tokens, 0)) FROM groups "
        "GROUP BY state, reason"
    )

    MASKED_SQL = (
        "SELECT detail, COUNT(*) FROM transitions WHERE to_state = 'READY' AND detail LIKE 'masked {%' GROUP BY detail"
    )

    def __init__(self, found: Iterable[tuple[Any, ...]] = (), masked: Iterable[tuple[Any, ...]] = ()) -> None:
        self.masked: Counter[str] = Counter()
        """Reason -> members of groups that were kept, from which nothing is learnt."""
        for note, num_groups in masked:
            self.note_masked(note, num_groups)
        self._states: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._lengths: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        for state, reason, num_groups, num_known, num_tokens in found:
            self._add(State(state), reason, num_groups, num_known, num_tokens)

    def note_masked(self, note: str, num_groups: int = 1) -> None:
        """So many groups were kept with that `masked_text`."""
        for reason, count in orjson.loads(note.removeprefix(_MASKED)).items() if note else ():
            self.masked[reason] += count * num_groups

    def change(self, before: Row | None, after: Row) -> None:
        """One group went from `before` to `after`."""
        for row, sign in ((before, -1), (after, 1)):
            if row is not None:
                self._add(row.state, row.reason, sign, sign * (row.num_tokens >= 0), sign * max(row.num_tokens, 0))

    def _add(self, state: State, reason: str, num_groups: int, num_known: int, num_tokens: int) -> None:
        self._states[str(state)] += num_groups
        if state is State.DROPPED:
            self._reasons[reason] += num_groups
        name = reason if state is State.DROPPED else TRAINED_LENGTH
        if state in (State.DROPPED, State.TRAINED, State.DURABLE):
            self._lengths[name] += num_known
            self._tokens[name] += num_tokens

    @property
    def states(self) -> dict[str, int]:
        """State -> number of groups; states without groups are left out."""
        return {state: count for state, count in self._states.items() if count}

    @property
    def dropped(self) -> dict[str, int]:
        """Reason -> number of dropped groups."""
        return {reason: count for reason, count in self._reasons.items() if count}

    @property
    def mean_tokens(self) -> dict[str, float]:
        """Mean response tokens of a group: "trained", and per reason for dropping, as far as lengths are known."""
        return {name: self._tokens[name] / count for name, count in self._lengths.items() if count}
