"""Parquet and Arrow files by pyarrow, a batch of rows at a time. Columns that are not asked for are not read.

What a column's type may hold is looked at once, so that rows of text and integers are taken as they are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator
from datetime import datetime, timedelta
from typing import Any, Literal, cast

import msgspec

from ...core.errors import DataError, MyxaError
from .layout import MEDIA_COLUMNS, RowLayout
from .row_file import Columns, RowError, pyarrow

BATCH_ROWS = 128
BATCH_BYTES = 8 << 20
"""So many are Python's objects at a time, or one row if it is larger."""
PAGE_BYTES = 1 << 20
Kind = Literal["parquet", "arrow", "arrow stream"]
_BAD_VALUE = (ValueError, KeyError, OverflowError, TypeError)
"""What pyarrow raises for values that Python cannot have; its own errors for broken arrays are ValueErrors too, or of
`errors`."""


class ColumnarFile:
    """Rows of a parquet or Arrow file. Reading forward is fast; going back reads the file from the row group or the
    start on."""

    is_random = False

    def __init__(self, path: str, layout: RowLayout, kind: Kind) -> None:
        """Look at the columns and count the rows. Raises DataError for a broken file, ConfigError for pyarrow."""
        self._path = path
        self._layout = layout
        self._source = _Parquet(path) if kind == "parquet" else _Arrow(path, is_stream=kind == "arrow stream")
        names = self._source.names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f'{path}: two columns are named "{twice}"', remedy="rename one of them")
        wanted = [name for name in dict.fromkeys(layout.columns) if name in names]
        self._others = {name: None for name in names if name not in wanted}
        self._wanted = wanted
        types = {name: self._source.types[names.index(name)] for name in wanted}
        traits = {name: _traits(of) for name, of in types.items()}
        self._odd = [name for name in wanted if {"float", "odd"} & traits[name] and name not in MEDIA_COLUMNS]
        self._has_maps = any("map" in of for of in traits.values())
        # The one schema of all rows adds nulls to tools and tool calls.
        self._is_unified = any(
            "tool_calls" in of or ("struct" in of and layout.is_of_tools(name)) for name, of in traits.items()
        )
        self._batches: Iterator[tuple[int, Any]] | None = None
        self._batch: Any = None
        self._is_valid = False
        """The whole batch: a part of it takes as long to look at, where columns are nested."""
        self._first = 0
        self._rows: list[Columns] = []
        self._first_of_rows = 0

    @property
    def num_rows(self) -> int:
        return self._source.num_rows

    def place(self, row: int) -> str:
        return f"{self._path}, row {row}"

    def close(self) -> None:
        self._batches, self._batch, self._rows = None, None, []
        self._source.close()

    def read(self, row: int) -> Columns:
        found = self._decoded(row) if self._wanted else {}
        if self._is_unified:
            self._layout.check_unified(found)
        for name in self._odd:
            found[name] = _plain(name, found[name])
        # Columns that were not read are shown by name only, for the message about a missing one.
        return {**self._others, **found}

    def _decoded(self, row: int) -> Columns:
        at = row - self._first_of_rows
        if not 0 <= at < len(self._rows):
            self._seek(row)
            first = row - self._first
            size = max(1, BATCH_BYTES * self._batch.num_rows // max(self._batch.nbytes, 1))
            part = self._batch.slice(first, min(size, BATCH_ROWS))
            try:
                self._rows, self._first_of_rows = self._to_python(part), row
            except (*self._source.errors, *_BAD_VALUE):
                return self._alone(part.slice(0, 1))
            at = 0
        return self._rows[at]

    def _to_python(self, batch: Any) -> list[Columns]:
        if not self._is_valid:
            batch.validate(full=True)
        # Which is much slower, where no map is.
        return batch.to_pylist(maps_as_pydicts="strict") if self._has_maps else batch.to_pylist()

    def _alone(self, row: Any) -> Columns:
        """A row of a batch that is bad somewhere. Raises RowError if it is this row."""
        found: Columns = {}
        for name in self._wanted:
            try:
                found.update(self._to_python(row.select([name]))[0])
            except (*self._source.errors, *_BAD_VALUE) as error:
                cause = " ".join(str(error).split())[:300]
                raise RowError(f'column "{name}" cannot be read: {cause}', "store the value as text") from error
        return found

    def _seek(self, row: int) -> None:
        """Until the batch that holds the row is there."""
        if self._batches is None or row < self._first:
            self._batches = self._source.batches(row, self._wanted)
            self._batch = None
        while self._batch is None or row >= self._first + self._batch.num_rows:
            found = next(self._batches, None)
            if found is None:
                raise DataError(f"{self._path}: ends before row {row}, but says that it has {self.num_rows}")
            self._first, self._batch = found
            try:
                self._batch.validate(full=True)
                self._is_valid = True
            except self._source.errors:
                self._is_valid = False


class _Parquet:
    def __init__(self, path: str) -> None:
        self._path = path
        self._arrow = pyarrow(path, "parquet")
        self._parquet = pyarrow(path, "parquet", "pyarrow.parquet")
        self.errors: tuple[type[Exception], ...] = (self._arrow.ArrowException, OSError)
        self._file: Any = None
        with _readable(path, "parquet", self.errors):
            file = self._open()
            self.names: list[str] = list(file.schema_arrow.names)
            self.types: list[Any] = list(file.schema_arrow.types)
            self.num_rows: int = file.metadata.num_rows
            self._group_rows = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
        if sum(self._group_rows) != self.num_rows or min(self._group_rows, default=0) < 0:
            raise DataError(
                f"{path}: says that it has {self.num_rows} rows, its row groups {sum(self._group_rows)}",
                remedy="write it again",
            )
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> Any:
        if self._file is None:
            # A page at a time: a column of a row group may be larger than memory.
            self._file = self._parquet.ParquetFile(self._path, buffer_size=PAGE_BYTES)
        return self._file

    def batches(self, row: int, wanted: list[str]) -> Iterator[tuple[int, Any]]:
        first = 0
        for group, num_rows in enumerate(self._group_rows):
            if row < first + num_rows:
                yield from self._group(group, first, wanted)
            first += num_rows

    def _group(self, group: int, first: int, wanted: list[str]) -> Iterator[tuple[int, Any]]:
        end = first + self._group_rows[group]
        try:
            for batch in self._read(group, wanted):
                yield first, batch
                first += batch.num_rows
        except (*self.errors, ValueError, OverflowError, MemoryError) as error:
            raise self._broken(group, first, wanted, error) from error
        if first != end:
            raise DataError(
                f"{self._path}: row group {group} ends {end - first} rows early", remedy="write the file again"
            )

    def _read(self, group: int, columns: list[str]) -> Iterator[Any]:
        return self._open().iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False)

    def _broken(self, group: int, row: int, wanted: list[str], error: Exception) -> DataError:
        """Which column it is."""
        bad = wanted if len(wanted) == 1 else [name for name in wanted if not self._can_be_read(group, name)]
        column = f', column "{bad[0]}"' if bad else ""
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        return DataError(
            f"{self._path}: row group {group}{column} cannot be read from row {row} on: {cause}",
            remedy="write the file again, or copy it again if it was whole elsewhere",
        )

    def _can_be_read(self, group: int, column: str) -> bool:
        try:
            for _ in self._read(group, [column]):
                pass
        except (*self.errors, ValueError, OverflowError, MemoryError):
            return False
        return True


