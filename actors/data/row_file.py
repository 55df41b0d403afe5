"""A data file as rows, in any format; what can be wrong with one row; its bytes; JSON as it was written.

Files are read forward, from the start. `FileBytes` reads a file's bytes, unpacked if they are packed. Libraries: gzip
is Python's, zstd is pyarrow's, which is imported for it only. orjson parses JSON; its value is used when it writes back
to the same keys and numbers. What does not is parsed once more by Python's decoder, which sees the text of each number
and every key.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import orjson

from ...core.errors import ConfigError, DataError
from ...core.files import open_regular

Columns = dict[str, Any]
LONG_NUMBER = re.compile(rb"[0-9][0-9.]{15,}")
EXPONENT = re.compile(rb"[0-9.]+[eE][+-]?[0-9]+")
_MARKS = bytes(ord("0" if chr(at) in "0123456789." else "e" if chr(at) in "eE" else " ") for at in range(256))
_LONG = b"0" * 16
LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]..", re.DOTALL)
NOT_FINITE = re.compile(rb"-?(?:NaN|nan|[Ii]nf(?:inity)?)")


class RowError(Exception):
    """One row is bad. The place is added by who knows the file."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy


Row = tuple[str, Callable[[], Columns]]
"""Place of a row, for messages (`file:line`), and what reads its columns. That raises RowError."""


class RowFile(Protocol):
    """Rows of one file, or of several that are read as one, in file order."""

    @property
    def num_rows(self) -> int:
        """To count those of JSON reads the whole file."""
        ...

    def rows(self) -> Iterator[Row]:
        """All rows, from the start. Raises OSError, DataError if the file cannot be read on from there."""
        ...


def exact_json(text: bytes | str) -> object:
    """The value as written. Raises ValueError for what is not JSON, RowError for a value that would not arrive as
    written."""
    data = text.encode() if isinstance(text, str) else text
    value: object = orjson.loads(data)
    try:
        again = orjson.dumps(value)
    except TypeError:  # nested deeper than it writes
        return _by_python(data)
    return value if _is_same_json(data, again) else _by_python(data)


def _is_same_json(text: bytes, again: bytes) -> bool:
    """Whether both have the same numbers and as many strings: then no key was dropped and no number rounded.

    `again` has no spaces between values. Most writers put one after each colon and comma; equal without those is equal.
    """
    if text.replace(b'": ', b'":').replace(b', "', b',"').replace(b"}, {", b"},{") == again:
        return True
    if _num_quotes(text) != _num_quotes(again):
        return False
    marks = text.translate(_MARKS)  # numbers of at most 15 digits are exact, and expressions are slow
    return (_LONG not in marks or LONG_NUMBER.findall(text) == LONG_NUMBER.findall(again)) and (
        b"0e" not in marks or EXPONENT.findall(text) == EXPONENT.findall(again)
    )


def why_not_json(text: bytes, error: orjson.JSONDecodeError) -> RowError:
    """What is wrong with a line that orjson refuses."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as not_text:
        return RowError(f"the line is not UTF-8 (byte {not_text.start + 1} of it)", "save the file as UTF-8")
    if text.strip() in (b"[", b"{"):
        return RowError("the JSON goes over several lines", "write one object per line (`jq -c .` does it)")
    where = f"the line is not JSON from column {error.colno} on"
    if "surrogate" in str(error) and (lone := LONE_SURROGATE.search(text)) is not None:
        return RowError(
            f"{where}: {lone[0].decode()} is half a character (a lone surrogate)",
            "write the whole character; a text that was cut inside an emoji has lost the other half",
        )
    if (found := NOT_FINITE.search(text, max(error.pos - 1, 0), error.pos + 9)) is not None:
        return RowError(f"{where}: JSON has no {found[0].decode()}", "write the value as a text, or null")
    if "infinity" in str(error):
        return RowError(f"{where}: the number is too large for float64", "write it as a text")
    return RowError(where, "mend the line")


def _num_quotes(text: bytes) -> int:
    """Those that begin or end a string: a key that is dropped takes two of them away."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return text.count(b'"')


def _by_python(data: bytes) -> object:
    try:
        return _exact.decode(data.decode())
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


GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class FileBytes:
    """A file that may be packed."""

    def __init__(self, path: str) -> None:
        """Look at its first bytes. Raises OSError."""
        self._path = path
        with open_regular(Path(path)) as file:
            head = file.read(4)
        self.packing = "gzip" if head.startswith(GZIP_MAGIC) else "zstd" if head == ZSTD_MAGIC else ""
        """Empty: not packed."""

    def stream(self) -> BinaryIO:
        """A new reader, at the start; read it inside `naming_damage`. Raises OSError, ConfigError for pyarrow."""
        if self.packing == "zstd":
            arrow = pyarrow(self._path, "zstd")
            return cast("BinaryIO", io.BufferedReader(arrow.CompressedInputStream(arrow.OSFile(self._path), "zstd")))
        file = open_regular(Path(self._path))
        if not self.packing:
            return file
        unpacked: Any = gzip.GzipFile(fileobj=file, mode="rb")
        unpacked.myfileobj = file  # it is closed with the reader
        return cast("BinaryIO", unpacked)

    @contextlib.contextmanager
    def naming_damage(self) -> Generator[None]:
        """Errors of unpacking become a DataError that names the file."""
        try:
            yield
        except (OSError, EOFError, zlib.error) as error:
            if not self.packing:
                raise
            # pyarrow has no class of its own for data that ends too early.
            is_cut = isinstance(error, EOFError) or "runcated" in str(error)
            what, how = ("is cut off", "ends in the middle") if is_cut else ("cannot be unpacked", "is damaged")
            raise DataError(
                f"{self._path}: {what}: its {self.packing} data {how}",
                remedy=f"copy it again; `{self.packing} -t` checks it",
            ) from error


def pyarrow(path: str, what: str, module: str = "pyarrow") -> Any:
    """pyarrow, by name, because it is optional, heavy and untyped: only who reads such files pays for it. Raises
    ConfigError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{path}: {what} needs pyarrow, which is not installed", remedy="pip install 'myxa[parquet]'"
        ) from error
