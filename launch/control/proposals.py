"""Suggestions that were shown to somebody and that nobody decided about yet; as long as the run's launcher lives.

In memory, because whoever may only look asks for suggestions too. Those of one look stay when another finds others: a
person approves what that person saw. Knows nothing of how suggestions come about.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from ...core.suggestion import suggest

if TYPE_CHECKING:
    from .suggestion_book import Suggestion

MAX_KEPT = 256


class Proposals:
    """The newest `MAX_KEPT`."""

    def __init__(self) -> None:
        self._shown: dict[str, Suggestion] = {}

    def show(self, suggestions: Iterable[Suggestion]) -> None:
        """They can be decided about from now on."""
        for suggestion in suggestions:
            self._shown.pop(suggestion.id, None)  # the newest are the last ones
            self._shown[suggestion.id] = suggestion
        for name in list(self._shown)[:-MAX_KEPT]:
            del self._shown[name]

    def find(self, name: str) -> Suggestion:
        """The one of that name. Raises ConfigError if it was not shown."""
        found = self._shown.get(name)
        if found is None:
            known = list(self._shown)
            hint = suggest(name, known) if known else "`myxa suggest` lists what could be turned now"
            raise ConfigError(f"there is no open suggestion {name[:32]!r}", remedy=hint)
        return found

    def close(self, name: str) -> None:
        """It was decided."""
        self._shown.pop(name, None)
