"""A data file as rows, in any format; what can be wrong with one row; its bytes; JSON as it was written.

Files are read forward, from the start; `FileBytes` unpacks them (gzip by Python, zstd by pyarrow). JSON is one object
per line (JSONL), or one array of objects, with whole numbers of any size.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO, Protocol, cast

import msgspec
import orjson

from ...core.errors import ConfigError, DataError
from ...core.files import open_regular

Columns = dict[str, Any]


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


class NotJson(RowError):
    """A text is not JSON."""


def exact_json(text: bytes | str) -> object:
    """The value as written. Raises NotJson, RowError for a number that would be rounded or a key that comes twice."""
    data = text.encode() if isinstance(text, str) else text
    try:
        value = _decoder.decode(data)
    except UnicodeDecodeError as error:
        raise NotJson("it is not UTF-8", "save the file as UTF-8") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        if data.strip() in (b"[", b"{"):
            raise NotJson(
                "the JSON goes over several lines", "write one object per line (`jq -c .` does it)"
            ) from error
        raise NotJson(f"it is not JSON: {_why(data)}", REMEDY) from error
    if _num_quotes(data) != _num_quotes(msgspec.json.encode(value)):
        json.loads(data, object_pairs_hook=_unique_keys)
    return value


def _num_quotes(text: bytes) -> int:
    """Those that begin or end a string: a key that comes twice, of which the decoder drops one, takes two away."""
    if b"\\\\" in text:
        text = text.replace(b"\\\\", b"")
    return text.count(b'"') - text.count(b'\\"')


def _unique_keys(pairs: list[tuple[str, Any]]) -> Columns:
    table = dict(pairs)
    if len(table) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise RowError(f'the key "{name}" comes twice in one object', "keep one of them")
    return table


REMEDY = "mend it; NaN, Infinity and half a character (of a text that was cut inside an emoji) are not JSON"


def _why(data: bytes) -> str:
    """Orjson says more about it than msgspec."""
    if b"\0" in data:
        return "it holds bytes of 0, as in a file that was not written to its end"
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return f"{error.msg} (column {error.colno})"
    return "it is nested too deeply"


def _number(text: str) -> float:
    value = float(text)
    # Both are written by programs for this very value: the shortest text that reads back, and 17 digits.
    with contextlib.suppress(ArithmeticError):  # an exponent beyond what decimals have
        if Decimal(text) in (Decimal(repr(value)), Decimal(f"{value:.17g}")):
            return value
    raise RowError(f"the number {text[:40]} would be rounded to {value!r}", "write it as a text")


_decoder = msgspec.json.Decoder(float_hook=_number)


PACKED = re.compile(rb"(?P<gzip>\x1f\x8b)|(?P<zstd>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)", re.DOTALL)
"""First bytes of packed files; pzstd begins with a frame that is to be skipped."""


class FileBytes:
    """A file that may be packed."""

    def __init__(self, path: str) -> None:
        """Look at its first bytes. Raises OSError."""
        self._path = path
        with open_regular(Path(path)) as file:
            magic = PACKED.match(file.read(4))
        self.packing = (magic and magic.lastgroup) or ""
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
            trouble = f"is cut off: its {self.packing} data ends in the middle"
            if not is_cut:
                trouble = f"cannot be unpacked: its {self.packing} data is damaged"
            raise DataError(
                f"{self._path}: {trouble}",
                remedy=f"copy it again; `{self.packing} -t` checks it",
            ) from error


def pyarrow(path: str, kind: str, module: str = "pyarrow") -> Any:
    """pyarrow, which only its files pay for. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{path}: {kind} needs pyarrow, which is not installed", remedy="pip install 'myxa[parquet]'"
        ) from error


MAX_LINE_BYTES = 64 << 20
SHOWN_CHARS = 60
MAX_ARRAY_BYTES = 1 << 30
"""An array is in memory as a whole while its elements are read."""
BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 1 << 20


class JsonlFile:
    """Rows are lines that are not blank, or elements of the array; their numbers do not change."""

    def __init__(self, path: str) -> None:
        """Look at its beginning. Raises OSError, DataError if it cannot be unpacked."""
        self._path = path
        self._bytes = FileBytes(path)
        with self._bytes.naming_damage(), self._bytes.stream() as file:
            self._is_array = _first_mark(file) == b"["

    @property
    def num_rows(self) -> int:
        return sum(1 for _ in self._texts())

    def rows(self) -> Iterator[Row]:
        for place, text, size in self._texts():
            yield f"{self._path}{place}", partial(self._read, text, size)

    def _texts(self) -> Iterator[tuple[str, bytes, int]]:
        """Place, text and number of bytes of each row; the text of a line that is too long is cut."""
        with self._bytes.naming_damage(), self._bytes.stream() as file:
            yield from self._elements(file) if self._is_array else _line_texts(file)

    def _elements(self, file: BinaryIO) -> Iterator[tuple[str, bytes, int]]:
        data = file.read(MAX_ARRAY_BYTES + 1)
        if len(data) > MAX_ARRAY_BYTES:
            raise DataError(
                f"{self._path}: the JSON array has more than {MAX_ARRAY_BYTES} bytes", remedy="write it as JSONL"
            )
        try:
            elements = msgspec.json.decode(data.removeprefix(BOM), type=list[msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(
                f"{self._path}: is no JSON array: {error}", remedy="mend or copy it, or write JSONL"
            ) from error
        for number, element in enumerate(elements):
            yield f", element {number}", bytes(element), len(element)

    def _read(self, text: bytes, size: int) -> Columns:
        if size > MAX_LINE_BYTES and not self._is_array:
            raise RowError(
                f"the line has {size} bytes, the limit is {MAX_LINE_BYTES}",
                "is the file one JSON value without line ends?",
            )
        value = exact_json(text)
        if isinstance(value, dict):
            return cast("Columns", value)
        raise RowError(f"it is no JSON object: {shorten(text.decode(), SHOWN_CHARS)}", "write one object per row")


def _line_texts(file: BinaryIO) -> Iterator[tuple[str, bytes, int]]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        text, size = line.rstrip(b"\r\n").removeprefix(BOM), len(line)  # a file of several has several marks
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
            size += len(line)
        if text.strip() or size > MAX_LINE_BYTES:
            yield f":{number}", text, size


def _first_mark(file: BinaryIO) -> bytes:
    """The first byte that is neither white space nor a mark of the byte order."""
    head = file.read(CHUNK_BYTES).removeprefix(BOM).lstrip()
    while not head and (more := file.read(CHUNK_BYTES)):
        head = more.lstrip()
    return head[:1]
