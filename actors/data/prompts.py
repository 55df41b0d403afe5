"""The prompts of a run: draw number in, prompt out, a pure function of data and seed. The cursor is the ledger's.

`RowOrder`, the order of a pass, is a function of (seed, source, pass) alone, so nothing is saved. `PromptDataset` is
one source, `Dataset` all of them by name; the buffer chooses the source of each draw.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from ...core.config import RewardSettings, RunConfig
from ...core.config.data import DataSettings, Source, parse_sources
from ...core.errors import DataError, TemplateError, raised_as
from ...core.samples import Prompt
from ..workflows.turn_renderer import TurnRenderer
from .data_files import open_rows
from .layout import RowLayout, RowRewards
from .row_file import Row, RowError, RowFile


class PromptLimit:
    """The most tokens that a prompt may have, by `data.overlong`."""

    def __init__(self, config: RunConfig) -> None:
        """Raises ModelError."""
        # Only now: most runs measure nothing, and need no tokenizer to read their data.
        from ..models.hf_folder import read_config
        from ..models.tokenizer import load_tokenizer

        self._max_tokens, self._why = config.data.max_prompt_tokens, "data.max_prompt_tokens"
        if not self._max_tokens:
            self._max_tokens = (config.engine.context_length or read_config(config.model.path).context_length) - 1
            self._why = "the context less one"
        self._renderer = TurnRenderer(load_tokenizer(config.model.path, config.data))
        self.drops = config.data.overlong == "drop"
        """Rows above it are left out; else the first one ends the run."""

    def excess(self, prompt: Prompt) -> str:
        """What is too long about it; empty: nothing. Raises RowError for a prompt that cannot be written."""
        try:
            num_tokens = len(self._renderer.prompt(prompt))
        except (DataError, TemplateError) as error:
            raise RowError(error.message, error.remedy) from error
        if num_tokens <= self._max_tokens:
            return ""
        return f"the prompt has {num_tokens:,} tokens, the limit is {self._max_tokens:,} ({self._why})"


_log = logging.getLogger(__name__)

SHOWN_BAD_ROWS = 5
MAX_ROW_BYTES = 6 << 20
"""What a row may come to: as many as a rollout actor takes at a time go to it in one message."""
MAX_HELD_OUT_BYTES = 48 << 20
"""What the rows that are given out together for one evaluation may come to."""
SPOOL_BUFFER_BYTES = 1 << 20
_encode = msgspec.json.Encoder(order="deterministic").encode
_encode_as_written = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Prompt).decode


def encode_prompt(prompt: Prompt) -> bytes:
    """What a row means, wherever it is, as JSON. Raises RowError if it is larger than a row may be."""
    try:
        encoded = _encode((prompt.messages, prompt.label, prompt.metadata, prompt.tools))
    except (TypeError, ValueError, OverflowError) as error:
        raise RowError(f"the row has no JSON form: {error}", "store the value as text") from error
    if len(encoded) > MAX_ROW_BYTES:
        raise RowError(
            f"prompt, label and metadata come to {len(encoded):,} bytes, the limit is {MAX_ROW_BYTES:,}",
            "keep what is large in a file that the row names and your reward reads, or leave the row out",
        )
    return encoded


def source_rows(source: Source, file: RowFile) -> Iterator[Row]:
    """Raises DataError if there are none."""
    rows, num_rows = file.rows(), 0
    if source.start is not None or source.stop is not None:
        numbers = source.rows(file.num_rows)
        rows = itertools.islice(rows, numbers.start, numbers.stop)
    for num_rows, row in enumerate(rows, start=1):  # noqa: B007 -- how many there were
        yield row
    if not num_rows and (in_all := file.num_rows):
        size = f"{in_all} row{'s' if in_all > 1 else ''}"
        raise DataError(f"{source}: the slice is empty; the file has {size}", remedy="mend the slice")
    if not num_rows:
        raise DataError(f"{source.path}: the file holds no rows", remedy="name a file with rows")


class RowSet:
    """All good rows, in the order of files and rows."""

    def __init__(
        self,
        sources: Sequence[Source],
        layout: RowLayout,
        *,
        key: str,
        skips_bad: bool = False,
        limit: PromptLimit | None = None,
    ) -> None:
        """Look at every chosen row. `limit`: of prompts; a warning counts the rows that it drops. Raises DataError for
        the first bad row (unless they are skipped), the first over-long one (unless they are dropped) or if none is
        left, ConfigError for a file that is not there."""
        self._layout = layout
        self._limit = limit
        self._sizes = array("I")
        self._spots = array("q")  # in the spool
        self._spool = _Spool()
        self._hash = hashlib.blake2b(digest_size=16)
        self.num_bad = 0
        self.bad_rows: list[str] = []
        """What is wrong with the first few."""
        self.num_overlong = 0
        self.overlong_rows: list[str] = []
        """The first few."""
        for source in sources:
            self._add(str(source), source_rows(source, open_rows(source.path, layout, key)), skips_bad=skips_bad)
        if not self._spots and self.num_overlong:
            raise DataError(
                f"{key}: no row is left, {self.num_overlong} are over-long; the first: {self.overlong_rows[0]}",
                remedy="raise data.max_prompt_tokens or engine.context_length, or shorten the rows",
            )
        if not self._spots:
            raise DataError(
                f"{key}: none of the {self.num_bad} rows is good; the first: {self.bad_rows[0]}",
                remedy="mend them, or see whether data.preset is right",
            )
        if self.num_overlong:
            _log.warning(
                "%s: %d of %d rows are left out because their prompts are too long; the first: %s",
                key, self.num_overlong, self.num_overlong + len(self), "; ".join(self.overlong_rows),
            )  # fmt: skip

    def _add(self, source: str, rows: Iterator[Row], *, skips_bad: bool) -> None:
        limit = self._limit
        for number, (place, read) in enumerate(rows):
            try:
                prompt = self._layout.prompt(read())
                meaning = encode_prompt(prompt)
                excess = "" if limit is None else limit.excess(prompt)
            except RowError as bad:
                if not skips_bad:
                    raise DataError(f"{place}: {bad.cause}", remedy=bad.remedy) from bad
                self.num_bad += 1
                self.bad_rows = [*self.bad_rows, f"{place}: {bad.cause}"][:SHOWN_BAD_ROWS]
                continue
            if limit is not None and excess:
                if not limit.drops:
                    remedy = 'leave such rows out with data.overlong = "drop", or raise the limit'
                    raise DataError(f"{place}: {excess}", remedy=remedy)
                self.num_overlong += 1
                self.overlong_rows = [*self.overlong_rows, f"{place}: {excess}"][:SHOWN_BAD_ROWS]
                continue
            encoded = _encode_as_written(msgspec.structs.replace(prompt, row=number, source=source))
            self._sizes.append(len(encoded))
            self._spots.append(self._spool.add(encoded))
            self._hash.update(len(meaning).to_bytes(8, "little") + meaning)

    def __len__(self) -> int:
        return len(self._spots)

    @property
    def digest(self) -> str:
        """Hash of what all good rows mean, in order."""
        return self._hash.hexdigest()

    def num_bytes(self, num_rows: int) -> int:
        """What the first so many good rows come to, as JSON."""
        return sum(self._sizes[:num_rows])

    def prompt(self, index: int, *, group_id: int, pass_index: int) -> Prompt:
        """The good row number `index` as a prompt. Raises DataError if it cannot be kept."""
        prompt = _decode(self._spool.read(self._spots[index], self._sizes[index]))
        return msgspec.structs.replace(prompt, group_id=group_id, pass_index=pass_index)


class _Spool:
    """Rows in a temporary file, in the order in which they were added."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="myxa-rows-", buffering=SPOOL_BUFFER_BYTES)  # noqa: SIM115 -- closed with the rows
        weakref.finalize(self, self._file.close)
        self._end = 0
        place, remedy = tempfile.gettempdir(), "make room there, or name another folder in the variable TMPDIR"
        self._naming = raised_as(DataError, f"the rows of the data cannot be kept in {place}", OSError, remedy=remedy)

    def add(self, data: bytes) -> int:
        """Returns its place. Raises DataError if there is no room."""
        spot = self._end
        with self._naming:
            self._file.write(data)
        self._end += len(data)
        return spot

    def read(self, spot: int, size: int) -> bytes:
        with self._naming:
            self._file.flush()
        return os.pread(self._file.fileno(), size, spot)


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
        self._permutation = lru_cache(KEPT_PASSES)(self._permute)

    def row(self, pass_index: int, index: int) -> int:
        return int(self._permutation(pass_index)[index]) if self._is_shuffled else index

    def _permute(self, pass_index: int) -> npt.NDArray[np.int64]:
        # RandomState, not Generator: numpy promises that its streams never change between versions.
        seeds = [self._seed & 0xFFFFFFFF, (self._seed >> 32) & 0xFFFFFFFF, pass_index & 0xFFFFFFFF, *self._salt]
        return cast("npt.NDArray[np.int64]", np.random.RandomState(seeds).permutation(self._num_rows))


