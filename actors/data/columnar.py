"""Parquet and Arrow files by pyarrow, a batch of rows at a time. Columns that are not asked for are not read.

What a column's type may hold is looked at once, so that rows of text and integers are taken as they are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, cast

import msgspec

from ...core.errors import DataError, MyxaError
from .layout import MEDIA_COLUMNS, RowLayout
from .row_file import Columns, Row, RowError, pyarrow

BATCH_ROWS = 128
BATCH_BYTES = 8 << 20
"""So many are Python's objects at a time, or one row if it is larger."""
PAGE_BYTES = 1 << 20
WRITE_AGAIN = "write the file again, or copy it again if it was whole elsewhere"
Kind = Literal["parquet", "arrow", "arrow stream"]
_BAD_VALUE = (ValueError, KeyError, OverflowError, TypeError)
"""What pyarrow raises for values that Python cannot have; its own errors for broken arrays are ValueErrors too, or of
`errors`."""


class ColumnarFile:
    """Rows of a parquet or Arrow file."""

    def __init__(self, path: str, layout: RowLayout, kind: Kind) -> None:
        """Look at the columns and count the rows. Raises DataError for a broken file, ConfigError for pyarrow."""
        self._path = path
        self._layout = layout
        self._source = _Parquet(path) if kind == "parquet" else _Arrow(path, is_stream=kind == "arrow stream")
        self.num_rows = self._source.num_rows
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

    def rows(self) -> Iterator[Row]:
        row = 0
        for batch in self._source.batches(self._wanted) if self._wanted else ():
            is_valid = self._is_valid(batch)  # the whole: a part of it takes as long to look at, if columns are nested
            size = min(max(1, BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1)), BATCH_ROWS)
            for first in range(0, batch.num_rows, size):
                part = _Part(self._to_python, batch.slice(first, size), is_valid=is_valid)
                for at in range(part.num_rows):
                    yield f"{self._path}, row {row}", partial(self._read, part, at)
                    row += 1
        if not self._wanted:
            yield from ((f"{self._path}, row {at}", lambda: dict(self._others)) for at in range(self.num_rows))
        elif row != self.num_rows:
            raise DataError(
                f"{self._path}: ends before row {row}, but says that it has {self.num_rows}", remedy="write it again"
            )

    def _read(self, part: _Part, at: int) -> Columns:
        found = part.row(at)
        found = self._alone(part.batch.slice(at, 1)) if found is None else found
        if self._is_unified:
            self._layout.check_unified(found)
        for name in self._odd:
            found[name] = _plain(name, found[name])
        # Columns that were not read are shown by name only, for the message about a missing one.
        return {**self._others, **found}

    def _is_valid(self, batch: Any) -> bool:
        try:
            batch.validate(full=True)
        except self._source.errors:
            return False
        return True

    def _to_python(self, batch: Any) -> list[Columns]:
        # Which is much slower, where no map is.
        return batch.to_pylist(maps_as_pydicts="strict") if self._has_maps else batch.to_pylist()

    def _alone(self, row: Any) -> Columns:
        """A row of a batch that is bad somewhere. Raises RowError if it is this row."""
        found: Columns = {}
        for name in self._wanted:
            column = row.select([name])
            try:
                column.validate(full=True)
                found.update(self._to_python(column)[0])
            except (*self._source.errors, *_BAD_VALUE) as error:
                cause = " ".join(str(error).split())[:300]
                raise RowError(f'column "{name}" cannot be read: {cause}', "store the value as text") from error
        return found


class _Part:
    """Rows that become Python's objects together, once the first of them is read."""

    def __init__(self, to_python: Callable[[Any], list[Columns]], batch: Any, *, is_valid: bool) -> None:
        self.batch = batch
        self.num_rows: int = batch.num_rows
        self._to_python = to_python
        self._rows: list[Columns] | None = None
        self._is_bad = not is_valid

    def row(self, at: int) -> Columns | None:
        """None: some row of these cannot be read."""
        if self._rows is None and not self._is_bad:
            try:
                self._rows = self._to_python(self.batch)
            except Exception:  # noqa: BLE001 -- said of the row itself, once it is read alone
                self._is_bad = True
        return None if self._rows is None else self._rows[at]


class _Parquet:
    def __init__(self, path: str) -> None:
        self._path = path
        self._parquet = pyarrow(path, "parquet", "pyarrow.parquet")
        self.errors: tuple[type[Exception], ...] = (pyarrow(path, "parquet").ArrowException, OSError)
        with _readable(path, "parquet", self.errors), self._open() as file:
            self.names: list[str] = list(file.schema_arrow.names)
            self.types: list[Any] = list(file.schema_arrow.types)
            self.num_rows: int = file.metadata.num_rows
            self._num_groups: int = file.num_row_groups

    def _open(self) -> Any:
        # A page at a time: a column of a row group may be larger than memory.
        return self._parquet.ParquetFile(self._path, buffer_size=PAGE_BYTES)

    def batches(self, wanted: list[str]) -> Iterator[Any]:
        row = 0
        with self._open() as file:
            for group in range(self._num_groups):
                try:
                    for batch in _read(file, group, wanted):
                        yield batch
                        row += batch.num_rows
                except (*self.errors, ValueError, OverflowError, MemoryError) as error:
                    raise self._broken(file, group, row, wanted, error) from error

    def _broken(self, file: Any, group: int, row: int, wanted: list[str], error: Exception) -> DataError:
        """Which column it is."""
        bad = wanted if len(wanted) == 1 else [name for name in wanted if not self._can_be_read(file, group, name)]
        column = f', column "{bad[0]}"' if bad else ""
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        return DataError(
            f"{self._path}: row group {group}{column} cannot be read from row {row} on: {cause}", remedy=WRITE_AGAIN
        )

    def _can_be_read(self, file: Any, group: int, column: str) -> bool:
        try:
            for _ in _read(file, group, [column]):
                pass
        except (*self.errors, ValueError, OverflowError, MemoryError):
            return False
        return True


def _read(file: Any, group: int, columns: list[str]) -> Iterator[Any]:
    return file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False)


class _Arrow:
    """An Arrow IPC file, of the file or the stream format."""

    def __init__(self, path: str, *, is_stream: bool) -> None:
        self._path = path
        self._is_stream = is_stream
        self._arrow = pyarrow(path, "Arrow")
        self._ipc = pyarrow(path, "Arrow", "pyarrow.ipc")
        self.errors: tuple[type[Exception], ...] = (self._arrow.ArrowException, OSError)
        with _readable(path, "Arrow", self.errors), self._arrow.memory_map(path) as file:
            schema = self._reader(file, []).schema
            self.names: list[str] = list(schema.names)
            self.types: list[Any] = list(schema.types)
            self.num_rows = sum(batch.num_rows for batch in self._iterate(file, self.names[:1]))

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

    def batches(self, wanted: list[str]) -> Iterator[Any]:
        row = number = 0
        try:
            with self._arrow.OSFile(self._path) as file:
                for batch in self._iterate(file, wanted):
                    yield batch.select(wanted)
                    row += batch.num_rows
                    number += 1
        except (*self.errors, ValueError, OverflowError, MemoryError) as error:
            cause = " ".join(str(error).split())[:300]
            raise DataError(
                f"{self._path}: record batch {number} cannot be read, from row {row} on: {cause}", remedy=WRITE_AGAIN
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
