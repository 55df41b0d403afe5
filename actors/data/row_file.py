"""A data file as numbered rows, whatever its format; what can be wrong with one row; JSON as it was written.

Library: orjson parses; its value is taken when it writes back to the same keys and numbers. What does not is parsed
once more by Python's decoder, which sees the text of each number and every key.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, Protocol

import orjson

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


class RowFile(Protocol):
    """Rows of one file, or of several that are read as one, in file order."""

    @property
    def num_rows(self) -> int: ...

    @property
    def is_random(self) -> bool:
        """Whether any row can be read at any time; else rows are read forward, and going back costs a new start."""
        ...

    def read(self, row: int) -> Columns:
        """The columns of a row. Raises RowError, DataError if the file cannot be read on from there."""
        ...

    def place(self, row: int) -> str:
        """Where a row stands, for messages: `file:line`."""
        ...

    def close(self) -> None:
        """Let go of the file and of what is kept of it in memory; the next `read` opens it again."""
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
    """Whether both have the same numbers and as many strings: then no key was dropped and no number rounded."""
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
