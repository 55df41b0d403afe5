"""Which prompt comes next: first those whose tokens grew too old, then the sources by their shares, each in the order
of its draws.

The cursor itself is derived from the ledger; this only asks the sources. A prompt that is passed over, because it is
quarantined or outside the difficulty window, is drawn and given up in the same moment, so that every draw is in the
ledger.

What the window knows of a prompt is the mean reward of its newest group (the one drawn last) that was finished, whether
it was kept then or left out by the filter, and in which pass that was. A prompt of which nothing is known is always
drawn, and so is one that was passed over in `SKIPS` passes: a model that learns makes hard prompts easier. All of it is
read from the ledger.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec.structs import replace

from ...core.errors import DataError
from ...core.files import Tell
from ...core.samples import Prompt
from ..ledger.ledger import Ledger, Stretch
from ..ledger.states import OUT_OF_WINDOW, QUARANTINED, Row
from .quarantine import Quarantine
from .sources import Sources, mix_text, next_source, parse_mix, shares_of

MAX_PASSED_OVER = 1000
"""Quarantined prompts in a row; then there is nothing to train on."""
MAX_LOOKS = 1000
"""Draws that are passed over at one go, after which others may have their turn."""
SKIPS = 3
"""Passes in a row that a prompt outside the window is passed over."""


class Window(NamedTuple):
    """Mean rewards of prompts that are worth drawing; both ends are inside. Equal ends: there is no window."""

    low: float = 0.0
    high: float = 0.0

    def holds(self, reward: float) -> bool:
        return self.low >= self.high or self.low <= reward <= self.high


NO_WINDOW = Window()


class _Seen(NamedTuple):
    group_id: int
    pass_index: int
    reward: float


class PromptCursor:
    """Prompts as the groups they become. Raises what the sources raise (DataError)."""

    def __init__(self, sources: Sources, ledger: Ledger, quarantine: Quarantine, tell: Tell) -> None:
        """`tell` (kind, text): what happens to sources."""
        self.sources = sources
        self.ledger = ledger
        self.quarantine = quarantine
        self.num_quarantined = 0
        """In a row."""
        self.is_searching = False
        """The last look ended for the number of prompts that it passed over: the next one may start at once."""
        self._weights = parse_mix(mix_text(self.sources.weights), self.sources.names) if self.sources.weights else {}
        self._off: set[str] = {name for name in self.sources.names if not self._has(name)}
        """Sources that had nothing more at the last look."""
        self._tell = tell
        self._window = NO_WINDOW
        self._seen: dict[tuple[str, int], _Seen] | None = None
        """Source and row of the pass -> what is known of the prompt; None: not asked for yet."""

    def use(self, mix: str, window: Window) -> None:
        """Draw by these from now on. `mix` was judged before, and is empty where there is nothing to choose."""
        self._window = window
        self._weights = parse_mix(mix, self.sources.names) if mix else {}

    def draw(self, num_samples: int, **given: Any) -> tuple[Row, Prompt] | None:
        """The next group, of so many samples, which the ledger has now, with the fields of its row that are `given`,
        and its prompt. None when there is none, for now (`is_searching`: look again at once) or at all. Raises
        DataError when there never will be any that may be given out."""
        self.is_searching = False
        for _ in range(MAX_LOOKS):
            row, stretch = self._next_row(num_samples)
            if row is None:
                return None
            if row.redraw_of < 0 and self._is_outside(row):  # one that is repeated keeps its prompt
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

    def judged(self, row: Row, reward: float) -> None:
        """A group of the prompt was finished, with that mean reward."""
        if self._seen is not None:
            self._note(row.group_id, row.source, row.draw_of_source, reward)

    def _is_outside(self, row: Row) -> bool:
        """Whether the window passes that prompt over."""
        if self._window.low >= self._window.high:
            return False
        if self._seen is None:
            self._seen = {}
            for group_id, source, draw, reward in self.ledger.judged():
                if self.sources.has(source, draw):  # else the passes of a resumed run were lowered
                    self._note(group_id, source, draw, reward)
        pass_index, at = self.sources.place(row.source, row.draw_of_source)
        seen = self._seen.get((row.source, at))
        return seen is not None and not self._window.holds(seen.reward) and pass_index <= seen.pass_index + SKIPS

    def _note(self, group_id: int, source: str, draw: int, reward: float) -> None:
        assert self._seen is not None
        pass_index, at = self.sources.place(source, draw)
        if (known := self._seen.get((source, at))) is None or known.group_id < group_id:
            self._seen[source, at] = _Seen(group_id, pass_index, reward)

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
        """Sources to draw from."""
        names = [name for name in self._wanted if self._has(name)]
        off = {*self._wanted} - {*names}
        for name in sorted(off - self._off) if self._weights else ():
            rest = "; others continue" if names else ""
            self._tell("source-ended", f"{name} has no more prompts after {self.ledger.draws.taken[name]} draws{rest}")
        self._off = off
        return names

    def _is_quarantined(self, prompt: Prompt) -> bool:
        """Whether a prompt is on that list. Raises DataError if nothing else came for long."""
        is_held = self.quarantine.holds(prompt)
        self.num_quarantined = self.num_quarantined + 1 if is_held else 0
        if self.num_quarantined >= MAX_PASSED_OVER:
            raise DataError(
                f"nothing is left to train on: the last {MAX_PASSED_OVER} draws brought only the "
                f"{len(self.quarantine)} prompts that are quarantined, for each of which reward or workflow failed",
                remedy="mend the function and resume the run, or set reward.quarantine_after = 0",
            )
        return is_held
