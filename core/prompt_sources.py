"""What the buffer draws prompts from: one source, or several that are mixed.

A source is a pure function from a draw's number to a prompt; which draws were taken is the ledger's to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from .samples import Prompt


class PromptSource(Protocol):
    """A dataset as the buffer sees it: a pure function from draw number to prompt. The cursor is the ledger's."""

    def __len__(self) -> int:
        """Rows in one pass."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal exactly when every draw gives the same prompt: a ledger belongs to one."""
        ...

    def prompt(self, draw: int) -> Prompt | None:
        """The prompt of a draw (from 0), `group_id == draw`; None from the first draw on that is beyond the data.
        Raises DataError if the row cannot be read."""
        ...

    def row_of(self, draw: int) -> int | None:
        """Which of the rows of one pass that draw brings, counted from 0, without reading it: draws with equal numbers
        bring equal prompts. None as `prompt` does."""
        ...

    def num_held_out(self, name: str = "") -> int:
        """Held-out rows of the set of that name (the only one is called ""); 0 without such a set."""
        ...

    def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        """The first `limit` held-out prompts of that set (the only one is called ""); empty without such a set."""
        ...


@runtime_checkable
class MixedSources(Protocol):
    """Several sources by name. Each counts its own draws, from 0."""

    @property
    def by_name(self) -> Mapping[str, PromptSource]:
        """In the order of names."""
        ...

    @property
    def weights(self) -> Mapping[str, float]:
        """What the run file says of their shares: none negative, not all 0."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal exactly when every draw from every source gives the same prompt, whatever the weights."""
        ...

    def num_held_out(self, name: str = "") -> int:
        """Held-out rows of the set of that name (the only one is called ""); 0 without such a set."""
        ...

    def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        """As a single source's."""
        ...
