"""Held-out prompts, one set or several by name. Knows rows; must not know who is asked to answer them."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.config import RunConfig
from ...core.config.source import parse_sources
from ...core.samples import Prompt
from .layout import Layout
from .row_set import RowSet

LABEL_REWARDS = frozenset({"exact", "numeric", "math"})
"""Built-in rewards that compare with the label."""


class HeldOutSets:
    """By name; the only one is called ""."""

    def __init__(self, by_name: Mapping[str, RowSet]) -> None:
        self._by_name = dict(by_name)

    @property
    def num_bad(self) -> int:
        """Rows left out because they are bad."""
        return sum(rows.num_bad for rows in self._by_name.values())

    @property
    def bad_rows(self) -> tuple[str, ...]:
        """What is wrong with the first few of each set."""
        return tuple(text for rows in self._by_name.values() for text in rows.bad_rows)

    def prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        """The first of a set; none of one that there is not. Their group ids are -1, -2, ..., in every set, so that
        they are never taken for draws."""
        rows = self._by_name.get(name)
        if rows is None:
            return ()
        return tuple(rows.prompt(row, group_id=-1 - row, pass_index=0) for row in range(min(limit, len(rows))))


NO_SETS = HeldOutSets({})


def open_held_out(config: RunConfig) -> HeldOutSets:
    """Open and check all sets of a run. Raises ConfigError for files that are not there, DataError for bad rows."""
    skips_bad = config.data.on_bad_line == "skip"
    return HeldOutSets(
        {
            name: RowSet(parse_sources(files), held_out_layout(config, name), key=key, skips_bad=skips_bad)
            for name, (key, files) in config.eval.files().items()
        }
    )


def held_out_layout(config: RunConfig, name: str) -> Layout:
    """How the rows of a set are read."""
    own = config.eval.sets.get(name)
    is_sft = config.algo.kind == "sft"
    reward = own.reward if own is not None and own.reward else config.reward.fn
    return Layout(
        config.data if own is None else config.data.read_like(own),
        needs_label=reward in LABEL_REWARDS and not is_sft,
        needs_demonstration=is_sft,
    )
