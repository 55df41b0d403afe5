"""Dumps of finished groups: files with their tokens, written from a ledger, live or not, and read as data (`recorded`).

    {"format": "myxa-groups/2", "run": ...}
    {"group_id": ..., "state": ..., "step": ..., "attempt": ..., "rollout": ..., "group": {...}}

`group` is a `core.samples.Group`; arrays are lists of numbers, and floats have all their digits. safetensors was
considered: texts, rewards and states would need a second file beside it.
"""

from __future__ import annotations

import os
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import numpy as np

from ...core.errors import DataError
from ...core.messages import Record
from ...core.samples import Group
from ..ledger.file import whole_groups

FORMAT = "myxa-groups/2"
MAX_HEADER_BYTES = 1 << 20


class DumpHeader(Record, frozen=True):
    """First line."""

    format: str
    run: str


class DumpedGroup(Record, frozen=True):
    """Any other line; the names are those of the ledger."""

    group_id: int
    state: str
    step: int
    attempt: int
    rollout: str
    group: Group


def _list_of(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} cannot be dumped")


def _array_of(kind: Any, value: Any) -> Any:
    """The numbers as written. Raises ValueError, to which the decoder adds the place in the line."""
    dtype = np.dtype(get_args(get_args(kind)[1])[0])
    listed = cast("list[object]", value if isinstance(value, list) else [None])
    is_float = dtype.kind == "f"
    if not set(map(type, listed)) <= ({int, float} if is_float else {int}):
        raise ValueError(f"is no list of {'numbers' if is_float else 'whole numbers'}")
    try:
        with np.errstate(over="ignore"):  # infinite then, which users of the array check for
            return np.asarray(listed, dtype=dtype)
    except OverflowError as err:
        raise ValueError(f"holds a number that {dtype} has no room for") from err


_encoder = msgspec.json.Encoder(enc_hook=_list_of)
_header = msgspec.json.Decoder(DumpHeader)
_group = msgspec.json.Decoder(DumpedGroup, dec_hook=_array_of)


def write_dump(ledger: Path, path: Path, run: str) -> int:
    """Write the groups whose tokens the ledger has, as of one moment, to a new file; returns how many. What was begun
    is removed after an error. Raises DataError if the file is there already or cannot be written, LedgerError if the
    ledger cannot be read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as err:
        raise DataError(f"{path} cannot be written: {err.strerror}", remedy="name another file") from err
    num_groups = 0
    try:
        with os.fdopen(descriptor, "wb") as file, closing(whole_groups(ledger)) as found:
            file.write(_encoder.encode(DumpHeader(format=FORMAT, run=run)) + b"\n")
            for row, group in found:
                told = {name: getattr(row, name) for name in ("group_id", "step", "attempt", "rollout")}
                file.write(_encoder.encode(DumpedGroup(state=str(row.state), group=group, **told)) + b"\n")
                num_groups += 1
    except BaseException as err:
        with suppress(OSError):
            path.unlink()
        if isinstance(err, OSError):
            raise DataError(f"{path} cannot be written: {err.strerror}", remedy="is the disk full?") from err
        raise
    return num_groups


def read_header(path: Path) -> DumpHeader:
    """The first line. Raises DataError if the file is no dump."""
    try:
        with path.open("rb") as file:
            header = _header.decode(file.readline(MAX_HEADER_BYTES))
    except (OSError, ValueError, RecursionError) as err:
        raise DataError(f"{path} is no dump of groups: {err}", remedy="name a file that `myxa dump` wrote") from err
    if header.format != FORMAT:
        raise DataError(
            f"{path} has the format {header.format!r}, this version reads {FORMAT!r}", remedy="write a new one"
        )
    return header


def group_of(line: bytes) -> DumpedGroup:
    """What any line but the first says. Raises ValueError saying what is wrong with it, and where in it."""
    try:
        return _group.decode(line)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err