class _Arrow:
    """An Arrow IPC file, of the file or the stream format."""

    def __init__(self, path: str, *, is_stream: bool) -> None:
        self._path = path
        self._is_stream = is_stream
        self._arrow = pyarrow(path, "Arrow")
        self._ipc = pyarrow(path, "Arrow", "pyarrow.ipc")
        self.errors: tuple[type[Exception], ...] = (self._arrow.ArrowException, OSError)
        self._batch_rows: list[int] = []
        with _readable(path, "Arrow", self.errors), self._arrow.memory_map(path) as file:
            schema = self._reader(file, []).schema
            self.names: list[str] = list(schema.names)
            self.types: list[Any] = list(schema.types)
            self._batch_rows += [batch.num_rows for batch in self._iterate(file, self.names[:1])]
        self.num_rows = sum(self._batch_rows)

    def close(self) -> None:
        """It is open only while batches are read."""

    def _reader(self, file: Any, columns: list[str]) -> Any:
        fields = [self.names.index(name) for name in columns]
        options = self._ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        file.seek(0)
        opened = self._ipc.open_stream if self._is_stream else self._ipc.open_file
        return opened(file, options=options)

    def _iterate(self, file: Any, columns: list[str]) -> Iterator[Any]:
        reader = self._reader(file, columns)
        if self._is_stream:
            yield from reader
        else:
            yield from (reader.get_batch(at) for at in range(reader.num_record_batches))

    def batches(self, row: int, wanted: list[str]) -> Iterator[tuple[int, Any]]:
        del row
        first, number = 0, 0
        try:
            with self._arrow.OSFile(self._path) as file:
                for batch in self._iterate(file, wanted):
                    yield first, batch.select(wanted)
                    first += batch.num_rows
                    number += 1
        except (*self.errors, ValueError, OverflowError, MemoryError) as error:
            cause = " ".join(str(error).split())[:300]
            raise DataError(
                f"{self._path}: record batch {number} cannot be read, from row {first} on: {cause}",
                remedy="write the file again, or copy it again if it was whole elsewhere",
            ) from error


