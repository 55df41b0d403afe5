"""The base of control-plane records, and how a field of one says what it is for."""

from __future__ import annotations

from typing import Any

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unknown fields are refused, types are checked when a record is decoded."""


def argument(
    help: str,
    metavar: str = "",
    *,
    flag: str | None = None,
    short: str = "",
    is_word: bool = False,
    is_time: bool = False,
    **limits: Any,
) -> msgspec.Meta:
    """For `Annotated`: a field that a person may give. The command line takes it as `flag` (None: by the field's name;
    empty: not by a flag of its own), or by position (`is_word`), and reads 60s or 5min (`is_time`). `limits`: of
    msgspec, such as ge=1."""
    way = {"metavar": metavar, "flag": flag, "short": short, "is_word": is_word, "is_time": is_time}
    return msgspec.Meta(description=help, extra=way, **limits)
