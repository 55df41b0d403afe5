"""Held-out prompts, one set or several by name. Knows rows; must not know who is asked to answer them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ...core.config import DataSettings, RewardSettings, RunConfig
from ...core.config.data import parse_sources
from ...core.errors import DataError
from ...core.samples import Prompt
from .layout import Layout
from .overlong import PromptLimit
from .recorded_terms import terms_of
from .row_rewards import RowRewards
from .row_set import MAX_HELD_OUT_BYTES, RowSet

_log = logging.getLogger(__name__)

DATA_SOURCE = "data_source"
"""Key of the metadata that names a prompt's source, as verl's rows do themselves."""


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

    def num_rows(self, name: str = "") -> int:
        """Good rows of a set; 0 of one that there is not."""
        return len(self._by_name.get(name, ()))

    def prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        """The first of a set; none of one that there is not. Their group ids are -1, -2, ..., in every set, so that
        they are never taken for draws."""
        rows = self._by_name.get(name)
        if rows is None:
            return ()
        return tuple(rows.prompt(row, group_id=-1 - row, pass_index=0) for row in range(min(limit, len(rows))))


NO_SETS = HeldOutSets({})


def open_held_out(config: RunConfig, limit: PromptLimit | None) -> HeldOutSets:
    """Open and check all sets of a run. `limit`: of prompts. Raises ConfigError for files that are not there, DataError
    for bad rows, and for more of them than a message holds."""
    files = config.eval.files()
    return HeldOutSets({name: _open(config, name, key, paths, limit) for name, (key, paths) in files.items()})


def held_out_layout(config: RunConfig, name: str) -> Layout:
    """How the rows of a set are read."""
    own = config.eval.sets.get(name)
    part = config.data if own is None else config.data.read_like(own)
    if own is None or not own.reward:
        return layout_of(config, part, config.reward)
    return layout_of(config, part, config.reward.alone(own.reward))


def layout_of(config: RunConfig, part: DataSettings, reward: RewardSettings, source: str = "") -> Layout:
    """How rows are read that are laid out as `part` says and judged by `reward`. `source`: their name, if they have one
    and it may choose who judges."""
    if config.algo.kind == "sft":
        return Layout(part, needs_demonstration=True)
    rewards = RowRewards(reward, {DATA_SOURCE: source} if source else {})
    return Layout(part, needs_label=rewards.all_need_label, rewards=rewards, recorded=terms_of(config))


def _open(config: RunConfig, name: str, key: str, files: str | tuple[str, ...], limit: PromptLimit | None) -> RowSet:
    skips_bad = config.data.on_bad_line == "skip"
    rows = RowSet(parse_sources(files), held_out_layout(config, name), key=key, skips_bad=skips_bad, limit=limit)
    own = config.eval.sets.get(name)
    num_rows = min((own.num_prompts if own is not None else 0) or config.eval.num_prompts, len(rows))
    place = f"eval.sets.{name}" if name else "eval"
    if num_rows < len(rows):
        _log.warning(
            "%s: the first %d of %d rows are evaluated, %d are left out -- set %s.num_prompts = %d for all",
            key, num_rows, len(rows), len(rows) - num_rows, place, len(rows),
        )  # fmt: skip
    if (num_bytes := rows.num_bytes(num_rows)) > MAX_HELD_OUT_BYTES:
        raise DataError(
            f"{key}: {num_rows} rows, which are evaluated together, come to {num_bytes:,} bytes, the limit is "
            f"{MAX_HELD_OUT_BYTES:,}",
            remedy=f"lower {place}.num_prompts, or keep what is large in a file that the row names and your reward "
            "reads",
        )
    return rows
