"""Which prompt comes next: first those whose tokens grew too old, then the source in order of draws.

The cursor itself is derived from the ledger; this only asks the source. Knows no admission and no actor.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..core.errors import LedgerError
from ..core.protocols import PromptSource
from ..core.samples import Prompt
from .ledger import Ledger
from .ledger_states import Row


class PromptCursor:
    """Prompts as the groups they become. Raises what the source raises (DataError)."""

    def __init__(self, source: PromptSource, ledger: Ledger, num_samples: int) -> None:
        self.source = source
        self._ledger = ledger
        self._num_samples = num_samples
        self._end: int | None = None
        """First draw that the source does not have, once known."""

    def next(self, ahead: Sequence[Row]) -> tuple[Row, Prompt] | None:
        """The group that comes after those `ahead`, which are not in the ledger yet; None when there is none."""
        group_id = self._ledger.next_group_id + len(ahead)
        repeated = {row.redraw_of for row in ahead if row.redraw_of >= 0}
        dropped, draw = self._ledger.redraw(repeated) or (-1, self._ledger.next_draw + len(ahead) - len(repeated))
        prompt = self._prompt(draw)
        if prompt is None:
            return None
        row = Row(group_id, draw, dropped, self._num_samples)
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
