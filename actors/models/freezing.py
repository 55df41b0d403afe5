"""Which parameters of a model are not trained, by regular expressions on their HuggingFace names.

Knows names. Must not know tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ...core.errors import ConfigError

SHOWN = 3


def frozen_names(patterns: Sequence[str], names: Iterable[str]) -> frozenset[str]:
    """The names in which any pattern is found. Raises ConfigError for a pattern that is found in none, and if nothing
    is left to train."""
    every = tuple(names)
    found: set[str] = set()
    for pattern in patterns:
        mine = {name for name in every if re.search(pattern, name)}
        if not mine:
            raise ConfigError(
                f'trainer.freeze: "{pattern}" is found in no parameter of the model',
                remedy=f"names look like {', '.join(every[:SHOWN])}",
            )
        found |= mine
    if patterns and len(found) == len(every):
        raise ConfigError("trainer.freeze: nothing is left to train", remedy="leave a part of the model out")
    return frozenset(found)
