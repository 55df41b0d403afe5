"""JSON rows: one object per line (JSONL), or one array of objects. Rows are indexed once and read when they are needed;
the text stays on the disk, packed or not.

Library: orjson parses; `datasets` was considered and brings a cache, a download layer and fifty megabytes.
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from typing import BinaryIO, cast

import orjson

from ...core.errors import DataError
from .row_file import Columns, FileBytes, RowError, exact_json, why_not_json

MAX_LINE_BYTES = 64 << 20
BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_COMMA = re.compile(r"[ \t\r\n]*,[ \t\r\n]*")
_end_of = json.JSONDecoder().raw_decode


class JsonlFile:
    """Rows are the lines that are not blank, or the elements of the array; a row's number does not change when another
    is mended."""

    def __init__(self, path: str) -> None:
        """Index the file. Raises DataError if it holds no rows or is a broken array, OSError if it cannot be read."""
        self._path = path
        self._bytes = FileBytes(path)
        self._offsets = array("q")
        self._sizes = array("q")
        self._lines = array("q")
        with self._bytes.naming_damage(), self._bytes.stream() as file:
            self.is_array = _first_mark(file) == b"["
        with self._bytes.naming_damage(), self._bytes.stream() as file:
            if self.is_array:
                _ArrayIndex(file, path).fill(self._offsets, self._sizes, self._lines)
            else:
                self._index_lines(file)
        if not self._offsets:
            raise DataError(f"{path}: the file holds no rows", remedy="write one JSON object per line")

    def _index_lines(self, file: BinaryIO) -> None:
        offset = 0
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            size = len(line)
            is_blank = not line.strip()
            while not line.endswith(b"\n"):  # an over-long line, or the last one; the former is refused when read
                line = file.readline(MAX_LINE_BYTES)
                if not line:
                    break
                size += len(line)
            if not is_blank or size > MAX_LINE_BYTES:
                self._offsets.append(offset)
                self._sizes.append(size)
                self._lines.append(number)
            offset += size

    @property
    def num_rows(self) -> int:
        return len(self._offsets)

    @property
    def is_random(self) -> bool:
        return not self._bytes.packing

    def place(self, row: int) -> str:
        return f"{self._path}:{self._lines[row]}"

    def close(self) -> None:
        self._bytes.close()

    def text(self, row: int) -> bytes:
        """The line without its end. Raises RowError if it is longer than a line may be."""
        size = self._sizes[row]
        if size > MAX_LINE_BYTES:
            raise RowError(
                f"the line has {size} bytes, the limit is {MAX_LINE_BYTES}",
                "is the file one JSON value without line ends?",
            )
        return self._bytes.read_at(self._offsets[row], size).rstrip(b"\r\n")

    def read(self, row: int) -> Columns:
        text = self.text(row)
        if row == 0:
            text = text.removeprefix(BOM)
        try:
            value: object = exact_json(text)
        except orjson.JSONDecodeError as error:
            raise why_not_json(text, error) from error
        if isinstance(value, dict):
            return cast("Columns", value)
        if self.is_array:
            raise RowError(f"the array holds {_kind(value)}, not a JSON object", "write an array of objects")
        raise RowError(f"the line holds {_kind(value)}, not a JSON object", "write one object per line")


class _ArrayIndex:
    """Finds the elements of one JSON array, a piece of the file at a time."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file = file
        self._path = path
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._text = ""
        self._at = 0
        """In `_text`."""
        self._offset = 0
        """In the file, of the character at `_at`."""
        self._line = 1
        self._is_all = False

    def fill(self, offsets: array[int], sizes: array[int], lines: array[int]) -> None:
        """Raises DataError for what is not one array of values."""
        self._read_on(CHUNK_BYTES)
        if self._text.startswith("\ufeff"):
            self._advance(1)
        self._expect("[")
        while self._has_next(is_first=not offsets):
            line, offset = self._line, self._offset
            self._value()
            offsets.append(offset)
            sizes.append(self._offset - offset)
            lines.append(line)
        self._expect("]")
        if self._peek():
            raise self._wrong("there is text after the end of the JSON array", "write one array, or JSONL")

    def _has_next(self, *, is_first: bool) -> bool:
        """Go to the next element, if there is one."""
        comma = None if is_first else _COMMA.match(self._text, self._at)
        if comma is not None and comma.end() < len(self._text):
            self._advance(comma.end() - self._at)
            return True
        if self._peek() == "]":
            return False
        if not is_first:
            self._expect(",")
            self._peek()
        return True

    def _peek(self) -> str:
        """The next character that is no white space; empty at the end of the file."""
        while True:
            self._advance(_SPACE.match(self._text, self._at).end() - self._at)  # pyright: ignore[reportOptionalMemberAccess]
            if self._at < len(self._text) or self._is_all:
                return self._text[self._at : self._at + 1]
            self._read_on(CHUNK_BYTES)

    def _expect(self, mark: str) -> None:
        found = self._peek()
        if found != mark:
            what = f"there is {found!r} where {mark!r} was expected" if found else "the JSON array is cut off"
            raise self._wrong(what, "mend the file" if found else "copy or write it again")
        self._advance(1)

    def _value(self) -> None:
        size = CHUNK_BYTES
        while True:
            try:
                end = _end_of(self._text, self._at)[1]
                if end < len(self._text) or self._is_all:
                    return self._advance(end - self._at)
            except RecursionError as error:
                raise self._wrong("the JSON is nested too deeply", "store what is deep as text") from error
            except json.JSONDecodeError as error:
                if self._is_all or len(self._text) - self._at > MAX_LINE_BYTES:
                    self._advance(min(error.pos, len(self._text)) - self._at)
                    if self._is_all and (error.msg.startswith("Unterminated") or not self._text[self._at :].strip()):
                        raise self._wrong("the JSON array is cut off", "copy or write it again") from error
                    raise self._wrong(f"the array is not JSON: {error.msg}", "mend the file") from error
            self._read_on(size)  # it may end in the next piece
            size *= 2

    def _advance(self, num_characters: int) -> None:
        passed = self._text[self._at : self._at + num_characters]
        self._offset += len(passed) if passed.isascii() else len(passed.encode())
        self._line += passed.count("\n")
        self._at += num_characters

    def _read_on(self, size: int) -> None:
        data = self._file.read(size)
        self._is_all = not data
        try:
            self._text, self._at = self._text[self._at :] + self._decode(data, final=self._is_all), 0
        except UnicodeDecodeError as error:
            raise self._wrong("the text after this line is not UTF-8", "save the file as UTF-8") from error

    def _wrong(self, cause: str, remedy: str) -> DataError:
        return DataError(f"{self._path}:{self._line}: {cause}", remedy=remedy)


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
