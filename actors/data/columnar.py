"""Parquet and Arrow files by pyarrow, a batch of rows at a time. Columns that are not asked for are not read."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Generator, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, cast

import msgspec
import numpy as np

from ...core.errors import DataError, MyxaError
from .layout import MEDIA_COLUMNS, RowLayout
from .row_file import Columns, Row, RowError, pyarrow

BATCH_ROWS = 128
PAGE_BYTES = 1 << 20
ODD = re.compile("float|double|decimal|date|time|duration|interval|binary|dictionary|map|union|extension")
"""In a type: its values may have no form in JSON. Text, whole numbers, booleans and what is made of them have one."""
Kind = Literal["parquet", "arrow", "arrow stream"]


class ColumnarFile:
    """Rows of a parquet or Arrow file."""

    def __init__(self, path: str, layout: RowLayout, kind: Kind) -> None:
        """Look at the columns and count the rows. Raises DataError for a broken file, ConfigError for pyarrow."""
        self._path = path
        self._layout = layout
        self._kind = kind
        self._format = "parquet" if kind == "parquet" else "Arrow"
        self._arrow = pyarrow(path, self._format)
        # pyarrow's own, and those of values that Python cannot have and of broken arrays
        builtin = (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError)
        self._errors = (self._arrow.ArrowException, *builtin)
        with self._naming(f"is not a readable {self._format} file"):
            schema, self.num_rows = self._look()
        self._names: list[str] = list(schema.names)
        if twice := next((name for name in self._names if self._names.count(name) > 1), None):
            raise DataError(f'{path}: two columns are named "{twice}"', remedy="rename one of them")
        self._read_names = [name for name in dict.fromkeys(layout.columns) if name in self._names]
        self._unread = {name: None for name in self._names if name not in self._read_names}
        types = {name: str(schema.field(name).type) for name in self._read_names}
        narrow = {name: kind for name, kind in types.items() if "float" in kind and "double" not in kind}
        self._short = {name: np.float16 if "half" in kind else np.float32 for name, kind in narrow.items()}
        self._odd_names = [name for name, kind in types.items() if ODD.search(kind) and name not in MEDIA_COLUMNS]
        self._has_maps = any("map<" in kind for kind in types.values())
        # The one schema of all rows adds nulls to tools and tool calls.
        self._is_unified = any(
            "tool_calls" in kind or ("struct<" in kind and layout.is_of_tools(name)) for name, kind in types.items()
        )

    def rows(self) -> Iterator[Row]:
        if not self._read_names:
            yield from ((f"{self._path}, row {row}", lambda: dict(self._unread)) for row in range(self.num_rows))
            return
        row, batches = 0, self._batches(self._read_names)
        while True:
            with self._naming(f"cannot be read from row {row} on"):
                batch = next(batches, None)
            if batch is None:
                break
            is_valid = self._is_valid(batch)  # the whole: a part of it takes as long to look at, if columns are nested
            for first in range(0, batch.num_rows, BATCH_ROWS):
                part = batch.slice(first, BATCH_ROWS)
                values: list[Columns] | None = None  # some row of these cannot be read, and says so itself
                with contextlib.suppress(*self._errors):
                    values = self._to_python(part) if is_valid else None
                for index in range(part.num_rows):
                    yield f"{self._path}, row {row}", partial(self._read, part, values, index)
                    row += 1
        if row != self.num_rows:
            raise DataError(
                f"{self._path}: ends before row {row}, but says that it has {self.num_rows}", remedy="write it again"
            )

    def _look(self) -> tuple[Any, int]:
        if self._kind == "parquet":
            with self._parquet() as file:
                return file.schema_arrow, file.metadata.num_rows
        with self._arrow.memory_map(self._path) as file:
            schema = self._ipc(file, []).schema
            return schema, sum(batch.num_rows for batch in self._ipc_batches(file, [0] if schema.names else []))

    def _batches(self, names: list[str]) -> Iterator[Any]:
        if self._kind == "parquet":
            with self._parquet() as file:
                yield from file.iter_batches(BATCH_ROWS, columns=names, use_threads=False)
            return
        with self._arrow.OSFile(self._path) as file:
            for batch in self._ipc_batches(file, [self._names.index(name) for name in names]):
                yield batch.select(names)

    def _parquet(self) -> Any:
        # A page at a time: a column of a row group may be larger than memory.
        return pyarrow(self._path, "parquet", "pyarrow.parquet").ParquetFile(self._path, buffer_size=PAGE_BYTES)

    def _ipc(self, file: Any, fields: list[int]) -> Any:
        """A reader of these columns, of all if there are none."""
        ipc = pyarrow(self._path, "Arrow", "pyarrow.ipc")
        file.seek(0)
        open_ipc = ipc.open_stream if self._kind == "arrow stream" else ipc.open_file
        return open_ipc(file, options=ipc.IpcReadOptions(included_fields=fields, use_threads=False))

    def _ipc_batches(self, file: Any, fields: list[int]) -> Iterator[Any]:
        reader = self._ipc(file, fields)
        if self._kind == "arrow stream":
            yield from reader
        else:
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))

    @contextlib.contextmanager
    def _naming(self, trouble: str) -> Generator[None]:
        try:
            yield
        except MyxaError:
            raise
        except self._errors as error:
            cause = " ".join(str(error).split())[:300] or type(error).__name__
            remedy = "write the file again, or copy it again if it was whole elsewhere"
            raise DataError(f"{self._path}: {trouble}: {cause}", remedy=remedy) from error

    def _read(self, part: Any, rows: list[Columns] | None, index: int) -> Columns:
        columns = self._read_alone(part.slice(index, 1)) if rows is None else rows[index]
        if self._is_unified:
            self._layout.check_unified(columns)
        for name in self._odd_names:
            columns[name] = _to_json_types(name, _shortest(columns[name], self._short.get(name)))
        # Columns that were not read are shown by name only, for the message about a missing one.
        return {**self._unread, **columns}

    def _is_valid(self, batch: Any) -> bool:
        with contextlib.suppress(*self._errors):
            batch.validate(full=True)
            return True
        return False

    def _to_python(self, rows: Any) -> list[Columns]:
        """Rows with maps take much longer."""
        return rows.to_pylist(maps_as_pydicts="strict") if self._has_maps else rows.to_pylist()

    def _read_alone(self, row: Any) -> Columns:
        """A row of a batch that is bad somewhere. Raises RowError if it is this row."""
        columns: Columns = {}
        for name in self._read_names:
            column = row.select([name])
            try:
                column.validate(full=True)
                columns.update(self._to_python(column)[0])
            except self._errors as error:
                cause = " ".join(str(error).split())[:300]
                raise RowError(f'column "{name}" cannot be read: {cause}', "store the value as text") from error
        return columns


def _shortest(value: Any, kind: type[np.floating[Any]] | None) -> Any:
    """With numbers as few digits say them in the file's type: 0.1, and not 0.10000000149011612."""
    if kind is None:
        return value
    if isinstance(value, dict):
        return {key: _shortest(part, kind) for key, part in cast("Columns", value).items()}
    if isinstance(value, list):
        return [_shortest(part, kind) for part in cast("list[Any]", value)]
    return float(str(kind(value))) if isinstance(value, float) else value


def _to_json_types(name: str, value: object) -> object:
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
        return any(map(_holds_odd, cast("dict[str, object]", value).values()))
    if isinstance(value, list):
        return any(map(_holds_odd, cast("list[object]", value)))
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, datetime | timedelta):
        return bool(getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0))
    return isinstance(value, bytes)
