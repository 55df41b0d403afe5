"""A data file as numbered rows, whatever its format, and what can be wrong with one row."""

from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import orjson

from ...core.errors import ConfigError, DataError

Columns = dict[str, Any]
PARQUET_MAGIC = b"PAR1"
FOREIGN_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip-compressed"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
)


class RowError(Exception):
    """One row is bad. The place is added by who knows the file."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy


class RowFile(Protocol):
    """Rows of one file, in file order."""

    @property
    def num_rows(self) -> int: ...

    def read(self, row: int) -> Columns:
        """The columns of a row. Raises RowError."""
        ...

    def place(self, row: int) -> str:
        """Where a row stands, for messages: `file:line`."""
        ...


def check_data_file(path: str, key: str) -> bytes:
    """The first bytes of a file that can be read. Raises ConfigError naming the run file's key, DataError for a format
    that is not known."""
    try:
        if Path(path).is_dir():
            raise ConfigError(f"{key}: {path} is a folder", remedy="name a JSONL or parquet file, or a list of files")
        if Path(path).exists() and not Path(path).is_file():  # rows are read again when they are drawn
            raise ConfigError(f"{key}: {path} is a pipe or a device", remedy="write what it gives into a file")
        with Path(path).open("rb") as file:
            head = file.read(8)
    except FileNotFoundError:
        raise ConfigError(f"{key}: there is no file {path}", remedy=f"check {key}; {_neighbours(path)}") from None
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}", remedy="check its permissions") from error
    if not head:
        raise DataError(f"{path}: the file is empty", remedy="write one JSON object per line")
    for magic, what in FOREIGN_MAGIC:
        if head.startswith(magic):
            raise DataError(f"{path}: is {what}, not JSONL or parquet", remedy="convert it to plain UTF-8 JSONL")
    return head


def _neighbours(path: str) -> str:
    folder = Path(path).parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())[:8]
    return f"its folder holds {', '.join(names)}" if names else "its folder is empty"


def exact_json(text: bytes | str) -> object:
    """The value as written: orjson is strict about the form, but rounds long numbers and keeps one of equal keys.

    Raises ValueError for what is not JSON, RowError for a value that would not arrive as written.
    """
    orjson.loads(text)
    try:
        return _exact.decode(text if isinstance(text, str) else text.decode())
    except RecursionError as error:
        raise RowError("the JSON is nested too deeply", "store what is deep as text") from error


def _object(pairs: list[tuple[str, Any]]) -> Columns:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(f'the key "{twice}" comes twice in one object', "keep one of them")
    return table


def _number(text: str) -> float:
    value = float(text)
    # Both are written by programs for this very value: the shortest text that reads back, and 17 digits.
    if any(_is_same(text, form) for form in (repr(value), f"{value:.17g}")):
        return value
    raise RowError(f"the number {text[:40]} would be rounded to {value!r}", "write it as a text")


def _is_same(text: str, other: str) -> bool:
    try:
        return Decimal(text) == Decimal(other)
    except ArithmeticError:  # an exponent beyond what decimals have
        return False


_exact = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number)
