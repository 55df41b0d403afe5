"""Which prompt comes next: first those whose tokens grew too old, then the sources by their shares, each in the order
of its draws.

The cursor itself is derived from the ledger; this only asks the sources. A prompt that is passed over, because it is
quarantined or outside the difficulty window, is drawn and given up in the same moment, so that every draw is in the
ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from ...core.errors import DataError
from ...core.protocols import MixedSources, PromptSource
from ...core.samples import Prompt
from ..ledger.ledger import Ledger, Stretch
from ..ledger.states import OUT_OF_WINDOW, QUARANTINED, Row, State
from .difficulty import NO_WINDOW, Difficulty, Window
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

    def __init__(
        self, source: PromptSource | MixedSources, ledger: Ledger, quarantine: Quarantine | None = None
    ) -> None:
        self.sources = Sources(source)
        self.ledger = ledger
        self.quarantine = quarantine
        self.difficulty = Difficulty(ledger, self.sources)
        self.window = NO_WINDOW
        self.num_quarantined = 0
        """In a row."""
        self.is_searching = False
        """The last draft ended for the number of prompts that it passed over: the next one may start at once."""
        self.is_waiting = False
        """The last draft found nothing inside the window, and groups are under way that may change that."""
        self._busy: Collection[str] | None = None
        """`_under_way`, once one draft has asked."""
        self._weights = parse_mix(mix_text(self.sources.weights), self.sources.names) if self.sources.weights else {}
        self._shares: dict[tuple[str, ...], dict[str, int]] = {}
        self._off: set[str] = {name for name in self.sources.names if self._is_ended(name, 0)}
        """Sources that had nothing more at the last look."""
        self._news: list[tuple[str, str]] = []

    def use(self, mix: str, window: Window) -> None:
        """Draw by these from now on. `mix` was judged before, and is empty where there is nothing to choose."""
        if window != self.window:
            self.window = window
            self.difficulty.changed()
        self._weights = parse_mix(mix, self.sources.names) if mix else {}
        self._shares.clear()

    def draft(self, num_samples: int) -> Draft:
        """The next draws, of groups of so many samples, as they will be once the ledger has them."""
        self.is_searching = self.is_waiting = False
        self._busy = None
        return Draft(self, num_samples)

    def prompt_of(self, row: Row) -> Prompt:
        """The prompt of a group that was drawn. Raises LedgerError if the source does not have it any more."""
        return self.sources.prompt(row)

    def finished(self, row: Row, reward: float) -> None:
        self.difficulty.judged(row, reward, self.window)

    def failed(self, row: Row, reason: str, detail: str) -> None:
        if self.quarantine is not None:
            self.quarantine.failed(self.prompt_of(row), row.draw, reason, detail)

    def take_news(self) -> list[tuple[str, str]]:
        """(kind of event, words) of what happened to prompts and sources since the last look."""
        news, self._news = self._news, []
        quarantined = [] if self.quarantine is None else self.quarantine.take_news()
        return [*news, *(("prompt-quarantined", text) for text in quarantined)]

    @property
    def has_next(self) -> bool:
        return self.ledger.redraw() is not None or any(not self._is_ended(name, 0) for name in self._wanted)

    def names_on(self, ahead: Counter[str], new: Collection[str]) -> list[str]:
        """Sources to draw from, after so many draws `ahead` of each; empty: there is none, or none yet. One that has
        nothing inside the window is left out: for good, or with `skips` while groups of its own are under way (`new`:
        sources of those about to be), whose rewards might be informative. Raises DataError if no prompt is inside for
        good, and no group is under way."""
        names = [name for name in self._wanted if not self._is_ended(name, ahead[name])]
        outside = [name for name in names if self.difficulty.is_outside(name, self.window)]
        busy = {*new, *self._under_way()} if outside else set[str]()
        dry = [] if self.window.skips else outside
        resting = [name for name in outside if name in busy] if self.window.skips else []
        found = [name for name in names if name not in dry and name not in resting]
        off = set(self._wanted) - {*found, *resting}
        self._tell_of(off, set(dry), ahead, rest="; others continue" if found else "")
        if outside and not found:
            self.is_waiting = bool(busy)
            if not self.is_waiting:
                raise DataError(self.difficulty.in_words(dry, self.window), remedy=NOTHING_INSIDE)
        return found

    def _under_way(self) -> Collection[str]:
        if self._busy is None:
            self._busy = {row.source for row in self.ledger.rows(State.DISPATCHED, State.REQUEUED)}
        return self._busy

    def shares(self, names: Sequence[str]) -> dict[str, int]:
        key = tuple(names)
        if key not in self._shares:
            self._shares[key] = shares_of({name: self._weights[name] for name in names})
        return self._shares[key]

    @property
    def chooses(self) -> bool:
        return bool(self._weights)

    def is_outside(self, row: Row) -> bool:
        """Whether a draw is passed over for its difficulty. One that is repeated keeps its prompt."""
        return row.redraw_of < 0 and self.difficulty.passes_over(row, self.window)

    def is_quarantined(self, prompt: Prompt) -> bool:
        """Whether a prompt is on that list. Raises DataError if nothing else came for long."""
        is_held = self.quarantine is not None and self.quarantine.holds(prompt)
        self.num_quarantined = self.num_quarantined + 1 if is_held else 0
        if self.num_quarantined >= MAX_PASSED_OVER:
            num_listed = len(self.quarantine) if self.quarantine is not None else 0
            raise DataError(
                f"nothing is left to train on: the last {MAX_PASSED_OVER} draws brought only the {num_listed} prompts "
                "that are quarantined, for each of which reward or workflow failed",
                remedy="mend the function, then empty quarantine.jsonl or set reward.quarantine_after = 0",
            )
        return is_held

    @property
    def _wanted(self) -> list[str]:
        return [name for name in self.sources.names if not self._weights or self._weights[name]]

    def _is_ended(self, name: str, ahead: int) -> bool:
        return not self.sources.has(name, self.ledger.draws.taken[name] + ahead)

    def _tell_of(self, off: set[str], dry: set[str], ahead: Counter[str], *, rest: str) -> None:
        for name in sorted(off - self._off) if self._weights else ():
            if name in dry:
                self._news.append(("source-outside", f"{self.difficulty.in_words([name], self.window)}{rest}"))
            else:
                num_draws = self.ledger.draws.taken[name] + ahead[name]
                self._news.append(("source-ended", f"{name} has no more prompts after {num_draws} draws{rest}"))
        self._off = off


class Draft:
    """Draws that the ledger does not have yet. One per request; what is not written is forgotten with it."""

    def __init__(self, cursor: PromptCursor, num_samples: int) -> None:
        self._cursor = cursor
        self._num_samples = num_samples
        self._ledger = cursor.ledger
        self._taken: Counter[str] = Counter()
        self._given: set[str] = set()
        self._repeated: set[int] = set()
        self._in_stretch: Counter[str] = Counter(cursor.ledger.draws.in_stretch)
        self.stretch = cursor.ledger.draws.stretch
        self.rows: list[Row] = []
        """In order, those that are passed over among them."""
        self.prompts: dict[int, Prompt] = {}
        """Group -> prompt, of those that are not."""

    def next(self) -> Row | None:
        """The next group; None when there is none, for now (`PromptCursor.is_searching`: look again at once, or
        `is_waiting`) or at all. Raises DataError when there never will be any that may be given out."""
        for _ in range(MAX_LOOKS):
            row = self._take()
            if row is None:
                return None
            if self._cursor.is_outside(row):
                self.rows.append(replace(row, reason=OUT_OF_WINDOW))
                continue
            prompt = self._cursor.prompt_of(row)
            if self._cursor.is_quarantined(prompt):
                self.rows.append(replace(row, reason=QUARANTINED))
                continue
            self.rows.append(row)
            self.prompts[row.group_id] = prompt
            self._given.add(row.source)
            self._in_stretch[row.source] += row.redraw_of < 0
            return row
        self._cursor.is_searching = True
        return None

    def _take(self) -> Row | None:
        group_id = self._ledger.next_group_id + len(self.rows)
        if (again := self._ledger.redraw(self._repeated)) is not None:
            dropped, draw = again
            self._repeated.add(dropped)
            before = self._ledger.find(dropped)
            source, number = ("", -1) if before is None else (before.source, before.source_draw)
            return Row(group_id, draw, dropped, self._num_samples, source=source, source_draw=number)
        names = self._cursor.names_on(self._taken, self._given)
        if not names:
            return None
        draw = self._ledger.next_draw + self._taken.total()
        name = self._choose(names, draw) if self._cursor.chooses else names[0]
        number = self._ledger.draws.taken[name] + self._taken[name]
        self._taken[name] += 1
        return Row(group_id, draw, -1, self._num_samples, source=name, source_draw=number if name else -1)

    def _choose(self, names: Sequence[str], draw: int) -> str:
        """By the shares of the sources that there are now, counted from the draw on that first went by them."""
        shares = self._cursor.shares(names)
        mix = ",".join(f"{name}:{share}" for name, share in shares.items())
        if mix != self.stretch.mix:
            self.stretch, self._in_stretch = Stretch(mix, draw), Counter[str]()
        return next_source(shares, self._in_stretch)
