"""JSON rows: one object per line (JSONL), or one array of objects.

Library: msgspec parses; `datasets` was considered and brings a cache, a download layer and fifty megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, cast

import msgspec

from ...core.errors import DataError
from .row_file import Columns, FileBytes, Row, RowError, exact_json

MAX_LINE_BYTES = 64 << 20
MAX_ARRAY_BYTES = 1 << 30
"""An array is in memory as a whole while its elements are read."""
BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 1 << 20


class JsonlFile:
    """Rows are the lines that are not blank, or the elements of the array; a row's number does not change when another
    is mended."""

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
        raise RowError(f"it is {_kind(value)}, not a JSON object", "write one object per row")


def _line_texts(file: BinaryIO) -> Iterator[tuple[str, bytes, int]]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        text, size = line.rstrip(b"\r\n"), len(line)
        text = text.removeprefix(BOM) if number == 1 else text
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


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {
        list: "an array",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), type(value).__name__)
