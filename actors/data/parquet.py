"""Parquet by pyarrow, which is imported only here. Columns that are not asked for are not read."""

from __future__ import annotations

import importlib
import math
from typing import Any, cast

import msgspec

from ...core.errors import ConfigError, DataError
from .layout import MEDIA_COLUMNS, Layout
from .row_file import Columns, RowError


class ParquetFile:
    """Rows of a parquet file; the columns asked for lie in memory in Arrow's form."""

    def __init__(self, path: str, layout: Layout) -> None:
        """Read the columns of `layout` that are there. Raises DataError for a broken file, ConfigError for pyarrow."""
        arrow, parquet = _pyarrow(path)
        self._path = path
        self._layout = layout
        try:
            with parquet.ParquetFile(path) as file:
                names: list[str] = list(file.schema_arrow.names)
                wanted_here = [name for name in dict.fromkeys(layout.columns) if name in names]
                self._table: Any = file.read(columns=wanted_here)
                self._num_rows: int = file.metadata.num_rows
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: is not a readable parquet file: {error}", remedy="write it again") from error
        self._others = {name: None for name in names if name not in wanted_here}
        if not self._num_rows:
            raise DataError(f"{path}: the file holds no rows", remedy="name a file with rows")

    @property
    def num_rows(self) -> int:
        return self._num_rows

    def place(self, row: int) -> str:
        return f"{self._path}, row {row}"

    def read(self, row: int) -> Columns:
        # Columns that were not read are shown by name only, for the message about a missing one.
        found: Columns = {name: self._table[name][row].as_py() for name in self._table.column_names}
        self._layout.check_unified(found)
        try:
            plain: Columns = msgspec.to_builtins(
                found, builtin_types=(bytes,)
            )  # dates and decimals as JSON would have them
        except (TypeError, ValueError) as error:
            raise RowError(f"a value has no JSON form: {error}", "store it as text") from error
        for name, value in plain.items():
            if name not in MEDIA_COLUMNS and _holds_odd(value):  # the layout refuses those by name
                raise RowError(f'column "{name}" holds bytes, NaN or an infinite number', "store the value as text")
        return {**self._others, **plain}


def _holds_odd(value: object) -> bool:
    """Whether there is something in it that JSON has not."""
    if isinstance(value, dict):
        return any(_holds_odd(one) for one in cast("dict[str, object]", value).values())
    if isinstance(value, list):
        return any(_holds_odd(one) for one in cast("list[object]", value))
    return isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value))


def _pyarrow(path: str) -> tuple[Any, Any]:
    # By name, because it is optional, heavy and untyped: only who reads parquet pays for it.
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"{path}: parquet needs pyarrow, which is not installed", remedy="pip install 'myxa[parquet]'"
        ) from error
