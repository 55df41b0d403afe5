"""The difficulty window: prompts that were too easy or too hard the last time are passed over for some passes.

What is known of a prompt is the mean reward of its newest group (the one drawn last) that was finished, whether it was
kept then or left out by the filter, and in which pass that was. Groups that were given up before they were finished
carry no signal. A prompt of which nothing is known is always drawn. One that is passed over is drawn once more after
`skips` passes: a model that learns makes hard prompts easier. All of it is read from the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.messages import Record
from ..ledger.ledger import Ledger
from ..ledger.states import Row
from .sources import Sources


class Window(Record, frozen=True):
    """Mean rewards of prompts that are worth drawing."""

    low: float = 0.0
    high: float = 0.0
    """Both ends are inside; equal ends: there is no window."""
    skips: int = 3
    """Passes in a row that a prompt outside is passed over at most; 0: for ever."""

    @property
    def is_open(self) -> bool:
        return self.low >= self.high

    def holds(self, reward: float) -> bool:
        return self.is_open or self.low <= reward <= self.high


NO_WINDOW = Window()


@dataclass(frozen=True, slots=True)
class _Seen:
    group_id: int
    pass_index: int
    reward: float


class Difficulty:
    """What is known of every prompt, by source and row of the pass."""

    def __init__(self, ledger: Ledger, sources: Sources) -> None:
        self._ledger = ledger
        self._sources = sources
        self.window = NO_WINDOW
        self._seen: dict[tuple[str, int], _Seen] | None = None
        """None: not asked for yet."""
        self._circled: Counter[str] = Counter()
        """Source -> draws of it that were passed over since one of its prompts was inside."""

    def use(self, window: Window) -> None:
        if window != self.window:
            self.window = window
            self._circled.clear()

    def judged(self, row: Row, reward: float) -> None:
        if self._seen is not None:
            self._note(row.group_id, row.source, row.draw_of_source, reward)
        if self.window.holds(reward):
            self._circled[row.source] = 0

    def passes_over(self, row: Row) -> bool:
        if self.window.is_open:
            return False
        pass_index, at = self._sources.place(row.source, row.draw_of_source)
        seen = self._known().get((row.source, at))
        if seen is None or self.window.holds(seen.reward) or 0 < self.window.skips < pass_index - seen.pass_index:
            self._circled[row.source] = 0
            return False
        self._circled[row.source] += 1
        return True

    def is_outside(self, name: str) -> bool:
        """Whether all rows of that source were passed over in a row: will be until something changes, or, with `skips`,
        for some passes yet. Where passes are shuffled, a row that comes first in one and last in the next has twice the
        rest between."""
        return not self.window.is_open and self._circled[name] >= 2 * self._sources.num_rows(name) - 1

    def in_words(self, names: Sequence[str]) -> str:
        known = [seen.reward for (name, _), seen in self._known().items() if name in names]
        rewards = [reward for reward in known if not self.window.holds(reward)]
        below = sum(reward < self.window.low for reward in rewards)
        whose = f" of {names[0]}" if len(names) == 1 and names[0] else ""
        return (
            f"the mean rewards of all {len(rewards)} prompts{whose} lie outside the difficulty window "
            f"{self.window.low:g} to {self.window.high:g}: {below} below it, {len(rewards) - below} above"
        )

    def _known(self) -> dict[tuple[str, int], _Seen]:
        if self._seen is None:
            self._seen = {}
            for group_id, source, draw, reward in self._ledger.judged():
                if self._sources.has(source, draw):  # else the passes of a resumed run were lowered
                    self._note(group_id, source, draw, reward)
        return self._seen

    def _note(self, group_id: int, source: str, draw: int, reward: float) -> None:
        pass_index, at = self._sources.place(source, draw)
        known, key = self._known(), (source, at)
        if key not in known or known[key].group_id < group_id:
            known[key] = _Seen(group_id, pass_index, reward)
