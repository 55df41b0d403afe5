"""Dumps of groups that the buffer writes beside its work: all that is not trained yet, or the next that are claimed.

    {"format": "myxa-groups/1", "run": ..., "what": "buffer" | "next", "version": ..., "wall_s": ...}
    {"group_id": ..., "state": ..., "attempt": ..., "rollout": ..., "version": ..., "step": ..., "draw": ...,
     "num_samples": ..., "terms": {"knobs": ..., "sampling": {...}} | null, "group": {...} | null, "partial": [...]}

`group` is a finished group (`core.samples.Group`), `partial` the unfinished samples of one that is not; arrays are
lists of numbers, and floats have all their digits. A group that an engine works on for the first time has neither: its
tokens are there. safetensors was considered: texts, rewards and states would need a second file beside it.

Files are written in a thread, from the ledger itself. A dump that fails is reported and does not hurt the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec
import numpy as np

from ...core.actor import ActorContext
from ...core.errors import BadRequest, DataError, MyxaError
from ...core.messages import DumpReport, Record
from ...core.samples import Group, Sample
from ..daemon_thread import in_daemon_thread
from ..ledger.file import entries
from ..ledger.states import Row, State, Terms

FOLDER = "dumps"
MAX_NAMES = 10_000
MAX_GROUPS = 1_000_000
KEPT_REPORTS = 16
NOT_TRAINED = (State.DISPATCHED, State.REQUEUED, State.READY, State.CLAIMED)
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


_OF_ROW = DumpedGroup.__struct_fields__[:-3]


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

    def report(self, reason: str) -> DumpReport:
        """`reason`: why it is not whole; empty: it is."""
        return DumpReport(
            path=str(self.path),
            num_groups=self.num_groups,
            num_bytes=self.num_bytes,
            is_whole=not reason,
            reason=reason,
        )

    def close(self) -> None:
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


def group_of(line: bytes) -> DumpedGroup:
    """What any line but the first says. Raises ValueError saying what is wrong with it, and where in it."""
    try:
        return _group.decode(line)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err


class BufferDumps:
    """See the module's head. Made on the buffer's loop."""

    def __init__(self, ledger_path: Path, run: str, ctx: ActorContext, tell: Callable[[str, str], None]) -> None:
        """`tell` (kind, text): of events."""
        self._ledger_path = ledger_path
        self._run = run
        self._ctx = ctx
        self._tell = tell
        self._writing = asyncio.Lock()
        self._next: DumpWriter | None = None
        """Of the groups that are claimed next."""
        self._num_left = 0
        """Groups that it waits for."""
        self._reports: deque[DumpReport] = deque(maxlen=KEPT_REPORTS)

    async def whole(self, version: int, max_bytes: int) -> DumpReport:
        """Groups that were not trained yet, as of one moment. `version`: the newest that was trained. Raises DataError
        or LedgerError."""
        writer = self._open("buffer", version, max_bytes)
        try:
            await self._write(writer, NOT_TRAINED, of="state")
        finally:
            writer.close()
        return self._told(writer, writer.full)

    async def begin_next(self, version: int, num_groups: int, max_bytes: int) -> DumpReport:
        """From the next claim on; 0 ends the running dump. Raises BadRequest while another one runs, DataError for an
        unwritable folder."""
        if num_groups == 0:
            async with self._writing:  # what was claimed before is written first
                if self._next is not None:
                    return self._end(self._next, "ended by request")
        if self._next is not None:
            raise BadRequest(
                f"{self._next.path} waits for {self._num_left} more groups",
                remedy="wait for it, or ask for 0 groups to end it",
            )
        if not 0 < num_groups <= MAX_GROUPS:
            raise BadRequest(f"{num_groups} groups cannot be dumped", remedy=f"ask for 1 to {MAX_GROUPS}")
        self._next, self._num_left = self._open("next", version, max_bytes), num_groups
        return self._next.report(f"waits for {num_groups} groups")

    def claimed(self, group_ids: Sequence[int]) -> None:
        if self._next is not None:
            ids = group_ids[: self._num_left]
            self._num_left -= len(ids)
            self._ctx.spawn(self._add(self._next, ids, is_last=not self._num_left), name="dump-next")

    async def _add(self, writer: DumpWriter, group_ids: Sequence[int], *, is_last: bool) -> None:
        async with self._writing:
            if self._next is not writer:
                return
            try:
                await self._write(writer, group_ids, of="group_id")
            except MyxaError as err:
                self._ctx.log.warning("dump: %s", err)
                self._end(writer, str(err))
                return
            if is_last or writer.full:
                self._end(writer, writer.full)

    def _end(self, writer: DumpWriter, reason: str) -> DumpReport:
        self._next = None
        writer.close()
        return self._told(writer, reason)

    def _told(self, writer: DumpWriter, reason: str) -> DumpReport:
        report = writer.report(reason)
        self._reports.append(report)
        self._tell("dumped", f"{report.num_groups} groups, {report.num_bytes:,} bytes in {report.path} {reason}")
        return report

    def close(self) -> None:
        if self._next is not None:
            self._next.close()

    def reports(self) -> tuple[DumpReport, ...]:
        running = [] if self._next is None else [self._next.report(f"waits for {self._num_left} more groups")]
        return (*self._reports, *running)

    def _open(self, what: str, version: int, max_bytes: int) -> DumpWriter:
        folder, wall_s = self._ledger_path.parent / FOLDER, self._ctx.clock.wall()
        header = DumpHeader(format=FORMAT, run=self._run, what=what, version=version, wall_s=wall_s)
        for number in range(1, MAX_NAMES):
            path = folder / f"{what}-v{version}-{number}.jsonl"
            if not path.exists():
                return DumpWriter(path, header, max_bytes)
        raise BadRequest(f"{folder} holds {MAX_NAMES} dumps of version {version}", remedy="delete some")

    async def _write(
        self, writer: DumpWriter, values: Sequence[State] | Sequence[int], *, of: Literal["state", "group_id"]
    ) -> None:
        def write() -> None:
            # Closed here: SQLite wants that by the thread that opened it.
            with contextlib.closing(entries(self._ledger_path, values, of=of)) as found:
                all(writer.add(_line_of(*entry)) for entry in found)

        await in_daemon_thread(write, "dump")


def _line_of(row: Row, terms: Terms | None, group: Group | None, partial: tuple[Sample, ...]) -> DumpedGroup:
    told: dict[str, Any] = {name: getattr(row, name) for name in _OF_ROW}
    told["state"] = str(row.state)
    return DumpedGroup(**told, terms=terms, group=group, partial=partial)
