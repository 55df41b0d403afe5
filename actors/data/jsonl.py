"""JSONL: one JSON object per line. Lines are indexed once and read when they are needed; the text stays on disk.

Library: orjson parses; `datasets` was considered and brings a cache, a download layer and fifty megabytes.
"""

from __future__ import annotations

import os
import weakref
from array import array
from pathlib import Path
from typing import cast

import orjson

from ...core.errors import DataError
from .row_file import Columns, RowError, exact_json

MAX_LINE_BYTES = 64 << 20
BOM = b"\xef\xbb\xbf"


class JsonlFile:
    """Rows are the lines that are not blank; a row's number does not change when another line is mended."""

    def __init__(self, path: str) -> None:
        """Index the file. Raises DataError if it holds no rows, OSError if it cannot be read."""
        self._path = path
        self._offsets = array("q")
        self._sizes = array("q")
        self._lines = array("q")
        self._index()
        if not self._offsets:
            raise DataError(f"{path}: the file holds no rows", remedy="write one JSON object per line")
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    def _index(self) -> None:
        offset = 0
        number = 0
        with Path(self._path).open("rb") as file:
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

    def place(self, row: int) -> str:
        return f"{self._path}:{self._lines[row]}"

    def text(self, row: int) -> bytes:
        """The line without its end. Raises RowError if it is longer than a line may be."""
        size = self._sizes[row]
        if size > MAX_LINE_BYTES:
            raise RowError(
                f"the line has {size} bytes, the limit is {MAX_LINE_BYTES}",
                "is the file one JSON value without line ends?",
            )
        return os.pread(self._fd, size, self._offsets[row]).rstrip(b"\r\n")

    def read(self, row: int) -> Columns:
        text = self.text(row)
        try:
            value: object = exact_json(text.removeprefix(BOM) if row == 0 else text)
        except orjson.JSONDecodeError as error:
            raise _not_json(text, error) from error
        if isinstance(value, dict):
            return cast("Columns", value)
        hint = "write one object per line"
        if self.num_rows == 1 and text.lstrip().startswith(b"["):
            hint = "the file is one JSON array; " + hint
        raise RowError(f"the line holds {_kind(value)}, not a JSON object", hint)


def _not_json(text: bytes, error: orjson.JSONDecodeError) -> RowError:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as not_text:
        return RowError(f"the line is not UTF-8 (byte {not_text.start + 1} of it)", "save the file as UTF-8")
    if text.strip() in (b"[", b"{"):
        return RowError("the JSON goes over several lines", "write one object per line (`jq -c .` does it)")
    return RowError(f"the line is not JSON from column {error.colno} on", "mend the line")


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