@contextlib.contextmanager
def _readable(path: str, what: str, errors: tuple[type[Exception], ...]) -> Generator[None]:
    try:
        yield
    except MyxaError:
        raise
    except (*errors, ValueError, OverflowError, MemoryError) as error:
        cause = " ".join(str(error).split())[:300]
        raise DataError(f"{path}: is not a readable {what} file: {cause}", remedy="write it again") from error


def _traits(of: Any) -> set[str]:
    """What values of a type may hold that needs a look: "map", "float" (NaN), "odd" (bytes, dates, decimals), "struct",
    and "tool_calls" for a field of that name."""
    types = pyarrow("", "a type", "pyarrow.types")
    if types.is_struct(of):
        inner = [_traits(of.field(at).type) for at in range(of.num_fields)]
        named = {"tool_calls"} & {of.field(at).name for at in range(of.num_fields)}
        return {"struct"}.union(named, *inner)
    if types.is_map(of):
        return {"map"} | _traits(of.key_type) | _traits(of.item_type)
    if hasattr(of, "storage_type"):
        return {"odd"} | _traits(of.storage_type)
    if hasattr(of, "value_type"):  # lists, dictionaries, runs
        return _traits(of.value_type)
    if types.is_floating(of):
        return {"float"}
    is_plain = types.is_integer(of) or types.is_boolean(of) or types.is_null(of)
    is_text = types.is_string(of) or types.is_large_string(of) or types.is_string_view(of)
    return set[str]() if is_plain or is_text else {"odd"}


def _plain(name: str, value: object) -> object:
    """A value as JSON would have it: dates and decimals are text. Raises RowError."""
    if _holds_odd(value):
        raise RowError(f'column "{name}" holds bytes, NaN or an infinite number', "store the value as text")
    try:
        return msgspec.to_builtins(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RowError(f'column "{name}" has no JSON form: {error}', "store the value as text") from error


def _holds_odd(value: object) -> bool:
    """Whether there is something in it that JSON has not, or that a text would round: pandas' nanoseconds."""
    if isinstance(value, dict):
        return any(_holds_odd(one) for one in cast("dict[str, object]", value).values())
    if isinstance(value, list):
        return any(_holds_odd(one) for one in cast("list[object]", value))
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, datetime | timedelta):
        return bool(getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0))
    return isinstance(value, bytes)
