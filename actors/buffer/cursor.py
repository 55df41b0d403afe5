"""Which prompt comes next: first those whose tokens grew too old, then the sources by their shares, each in the order
of its draws.

The cursor itself is derived from the ledger; this only asks the sources. A prompt that is passed over, because it is
quarantined or outside the difficulty window, is drawn and given up in the same moment, so that every draw is in the
ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ...core.errors import DataError
from ...core.files import Tell
from ...core.samples import Prompt
from ..ledger.ledger import Ledger, Stretch
from ..ledger.states import OUT_OF_WINDOW, QUARANTINED, Row, State
from .difficulty import Difficulty, Window
from .quarantine import Quarantine
from .sources import Sources, mix_text, next_source, parse_mix, shares_of

MAX_PASSED_OVER = 1000
"""Quarantined prompts in a row; then there is nothing to train on."""
NOTHING_INSIDE = (
    "widen data.difficulty_low and data.difficulty_high, make them equal (no window), or let prompts be tried again "
    "with data.difficulty_skips above 0; then resume the run. What `myxa set` changed holds until the run file says "
    "something new: write values other than it had (0.1 for both ends is no window either)"
)
MAX_LOOKS = 1000
"""Draws that are passed over at one go, after which others may have their turn."""


class PromptCursor:
    """Prompts as the groups they become. Raises what the sources raise (DataError)."""

    def __init__(self, sources: Sources, ledger: Ledger, quarantine: Quarantine, tell: Tell) -> None:
        """`tell` (kind, text): what happens to sources."""
        self.sources = sources
        self.ledger = ledger
        self.quarantine = quarantine
        self.difficulty = Difficulty(ledger, self.sources)
        self.num_quarantined = 0
        """In a row."""
        self.is_searching = False
        """The last look ended for the number of prompts that it passed over: the next one may start at once."""
        self.is_waiting = False
        """The last look found nothing inside the window, and groups are under way that may change that."""
        self._weights = parse_mix(mix_text(self.sources.weights), self.sources.names) if self.sources.weights else {}
        self._off: set[str] = {name for name in self.sources.names if not self._has(name)}
        """Sources that had nothing more at the last look."""
        self._tell = tell

    def use(self, mix: str, window: Window) -> None:
        """Draw by these from now on. `mix` was judged before, and is empty where there is nothing to choose."""
        self.difficulty.use(window)
        self._weights = parse_mix(mix, self.sources.names) if mix else {}

    def draw(self, num_samples: int, **given: Any) -> tuple[Row, Prompt] | None:
        """The next group, of so many samples, which the ledger has now, with the fields of its row that are `given`,
        and its prompt. None when there is none, for now (`is_searching`: look again at once, or `is_waiting`) or at
        all. Raises DataError when there never will be any that may be given out."""
        self.is_searching = self.is_waiting = False
        for _ in range(MAX_LOOKS):
            row, stretch = self._next_row(num_samples)
            if row is None:
                return None
            if row.redraw_of < 0 and self.difficulty.passes_over(row):  # one that is repeated keeps its prompt
                self.ledger.dispatch([replace(row, reason=OUT_OF_WINDOW)], stretch)
                continue
            prompt = self.sources.prompt(row)
            if self._is_quarantined(prompt):
                self.ledger.dispatch([replace(row, reason=QUARANTINED)], stretch)
                continue
            (started,) = self.ledger.dispatch([replace(row, **given)], stretch)
            return started, prompt
        self.is_searching = True
        return None

    @property
    def has_next(self) -> bool:
        return self.ledger.redraw() is not None or any(map(self._has, self._wanted))

    @property
    def chooses(self) -> bool:
        return bool(self._weights)

    @property
    def _wanted(self) -> list[str]:
        return [name for name in self.sources.names if not self._weights or self._weights[name]]

    def _has(self, name: str) -> bool:
        return self.sources.has(name, self.ledger.draws.taken[name])

    def _next_row(self, num_samples: int) -> tuple[Row | None, Stretch]:
        draws, stretch = self.ledger.draws, self.ledger.draws.stretch
        if (again := self.ledger.redraw()) is not None:
            dropped, draw = again
            before = self.ledger.find(dropped)
            source, number = ("", -1) if before is None else (before.source, before.source_draw)
            row = Row(draws.next_id, draw, dropped, num_samples, source=source, source_draw=number)
            return row, stretch
        names = self._names()
        if not names:
            return None, stretch
        name = names[0]
        if self.chooses:  # by the shares of the sources that there are, counted from the draw that first went by them
            shares = shares_of({name: self._weights[name] for name in names})
            mix = ",".join(f"{name}:{share}" for name, share in shares.items())
            is_same = mix == stretch.mix
            stretch = stretch if is_same else Stretch(mix, draws.next_draw)
            name = next_source(shares, draws.in_stretch if is_same else {})
        number = draws.taken[name] if name else -1
        return Row(draws.next_id, draws.next_draw, -1, num_samples, source=name, source_draw=number), stretch

    def _names(self) -> list[str]:
        """Sources to draw from; empty: there is none, or none yet. One that has nothing inside the window is left out:
        for good, or with `skips` while groups of its own are under way, whose rewards might be informative. Raises
        DataError if no prompt is inside for good, and no group is under way."""
        names = [name for name in self._wanted if self._has(name)]
        outside = [name for name in names if self.difficulty.is_outside(name)]
        under_way = self.ledger.rows(State.DISPATCHED, State.REQUEUED) if outside else []
        busy = {row.source for row in under_way}
        can_rest = self.difficulty.window.skips > 0
        found = [name for name in names if name not in outside or (can_rest and name not in busy)]
        dry = [] if can_rest else outside
        off = {name for name in self._wanted if name not in names or name in dry}
        self._tell_of(off, dry, rest="; others continue" if found else "")
        if outside and not found:
            self.is_waiting = bool(busy)
            if not self.is_waiting:
                raise DataError(self.difficulty.in_words(dry), remedy=NOTHING_INSIDE)
        return found

    def _is_quarantined(self, prompt: Prompt) -> bool:
        """Whether a prompt is on that list. Raises DataError if nothing else came for long."""
        is_held = self.quarantine.holds(prompt)
        self.num_quarantined = self.num_quarantined + 1 if is_held else 0
        if self.num_quarantined >= MAX_PASSED_OVER:
            raise DataError(
                f"nothing is left to train on: the last {MAX_PASSED_OVER} draws brought only the "
                f"{len(self.quarantine)} prompts that are quarantined, for each of which reward or workflow failed",
                remedy="mend the function, then empty quarantine.jsonl or set reward.quarantine_after = 0",
            )
        return is_held

    def _tell_of(self, off: set[str], dry: Sequence[str], *, rest: str) -> None:
        for name in sorted(off - self._off) if self._weights else ():
            if name in dry:
                self._tell("source-outside", f"{self.difficulty.in_words([name])}{rest}")
            else:
                num_draws = self.ledger.draws.taken[name]
                self._tell("source-ended", f"{name} has no more prompts after {num_draws} draws{rest}")
        self._off = off
