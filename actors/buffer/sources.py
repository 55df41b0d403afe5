"""The sources of a run under one face: one without a name, or several by name.

Knows prompt sources and what a row says of its draw. Must not know which source is drawn from next.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...core.errors import LedgerError
from ...core.prompt_sources import MixedSources, PromptSource
from ...core.samples import Prompt
from ..ledger.states import Row


class Sources:
    """Prompts by the rows of the ledger. Raises what the sources raise (DataError)."""

    def __init__(self, source: PromptSource | MixedSources) -> None:
        is_mixed = isinstance(source, MixedSources)
        self._by_name: Mapping[str, PromptSource] = source.by_name if is_mixed else {"": source}
        self.weights: Mapping[str, float] = source.weights if is_mixed and len(source.by_name) > 1 else {}
        """The run file's; empty: there is nothing to choose."""

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of names; "" alone: there is one source, without a name."""
        return tuple(self._by_name)

    def num_rows(self, name: str) -> int:
        """In one pass."""
        return len(self._by_name[name])

    def has(self, name: str, draw: int) -> bool:
        """Whether a source has that draw."""
        return name in self._by_name and self._by_name[name].row_of(draw) is not None

    def place(self, name: str, draw: int) -> tuple[int, int]:
        """(pass, row of the pass) of a draw from a source. Raises LedgerError if the source does not have it."""
        source = self._by_name.get(name)
        row = None if source is None else source.row_of(draw)
        if source is None or row is None:
            raise LedgerError(
                f"draw {draw} of {f'source {name}' if name else 'the data'} was made, but the data no longer has it",
                remedy="was max_passes lowered for a run that goes on?",
            )
        return draw // len(source), row

    def prompt(self, row: Row) -> Prompt:
        """What a group that was drawn answers. Raises LedgerError if its source does not have it any more."""
        source = self._by_name.get(row.source)
        prompt = None if source is None else source.prompt(row.draw_of_source)
        if prompt is None:
            raise LedgerError(
                f"group {row.group_id} was draw {row.draw_of_source}{f' of {row.source}' if row.source else ''}, "
                "which the data no longer has",
                remedy="was data.max_passes lowered for a run that goes on?",
            )
        return msgspec.structs.replace(prompt, group_id=row.group_id, draw=row.draw)

    def first_prompts(self, limit: int) -> list[Prompt]:
        """So many first prompts, of all sources in turn; fewer if there are no more."""
        found: list[Prompt] = []
        for draw in range(limit):
            for source in self._by_name.values():
                prompt = source.prompt(draw) if len(found) < limit else None
                if prompt is not None:
                    found.append(prompt)
        return found
