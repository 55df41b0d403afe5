"""JSON rows: one object per line (JSONL), or one array of objects.

Library: orjson parses; `datasets` was considered and brings a cache, a download layer and fifty megabytes.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, cast

import orjson

from ...core.errors import DataError
from .row_file import Columns, FileBytes, Row, RowError, exact_json, why_not_json

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
        """Look at its beginning. Raises OSError, DataError if it cannot be unpacked."""
        self._path = path
        self._bytes = FileBytes(path)
        with self._bytes.naming_damage(), self._bytes.stream() as file:
            self._is_array = _first_mark(file) == b"["

    @property
    def num_rows(self) -> int:
        return sum(1 for _ in self._texts())

    def rows(self) -> Iterator[Row]:
        for line, text, size in self._texts():
            yield f"{self._path}:{line}", partial(self._read, text, size)

    def _texts(self) -> Iterator[tuple[int, bytes, int]]:
        """Line, text and number of bytes of each row; the text of a line that is too long is cut."""
        with self._bytes.naming_damage(), self._bytes.stream() as file:
            yield from _ArrayTexts(file, self._path).texts() if self._is_array else _line_texts(file)

    def _read(self, text: bytes, size: int) -> Columns:
        if size > MAX_LINE_BYTES and not self._is_array:
            raise RowError(
                f"the line has {size} bytes, the limit is {MAX_LINE_BYTES}",
                "is the file one JSON value without line ends?",
            )
        try:
            value: object = exact_json(text)
        except orjson.JSONDecodeError as error:
            raise why_not_json(text, error) from error
        if isinstance(value, dict):
            return cast("Columns", value)
        if self._is_array:
            raise RowError(f"the array holds {_kind(value)}, not a JSON object", "write an array of objects")
        raise RowError(f"the line holds {_kind(value)}, not a JSON object", "write one object per line")


def _line_texts(file: BinaryIO) -> Iterator[tuple[int, bytes, int]]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        text, size = line.rstrip(b"\r\n"), len(line)
        text = text.removeprefix(BOM) if number == 1 else text
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
            size += len(line)
        if text.strip() or size > MAX_LINE_BYTES:
            yield number, text, size


class _ArrayTexts:
    """The elements of one JSON array, a piece of the file at a time."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file = file
        self._path = path
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._text = ""
        self._at = 0
        """In `_text`."""
        self._line = 1
        self._is_all = False

    def texts(self) -> Iterator[tuple[int, bytes, int]]:
        """Raises DataError for what is not one array of values."""
        self._read_on(CHUNK_BYTES)
        if self._text.startswith("\ufeff"):
            self._advance(1)
        self._expect("[")
        is_first = True
        while self._has_next(is_first=is_first):
            is_first, line = False, self._line
            text = self._value().encode()
            yield line, text, len(text)
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

    def _value(self) -> str:
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

    def _advance(self, num_characters: int) -> str:
        passed = self._text[self._at : self._at + num_characters]
        self._line += passed.count("\n")
        self._at += num_characters
        return passed

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
