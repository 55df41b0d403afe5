"""Dumps of groups: one JSON object a line, first a header, then a group each; whoever has `jq` can read them.

    {"format": "myxa-groups/1", "run": ..., "what": "buffer" | "next", "version": ..., "wall_s": ...}
    {"group_id": ..., "state": ..., "attempt": ..., "rollout": ..., "version": ..., "step": ..., "draw": ...,
     "num_samples": ..., "terms": {"knobs": ..., "sampling": {...}} | null, "group": {...} | null, "partial": [...]}

`group` is a finished group (`core.samples.Group`), `partial` the unfinished samples of one that is not; arrays are
lists of numbers, and floats have all their digits, so that what is read back is what was written. A group that an
engine works on for the first time has neither: its tokens are there. Written with the standard JSON encoder of msgspec;
safetensors was considered and not used, since texts, rewards and states would need a second file beside it.

Knows records and one file. Must not know the ledger or actors.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import numpy as np

from ...core.errors import DataError
from ...core.messages import Record
from ...core.samples import Group, Sample
from .settings import Terms

FORMAT = "myxa-groups/1"
MAX_HEADER_BYTES = 1 << 20
SPARE_BYTES = 1 << 30
"""Left free on the disk: the ledger lies there too, and the run ends when it cannot be written."""


class DumpHeader(Record, frozen=True):
    """First line."""

    format: str
    run: str
    what: str
    """"buffer": all that was not trained yet; "next": groups as they were claimed."""
    version: int
    """The newest that was trained."""
    wall_s: float


class DumpedGroup(Record, frozen=True):
    """Any other line; the names are those of the ledger."""

    group_id: int
    state: str
    attempt: int
    rollout: str
    version: int
    step: int
    draw: int
    num_samples: int
    terms: Terms | None = None
    group: Group | None = None
    partial: tuple[Sample, ...] = ()


def _list_of(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} cannot be dumped")


def _array_of(kind: Any, value: Any) -> Any:
    """Every number as it stands there. Raises ValueError, which the decoder gives a place in the line."""
    dtype = np.dtype(get_args(get_args(kind)[1])[0])
    listed = cast("list[object]", value if isinstance(value, list) else [None])
    is_float = dtype.kind == "f"
    if not set(map(type, listed)) <= ({int, float} if is_float else {int}):
        raise ValueError(f"is no list of {'numbers' if is_float else 'whole numbers'}")
    try:
        with np.errstate(over="ignore"):  # infinite then, which whoever uses it looks for
            return np.asarray(listed, dtype=dtype)
    except OverflowError as err:
        raise ValueError(f"holds a number that {dtype} has no room for") from err


_encoder = msgspec.json.Encoder(enc_hook=_list_of)
_header = msgspec.json.Decoder(DumpHeader)
_group = msgspec.json.Decoder(DumpedGroup, dec_hook=_array_of)


class DumpWriter:
    """A dump that is being written. Blocks: for threads."""

    def __init__(self, path: Path, header: DumpHeader, max_bytes: int) -> None:
        """Raises DataError if the file cannot be made, or is there already."""
        self.path = path
        self.num_groups = 0
        self.num_bytes = 0
        self.full = ""
        """Why no more groups go into it; empty: they do."""
        self._max_bytes = max_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as err:
            raise DataError(f"{path} cannot be written: {err}", remedy="is the run directory writable?") from err
        self._file = os.fdopen(descriptor, "wb")
        self._write(_encoder.encode(header))

    def add(self, line: DumpedGroup) -> bool:
        """One more group; False if it has no room in it (`full`). Raises DataError when the disk refuses."""
        data = _encoder.encode(line)
        if self.num_bytes + len(data) > self._max_bytes:
            self.full = f"the limit of {self._max_bytes:,} bytes is reached"
        elif shutil.disk_usage(self.path.parent).free < SPARE_BYTES + len(data):
            self.full = f"less than {SPARE_BYTES:,} bytes are free on the disk, which the ledger needs"
        else:
            self._write(data)
            self.num_groups += 1
        return not self.full

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data + b"\n")
            self._file.flush()
        except OSError as err:
            raise DataError(f"{self.path} cannot be written: {err}", remedy="is the disk full?") from err
        self.num_bytes += len(data) + 1

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()


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


def read_groups(path: Path) -> Iterator[DumpedGroup]:
    """All groups, in order. Raises DataError naming the first bad line."""
    read_header(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                continue
            try:
                yield group_of(line)
            except ValueError as err:
                raise DataError(f"{path}, line {number}: {err}", remedy="was it cut off?") from err


def group_of(line: bytes) -> DumpedGroup:
    """What any line but the first says. Raises ValueError saying what is wrong with it, and where in it."""
    try:
        return _group.decode(line)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err
