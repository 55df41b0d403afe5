"""The prompts of a run: draw number in, prompt out, a pure function of data and seed. The cursor is the ledger's.

Knows rows and orders. Must not know who draws, or what has been drawn.
"""

from __future__ import annotations

import hashlib

import msgspec

from ...core.config import DataSettings, RunConfig
from ...core.config.data import parse_sources
from ...core.errors import DataError
from ...core.samples import Prompt
from .held_out import DATA_SOURCE, NO_SETS, HeldOutSets, layout_of, open_held_out
from .order import Order
from .overlong import PromptLimit, limit_of
from .row_set import RowSet


class PromptDataset:
    """Training prompts in draw order, and the held-out ones. One source, which has a name where there are several."""

    def __init__(
        self, rows: RowSet, held_out: HeldOutSets, settings: DataSettings, seed: int, *, name: str = ""
    ) -> None:
        self._rows = rows
        self._held_out = held_out
        self._name = name
        self._max_passes = settings.max_passes
        self._order = Order(len(rows), seed, is_shuffled=settings.shuffle, name=name)
        order = f"seed {seed}" if settings.shuffle else "file order"
        self._fingerprint = hashlib.blake2b(f"{rows.digest} {order}".encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        """Rows in one pass."""
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """Equal exactly when every draw gives the same prompt (but for file names): a ledger belongs to one."""
        return self._fingerprint

    @property
    def num_bad(self) -> int:
        """Rows left out because they are bad."""
        return self._rows.num_bad + self._held_out.num_bad

    @property
    def bad_rows(self) -> tuple[str, ...]:
        """What is wrong with the first few of them."""
        return (*self._rows.bad_rows, *self._held_out.bad_rows)

    @property
    def num_overlong(self) -> int:
        """Training rows left out because their prompt is too long."""
        return self._rows.num_overlong

    @property
    def overlong_rows(self) -> tuple[str, ...]:
        """The first few of them."""
        return tuple(self._rows.overlong_rows)

    @property
    def num_draws(self) -> int | None:
        """Prompts in all passes; None: endless."""
        return self._max_passes * len(self) or None

    def check_batch(self, batch_size: int) -> None:
        """Raise DataError if all passes together are less than one batch."""
        if self._max_passes and self._max_passes * len(self) < batch_size:
            raise DataError(
                f"data.train: {len(self)} rows and data.max_passes = {self._max_passes} are fewer prompts than one "
                f"batch, algo.batch_size = {batch_size}",
                remedy="lower algo.batch_size, or raise data.max_passes (0 = endless)",
            )

    def prompt(self, draw: int) -> Prompt | None:
        """The prompt of a draw (from 0), or None when all passes are over. Raises DataError if the row has changed."""
        row = self.row_of(draw)
        if row is None:
            return None
        prompt = self._rows.prompt(row, group_id=draw, pass_index=draw // len(self._rows))
        return named(prompt, self._name) if self._name else prompt

    def row_of(self, draw: int) -> int | None:
        """Which good row a draw (from 0) brings, or None when all passes are over."""
        if draw < 0:
            raise ValueError(f"draws count from 0, not {draw}")
        pass_index, at = divmod(draw, len(self._rows))
        if self._max_passes and pass_index >= self._max_passes:
            return None
        return self._order.row(pass_index, at)

    def num_held_out(self, name: str = "") -> int:
        """Held-out rows of a set."""
        return self._held_out.num_rows(name)

    def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        """The first held-out prompts, see `HeldOutSets`."""
        return self._held_out.prompts(limit, name)


def named(prompt: Prompt, name: str) -> Prompt:
    """A prompt of one of several sources; its metadata tell which, unless the row says something in that place."""
    return msgspec.structs.replace(prompt, source_name=name, metadata={DATA_SOURCE: name, **prompt.metadata})


def open_prompts(config: RunConfig) -> PromptDataset:
    """Open and check all data of a run with one source. Raises ConfigError for files that are not there, DataError for
    bad rows."""
    limit = limit_of(config)
    return open_source(config, "", limit, open_held_out(config, limit))


def open_source(
    config: RunConfig, name: str, limit: PromptLimit | None, held_out: HeldOutSets = NO_SETS
) -> PromptDataset:
    """Open and check one source of a run, which has that name. `limit`: of prompts. Raises as `open_prompts`."""
    part = config.data.parts()[name]
    rows = RowSet(
        parse_sources(part.train),
        layout_of(config, part, config.reward, name),
        key=config.data.key_of(name),
        skips_bad=part.on_bad_line == "skip",
        limit=limit,
    )
    return PromptDataset(rows, held_out, part, config.run.seed, name=name)