DATA_SOURCE = "data_source"
"""Key of the metadata that names a prompt's source, as verl's rows do themselves."""


def held_out_layout(config: RunConfig, name: str) -> RowLayout:
    """How the rows of a set are read."""
    eval_set = config.eval.sets.get(name)
    part = config.data if eval_set is None else config.data.read_like(eval_set)
    if eval_set is None or not eval_set.reward:
        return layout_of(config, part, config.reward)
    return layout_of(config, part, config.reward.alone(eval_set.reward))


def layout_of(config: RunConfig, part: DataSettings, reward: RewardSettings, source: str = "") -> RowLayout:
    """How rows of `part` are read, judged by `reward`. `source`: their name, if it may choose who judges."""
    if config.algo.is_given:
        return RowLayout(part, needs_demonstration=not config.algo.learns_pairs)
    return RowLayout(part, RowRewards(reward, {DATA_SOURCE: source} if source else {}))


def _held_out(
    config: RunConfig, name: str, key: str, files: str | tuple[str, ...], limit: PromptLimit | None
) -> RowSet:
    """The rows of a set. Raises ConfigError for files, DataError for bad or too many rows."""
    skips_bad = config.data.on_bad_line == "skip"
    rows = RowSet(parse_sources(files), held_out_layout(config, name), key=key, skips_bad=skips_bad, limit=limit)
    eval_set = config.eval.sets.get(name)
    num_rows = min((eval_set.num_prompts if eval_set is not None else 0) or config.eval.num_prompts, len(rows))
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
        if not self._name:
            return prompt
        metadata = {DATA_SOURCE: self._name, **prompt.metadata}  # unless the row says something in that place
        return msgspec.structs.replace(prompt, source_name=self._name, metadata=metadata)

    def row_of(self, draw: int) -> int | None:
        """Which good row a draw (from 0) brings, or None when all passes are over."""
        if draw < 0:
            raise ValueError(f"draws count from 0, not {draw}")
        pass_index, index = divmod(draw, len(self.rows))
        if self._max_passes and pass_index >= self._max_passes:
            return None
        return self._order.row(pass_index, index)


