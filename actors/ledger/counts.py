"""What the ledger counts beside its rows, derived from them and kept up to date change by change.

Tally: groups by state and by reason, and how long they were: what the run report says of bias. Draws: the cursor, over
all sources and of each, and what is to be drawn once more. Must not know which source is chosen, or why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from .file import LedgerReader
from .states import PASSED_OVER, REDRAWN, Row, State

TRAINED_LENGTH = "trained"
_MASKED = "masked "


def masked_text(masked: Mapping[str, int]) -> str:
    """What a transition says of a group's members that nothing is learnt from: reasons, and how many for each."""
    return _MASKED + orjson.dumps(dict(masked), option=orjson.OPT_SORT_KEYS).decode() if masked else ""


class Tally:
    """Counts of groups by state and reason, and their lengths. Built once by SQL."""

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


_MARK = "mix"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Draws whose sources were chosen by the same shares, as long as nothing changes them."""

    mix: str = ""
    """The shares, as whoever chooses writes them; empty: there was no choice yet."""
    since: int = 0
    """First draw."""


class Draws:
    """What was drawn so far, and what is to be drawn once more."""

    def __init__(self, file: LedgerReader) -> None:
        """Count what the file holds. Raises LedgerError if it cannot be read."""
        self.next_id, self.next_draw = file.query(
            "SELECT COALESCE(MAX(group_id), -1) + 1, COALESCE(MAX(draw), -1) + 1 FROM groups"
        )[0]
        since, _, mix = file.meta().get(_MARK, "0 ").partition(" ")
        self.stretch = Stretch(mix, int(since))
        taken = "SELECT source, COUNT(*) FROM groups WHERE redraw_of < 0"
        self.taken: Counter[str] = Counter(dict(file.query(f"{taken} GROUP BY source")))
        """Source -> draws from it: the number of the next."""
        given = f"draw >= ? AND reason NOT IN ({', '.join('?' * len(PASSED_OVER))})"
        found = file.query(f"{taken} AND {given} GROUP BY source", self.stretch.since, *PASSED_OVER)
        self.in_stretch: Counter[str] = Counter(dict(found))
        """The same since the stretch began, without those that were passed over."""
        again = file.rows(
            f"state = 'DROPPED' AND reason IN ({', '.join('?' * len(REDRAWN))}) "
            "AND group_id NOT IN (SELECT redraw_of FROM groups)",
            *sorted(REDRAWN),
        )
        self.redraws = {row.group_id: row.draw for row in again}
        """Dropped group -> its draw, which is to be drawn once more."""

    def mark(self, stretch: Stretch) -> dict[str, str]:
        """What the file is to hold for a stretch that begins with the draws that are written now."""
        return {} if stretch == self.stretch else {_MARK: f"{stretch.since} {stretch.mix}"}

    def begin(self, stretch: Stretch) -> None:
        """It was written; its draws are noted after this."""
        if stretch != self.stretch:
            self.stretch, self.in_stretch = stretch, Counter()

    def note(self, before: Row | None, row: Row) -> None:
        """One group is as `row` says now."""
        if before is None:
            self.next_id = max(self.next_id, row.group_id + 1)
            self.next_draw = max(self.next_draw, row.draw + 1)
            self.redraws.pop(row.redraw_of, None)
            if row.redraw_of < 0:
                self.taken[row.source] += 1
                self.in_stretch[row.source] += row.draw >= self.stretch.since and row.reason not in PASSED_OVER
        elif row.reason in REDRAWN and not before.reason:
            self.redraws[row.group_id] = row.draw
