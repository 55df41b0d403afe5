"""The prompts of a run: draw number in, prompt out, a pure function of data and seed. The cursor is the ledger's.

Knows rows and orders. Must not know who draws, or what has been drawn.
"""

from __future__ import annotations

import hashlib

import msgspec

from ...core.config import DataSettings, RunConfig
from ...core.config.source import parse_sources
from ...core.errors import DataError
from ...core.samples import Prompt
from .layout import Layout
from .order import Order
from .row_rewards import RowRewards
from .row_set import MAX_HELD_OUT_BYTES, RowSet

DATA_SOURCE = "data_source"
"""Key of the metadata that names a prompt's source, as verl's rows do themselves."""


class PromptDataset:
    """Training prompts in draw order, and the held-out ones. One source, which has a name where there are several."""

    def __init__(
        self, rows: RowSet, held_out: RowSet | None, settings: DataSettings, seed: int, *, name: str = ""
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
        return self._rows.num_bad + (self._held_out.num_bad if self._held_out is not None else 0)

    @property
    def bad_rows(self) -> tuple[str, ...]:
        """What is wrong with the first few of them."""
        return (*self._rows.bad_rows, *(self._held_out.bad_rows if self._held_out is not None else ()))

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

    def eval_prompts(self, limit: int) -> tuple[Prompt, ...]:
        """The first held-out prompts. Their group ids are -1, -2, ..., so that they are never taken for draws."""
        return held_out_prompts(self._held_out, limit)


def held_out_prompts(rows: RowSet | None, limit: int) -> tuple[Prompt, ...]:
    """The first of these rows, with group ids -1, -2, ..."""
    if rows is None:
        return ()
    return tuple(rows.prompt(row, group_id=-1 - row, pass_index=0) for row in range(min(limit, len(rows))))


def named(prompt: Prompt, name: str) -> Prompt:
    """A prompt of one of several sources; its metadata tell which, unless the row says something in that place."""
    return msgspec.structs.replace(prompt, source_name=name, metadata={DATA_SOURCE: name, **prompt.metadata})


def open_prompts(config: RunConfig) -> PromptDataset:
    """Open and check all data of a run with one source. Raises ConfigError for files that are not there, DataError for
    bad rows."""
    return open_source(config, "", open_held_out(config))


def open_source(config: RunConfig, name: str, held_out: RowSet | None = None) -> PromptDataset:
    """Open and check one source of a run, which has that name. Raises as `open_prompts`."""
    part = config.data.parts()[name]
    rows = RowSet(
        parse_sources(part.train),
        layout_of(config, part, name),
        key=config.data.key_of(name),
        skips_bad=part.on_bad_line == "skip",
    )
    return PromptDataset(rows, held_out, part, config.run.seed, name=name)


def open_held_out(config: RunConfig) -> RowSet | None:
    """The held-out rows, if there are any. Raises as `open_prompts`."""
    if not config.eval.data:
        return None
    layout, skips_bad = layout_of(config, config.data), config.data.on_bad_line == "skip"
    rows = RowSet(parse_sources(config.eval.data), layout, key="eval.data", skips_bad=skips_bad)
    num_rows = min(config.eval.num_prompts, len(rows))
    if (num_bytes := rows.num_bytes(num_rows)) > MAX_HELD_OUT_BYTES:
        raise DataError(
            f"eval.data: {num_rows} rows, which are evaluated together, come to {num_bytes:,} bytes, the limit is "
            f"{MAX_HELD_OUT_BYTES:,}",
            remedy="lower eval.num_prompts, or keep what is large in a file that the row names and your reward reads",
        )
    return rows


def layout_of(config: RunConfig, part: DataSettings, name: str = "") -> Layout:
    """How rows are read that are laid out as `part` says. `name`: of their source, if there are several."""
    if config.algo.kind == "sft":
        return Layout(part, needs_demonstration=True)
    rewards = RowRewards(config.reward, {DATA_SOURCE: name} if name else {})
    return Layout(part, needs_label=rewards.all_need_label, rewards=rewards)
