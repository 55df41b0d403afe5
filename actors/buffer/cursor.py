"""Which prompt comes next: first those whose tokens grew too old, then the source in order of draws.

The cursor itself is derived from the ledger; this only asks the source. A quarantined prompt is drawn and given up in
the same moment, so that every draw is in the ledger. Knows no admission and no actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from ...core.errors import DataError, LedgerError
from ...core.protocols import PromptSource
from ...core.samples import Prompt
from ..ledger.ledger import Ledger
from ..ledger.states import Row
from .quarantine import QUARANTINED, Quarantine

MAX_PASSED_OVER = 1000
"""Quarantined prompts in a row; then there is nothing to train on."""


class PromptCursor:
    """Prompts as the groups they become. Raises what the source raises (DataError)."""

    def __init__(self, source: PromptSource, ledger: Ledger, quarantine: Quarantine | None = None) -> None:
        self.source = source
        self._ledger = ledger
        self.quarantine = quarantine
        self._end: int | None = None
        """First draw that the source does not have, once known."""

    def next(self, ahead: Sequence[Row], num_samples: int) -> tuple[Row, Prompt] | None:
        """The group, of so many samples, that comes after those `ahead`, which are not in the ledger yet; None when
        there is none, or a quarantined one is next, which the ledger takes only after those `ahead`.

        Raises DataError when nothing but quarantined prompts comes."""
        for _ in range(MAX_PASSED_OVER):
            drawn = self._next(ahead, num_samples)
            if drawn is None or self.quarantine is None or not self.quarantine.holds(drawn[1]):
                return drawn
            if ahead:
                return None
            self._ledger.dispatch([replace(drawn[0], reason=QUARANTINED)])
        raise DataError(
            f"{MAX_PASSED_OVER} prompts in a row are quarantined: reward or workflow failed for each of them",
            remedy="mend the function, then empty quarantine.jsonl or set reward.quarantine_after = 0",
        )

    def _next(self, ahead: Sequence[Row], num_samples: int) -> tuple[Row, Prompt] | None:
        group_id = self._ledger.next_group_id + len(ahead)
        repeated = {row.redraw_of for row in ahead if row.redraw_of >= 0}
        dropped, draw = self._ledger.redraw(repeated) or (-1, self._ledger.next_draw + len(ahead) - len(repeated))
        prompt = self._prompt(draw)
        if prompt is None:
            return None
        row = Row(group_id, draw, dropped, num_samples)
        return row, msgspec.structs.replace(prompt, group_id=group_id)

    def prompt_of(self, row: Row) -> Prompt:
        """The prompt of a group that was drawn. Raises LedgerError if the source does not have it any more."""
        prompt = self._prompt(row.draw)
        if prompt is None:
            raise LedgerError(
                f"group {row.group_id} was draw {row.draw}, which the data no longer has",
                remedy="was data.max_passes lowered for a run that goes on?",
            )
        return msgspec.structs.replace(prompt, group_id=row.group_id)

    def failed(self, row: Row, reason: str, detail: str) -> None:
        """A group was dropped: its prompt may be quarantined for that."""
        if self.quarantine is not None:
            self.quarantine.failed(self.prompt_of(row), row.draw, reason, detail)

    def take_news(self) -> list[str]:
        """Prompts that were quarantined since the last look, in words."""
        return [] if self.quarantine is None else self.quarantine.take_news()

    @property
    def has_next(self) -> bool:
        """Is there a prompt that nobody has got?"""
        return self._ledger.redraw() is not None or self._prompt(self._ledger.next_draw) is not None

    def _prompt(self, draw: int) -> Prompt | None:
        if self._end is not None and draw >= self._end:
            return None
        prompt = self.source.prompt(draw)
        if prompt is None:
            self._end = draw
        return prompt
