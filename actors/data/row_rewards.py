"""What the rewards of a run ask of its rows: a label, and the name of a function that there is.

Knows the names of rewards; must not know columns or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.config import RewardSettings
from ...core.suggestion import suggest
from .row_file import RowError

LABEL_REWARDS = frozenset({"exact", "numeric", "math", "f1", "choice"})
"""Built-in rewards that compare with the label."""


class RowRewards:
    """Of one source of prompts."""

    def __init__(self, reward: RewardSettings, defaults: Mapping[str, str]) -> None:
        """`defaults`: metadata of prompts whose rows do not say it."""
        self._key = reward.choose_by
        self._default = defaults.get(self._key) or reward.choose_else
        self._needs_label = {name: part.fn in LABEL_REWARDS for name, part in reward.parts().items()}

    @property
    def all_need_label(self) -> bool:
        """Whether no row can do without one."""
        needs = self._needs_label.values()
        return all(needs) if self._key else any(needs)

    def check(self, metadata: Mapping[str, Any], *, has_label: bool) -> None:
        """Whether the function that the row chooses can judge it. Raises RowError."""
        if not self._key:
            return
        name = metadata.get(self._key, self._default)
        if not isinstance(name, str) or name not in self._needs_label:
            said = f"says {self._key} = {name!r}" if self._key in metadata else f"has no {self._key}"
            near = suggest(name, tuple(self._needs_label)) if isinstance(name, str) and name else "name one"
            raise RowError(
                f"the row's metadata {said}, which is to name one of reward.functions",
                f"{near}; for rows that name none, set reward.choose_else",
            )
        if self._needs_label[name] and not has_label:
            raise RowError(
                f"the row has no label, with which reward.functions.{name} compares",
                "fill it, or choose another function",
            )
