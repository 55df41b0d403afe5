"""The chosen rows of one or several files: every row is read and checked once, at the start.

What good ones mean is kept in a temporary file without a name: a run does not depend on what becomes of its data.
`PromptLimit` finds prompts that are too long, by the number of tokens that a row's prompt has in the run's template.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from ...core.config import RunConfig
from ...core.config.data import Source
from ...core.errors import DataError, TemplateError
from ...core.protocols import Tokenizer
from ...core.samples import Prompt
from ..workflows.turn_renderer import TurnRenderer
from .data_files import open_rows
from .layout import RowLayout
from .row_file import Row, RowError, RowFile


class PromptLimit:
    """The most tokens that a prompt may have."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, why: str, *, drops: bool) -> None:
        """`why`: where the number is from. `drops`: rows above it are left out; else the first one ends the run."""
        self._renderer = TurnRenderer(tokenizer)
        self._max_tokens = max_tokens
        self._why = why
        self.drops = drops

    def excess(self, prompt: Prompt) -> str:
        """What is too long about it; empty: nothing. Raises RowError for a prompt that cannot be written."""
        try:
            num_tokens = len(self._renderer.prompt(prompt))
        except (DataError, TemplateError) as error:
            raise RowError(error.message, error.remedy) from error
        if num_tokens <= self._max_tokens:
            return ""
        return f"the prompt has {num_tokens:,} tokens, the limit is {self._max_tokens:,} ({self._why})"


def limit_of(config: RunConfig) -> PromptLimit | None:
    """By the run's model and `data.overlong`; None: rows are not measured. Raises ModelError."""
    data = config.data
    if data.overlong == "pass":
        return None
    # Only now: most runs measure nothing, and need no tokenizer to read their data.
    from ..models.hf_folder import read_config
    from ..models.tokenizer import load_tokenizer

    max_tokens, why = data.max_prompt_tokens, "data.max_prompt_tokens"
    if not max_tokens:
        max_tokens = (config.engine.context_length or read_config(config.model.path).context_length) - 1
        why = "the context less one"
    tokenizer = load_tokenizer(config.model.path, data)
    return PromptLimit(tokenizer, max_tokens, why, drops=data.overlong == "drop")


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


def chosen_rows(source: Source, file: RowFile) -> Iterator[Row]:
    """Raises DataError if there are none."""
    rows, num_rows = file.rows(), 0
    if source.start is not None or source.stop is not None:
        chosen = source.rows(file.num_rows)
        rows = itertools.islice(rows, chosen.start, chosen.stop)
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
            self._add(str(source), chosen_rows(source, open_rows(source.path, layout, key)), skips_bad=skips_bad)
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
        for number, (place, read) in enumerate(rows):
            try:
                prompt = self._layout.prompt(read())
                meaning = encode_prompt(prompt)
                excess = "" if self._limit is None else self._limit.excess(prompt)
            except RowError as bad:
                if not skips_bad:
                    raise DataError(f"{place}: {bad.cause}", remedy=bad.remedy) from bad
                self._note_bad(f"{place}: {bad.cause}")
                continue
            if excess:
                self._leave_out(f"{place}: {excess}")
                continue
            kept = _encode_as_written(msgspec.structs.replace(prompt, row=number, source=source))
            self._sizes.append(len(kept))
            self._spots.append(self._spool.add(kept))
            self._hash.update(len(meaning).to_bytes(8, "little") + meaning)

    def _note_bad(self, text: str) -> None:
        self.num_bad += 1
        if len(self.bad_rows) < SHOWN_BAD_ROWS:
            self.bad_rows.append(text)

    def _leave_out(self, text: str) -> None:
        """Raises DataError where over-long rows are not dropped."""
        if self._limit is not None and not self._limit.drops:
            raise DataError(text, remedy='leave such rows out with data.overlong = "drop", or raise the limit')
        self.num_overlong += 1
        if len(self.overlong_rows) < SHOWN_BAD_ROWS:
            self.overlong_rows.append(text)

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

    def add(self, data: bytes) -> int:
        """Returns its place. Raises DataError if there is no room."""
        spot = self._end
        try:
            self._file.write(data)
        except OSError as error:
            raise _no_room(error) from error
        self._end += len(data)
        return spot

    def read(self, spot: int, size: int) -> bytes:
        try:
            self._file.flush()
        except OSError as error:
            raise _no_room(error) from error
        return os.pread(self._file.fileno(), size, spot)


def _no_room(error: OSError) -> DataError:
    return DataError(
        f"the rows of the data cannot be kept in {tempfile.gettempdir()}: {error.strerror}",
        remedy="make room there, or name another folder in the environment variable TMPDIR",
    )
