"""What was drawn so far, counted: the cursor, over all sources and of each, and what is to be drawn once more.

Derived from the rows and kept up to date change by change. Knows rows; must not know which source is chosen, or why.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .file import LedgerReader
from .states import PASSED_OVER, REDRAWN, Row

_MARK = "mix"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Draws whose sources were chosen by the same shares, as long as nothing changes them."""

    mix: str = ""
    """The shares, as whoever chooses writes them; empty: there was no choice yet."""
    since: int = 0
    """First draw."""


class Draws:
    """See the module's head."""

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