class Dataset:
    """Training prompts of all sources, each in its own draw order, and the held-out ones."""

    def __init__(
        self, by_name: Mapping[str, PromptDataset], weights: Mapping[str, float], held_out: Mapping[str, RowSet]
    ) -> None:
        """`by_name`: the only one is "", and so is the only held-out set. `weights`: of several sources."""
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
        """The first of a set, none of one that is not there. Their group ids are -1, -2, ..., never those of draws."""
        rows = self._held_out.get(name)
        if rows is None:
            return ()
        return tuple(rows.prompt(row, group_id=-1 - row, pass_index=0) for row in range(min(limit, len(rows))))

    def check_batch(self, batch_size: int) -> None:
        """Raise DataError if all passes of all sources that have a weight are less than one batch."""
        counts = [source.num_draws for name, source in self.by_name.items() if self.weights.get(name, 1.0)]
        bounds = [count for count in counts if count is not None]
        if len(bounds) == len(counts) and sum(bounds) < batch_size:
            raise DataError(
                f"data: all passes over the rows are {sum(bounds)} prompts, fewer than one batch, "
                f"algo.batch_size = {batch_size}",
                remedy="lower algo.batch_size, or raise data.max_passes (0 = endless)",
            )


def open_data(config: RunConfig) -> Dataset:
    """All data of a run; skipped rows are logged. Raises ConfigError for files, DataError for bad rows."""
    limit = None if config.data.overlong == "pass" else PromptLimit(config)
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
    held_out = {name: _held_out(config, name, key, paths, limit) for name, (key, paths) in config.eval.files().items()}
    dataset = Dataset(by_name, weights, held_out)
    if dataset.num_bad:
        first = "; ".join(dataset.bad_rows[:SHOWN_BAD_ROWS])
        _log.warning("%d bad rows are left out; the first: %s", dataset.num_bad, first)
    return dataset
