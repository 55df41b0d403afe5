"""The prompts of a run: draw number in, prompt out, a pure function of data and seed. The cursor is the ledger's.

`RowOrder` is the order in which a pass goes through the rows: a function of (seed, source, pass) alone, so nothing is
saved. `PromptDataset` is one source, `Dataset` all of them by name (the buffer chooses the source of each draw).
`open_data` opens what a run file names.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from ...core.config import RewardSettings, RunConfig
from ...core.config.data import DataSettings, parse_sources
from ...core.errors import DataError
from ...core.samples import Prompt
from .layout import RowLayout, RowRewards
from .row_set import MAX_HELD_OUT_BYTES, SHOWN_BAD_ROWS, PromptLimit, RowSet, limit_of

KEPT_PASSES = 2
"""Draws near the end of a pass mix with draws of the next."""


class RowOrder:
    """Permutations of `num_rows` rows, one per pass."""

    def __init__(self, num_rows: int, seed: int, *, is_shuffled: bool, name: str = "") -> None:
        """`name`: of the source, so that several of one size do not all go the same way."""
        self._num_rows = num_rows
        self._seed = seed
        self._salt = [zlib.crc32(name.encode())] if name else []
        self._is_shuffled = is_shuffled
        self._kept: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()

    def row(self, pass_index: int, at: int) -> int:
        """The row at position `at` of that pass."""
        return int(self._permutation(pass_index)[at]) if self._is_shuffled else at

    def _permutation(self, pass_index: int) -> npt.NDArray[np.int64]:
        kept = self._kept.get(pass_index)
        if kept is None:
            # RandomState, not Generator: numpy promises that its streams never change between versions.
            words = [self._seed & 0xFFFFFFFF, (self._seed >> 32) & 0xFFFFFFFF, pass_index & 0xFFFFFFFF, *self._salt]
            kept = cast("npt.NDArray[np.int64]", np.random.RandomState(words).permutation(self._num_rows))
            self._kept[pass_index] = kept
            while len(self._kept) > KEPT_PASSES:
                self._kept.popitem(last=False)
        return kept


_log = logging.getLogger(__name__)

DATA_SOURCE = "data_source"
"""Key of the metadata that names a prompt's source, as verl's rows do themselves."""


def open_held_out(config: RunConfig, limit: PromptLimit | None) -> dict[str, RowSet]:
    """Open and check all sets of a run. `limit`: of prompts. Raises ConfigError for files that are not there, DataError
    for bad rows, and for more of them than a message holds."""
    return {name: _open(config, name, key, paths, limit) for name, (key, paths) in config.eval.files().items()}


def held_out_layout(config: RunConfig, name: str) -> RowLayout:
    """How the rows of a set are read."""
    own = config.eval.sets.get(name)
    part = config.data if own is None else config.data.read_like(own)
    if own is None or not own.reward:
        return layout_of(config, part, config.reward)
    return layout_of(config, part, config.reward.alone(own.reward))


def layout_of(config: RunConfig, part: DataSettings, reward: RewardSettings, source: str = "") -> RowLayout:
    """How rows are read that are laid out as `part` says and judged by `reward`. `source`: their name, if they have one
    and it may choose who judges."""
    if config.algo.kind == "sft":
        return RowLayout(part, needs_demonstration=True)
    rewards = RowRewards(reward, {DATA_SOURCE: source} if source else {})
    return RowLayout(part, needs_label=rewards.all_need_label, rewards=rewards)


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


class PromptDataset:
    """Training prompts of one source in draw order."""

    def __init__(self, rows: RowSet, settings: DataSettings, seed: int, *, name: str = "") -> None:
        """`name`: where there are several sources."""
        self.rows = rows
        self._name = name
        self._max_passes = settings.max_passes
        self._order = RowOrder(len(rows), seed, is_shuffled=settings.shuffle, name=name)
        order = f"seed {seed}" if settings.shuffle else "file order"
        self.fingerprint = hashlib.blake2b(f"{rows.digest} {order}".encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        """Rows in one pass."""
        return len(self.rows)

    @property
    def num_draws(self) -> int | None:
        """Prompts in all passes; None: endless."""
        return self._max_passes * len(self) or None

    def prompt(self, draw: int) -> Prompt | None:
        """The prompt of a draw (from 0), or None when all passes are over."""
        row = self.row_of(draw)
        if row is None:
            return None
        prompt = self.rows.prompt(row, group_id=draw, pass_index=draw // len(self.rows))
        return named(prompt, self._name) if self._name else prompt

    def row_of(self, draw: int) -> int | None:
        """Which good row a draw (from 0) brings, or None when all passes are over."""
        if draw < 0:
            raise ValueError(f"draws count from 0, not {draw}")
        pass_index, at = divmod(draw, len(self.rows))
        if self._max_passes and pass_index >= self._max_passes:
            return None
        return self._order.row(pass_index, at)


def named(prompt: Prompt, name: str) -> Prompt:
    """A prompt of one of several sources; its metadata name it, unless the row says something in that place."""
    return msgspec.structs.replace(prompt, source_name=name, metadata={DATA_SOURCE: name, **prompt.metadata})


class Dataset:
    """Training prompts of all sources, each in its own draw order, and the held-out ones."""

    def __init__(
        self, by_name: Mapping[str, PromptDataset], weights: Mapping[str, float], held_out: Mapping[str, RowSet]
    ) -> None:
        """`by_name`: the only one is called "", and so is the only held-out set. `weights`: of each of several sources,
        as the run file says."""
        self.by_name = dict(sorted(by_name.items()))
        self.weights = dict(weights)
        self._held_out = held_out
        self._parts = (*(source.rows for source in self.by_name.values()), *held_out.values())
        text = " ".join(f"{name}={source.fingerprint}" for name, source in self.by_name.items())
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        """Equal exactly when every draw gives the same prompt (but for file names): a ledger belongs to one."""

    @property
    def num_bad(self) -> int:
        """Rows left out because they are bad, held-out ones too."""
        return sum(rows.num_bad for rows in self._parts)

    @property
    def bad_rows(self) -> tuple[str, ...]:
        """What is wrong with the first few of each source and set."""
        return tuple(text for rows in self._parts for text in rows.bad_rows)

    def num_held_out(self, name: str = "") -> int:
        """Good rows of a set; 0 of one that there is not."""
        return len(self._held_out.get(name, ()))

    def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        """The first of a set; none of one that there is not. Their group ids are -1, -2, ..., in every set, so that
        they are never taken for draws."""
        rows = self._held_out.get(name)
        if rows is None:
            return ()
        return tuple(rows.prompt(row, group_id=-1 - row, pass_index=0) for row in range(min(limit, len(rows))))

    def check_batch(self, batch_size: int) -> None:
        """Raise DataError if all passes of all sources that have a weight are less than one batch."""
        counts = [source.num_draws for name, source in self.by_name.items() if self.weights.get(name, 1.0)]
        known = [count for count in counts if count is not None]
        if len(known) == len(counts) and sum(known) < batch_size:
            raise DataError(
                f"data: all passes over the rows are {sum(known)} prompts, fewer than one batch, "
                f"algo.batch_size = {batch_size}",
                remedy="lower algo.batch_size, or raise data.max_passes (0 = endless)",
            )


def open_data(config: RunConfig) -> Dataset:
    """Open and check all data of a run; bad rows that are skipped are logged. Raises ConfigError for files
    that are not there, DataError for bad rows."""
    limit = limit_of(config)
    by_name: dict[str, PromptDataset] = {}
    for name, part in config.data.parts().items():
        rows = RowSet(
            parse_sources(part.train),
            layout_of(config, part, config.reward, name),
            key=config.data.key_of(name),
            skips_bad=part.on_bad_line == "skip",
            limit=limit,
        )
        by_name[name] = PromptDataset(rows, part, config.run.seed, name=name)
    weights = {name: source.weight for name, source in config.data.sources.items()}
    found = Dataset(by_name, weights, open_held_out(config, limit))
    if found.num_bad:
        first = "; ".join(found.bad_rows[:SHOWN_BAD_ROWS])
        _log.warning("%d bad rows are left out; the first: %s", found.num_bad, first)
    return found
