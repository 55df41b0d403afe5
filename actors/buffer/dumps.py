"""Dumps that the buffer writes beside its work: all that is not trained yet, or the next groups that are claimed.

Files are written in a thread, from the ledger itself, so that neither the loop nor the ledger waits. Nothing a dump
does can hurt the run: when it fails, that is told. Knows the ledger's file and the run directory; takes no path from
anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import msgspec

from ...core.clock import Clock
from ...core.errors import BadRequest, MyxaError
from ...core.messages import DumpReport
from ..ledger.payload import decode_group, decode_partial
from ..ledger.snapshot import Entry, entries_in, entries_of
from ..ledger.states import State
from ..own_thread import in_own_thread
from .group_dump import FORMAT, DumpedGroup, DumpHeader, DumpWriter
from .settings import Terms

FOLDER = "dumps"
MAX_NAMES = 10_000
MAX_GROUPS = 1_000_000
KEPT_REPORTS = 16
NOT_TRAINED = (State.DISPATCHED, State.REQUEUED, State.READY, State.CLAIMED)


class _Next:
    """A dump of the groups to come."""

    def __init__(self, writer: DumpWriter, num_groups: int) -> None:
        self.writer = writer
        self.num_left = num_groups


class BufferDumps:
    """See the module's head. Made on the buffer's loop."""

    def __init__(
        self,
        ledger_path: Path,
        run: str,
        *,
        version: Callable[[], int],
        spawn: Callable[..., object],
        tell: Callable[[str, str], None],
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        """`version`: the newest that was trained. `spawn(coroutine, name=)` makes a task of the actor."""
        self._ledger_path = ledger_path
        self._run = run
        self._version = version
        self._spawn = spawn
        self._tell = tell
        self._clock = clock
        self._log = log
        self._writing = asyncio.Lock()
        self._next: _Next | None = None
        self._reports: deque[DumpReport] = deque(maxlen=KEPT_REPORTS)

    # ---- all that is there

    async def whole(self, max_bytes: int) -> DumpReport:
        """Groups that were not trained yet, as of one moment. Raises DataError or LedgerError."""
        writer = self._open("buffer", max_bytes)
        try:
            await in_own_thread(lambda: _write(writer, entries_in(self._ledger_path, NOT_TRAINED)), "dump")
        finally:
            writer.close()
        report = _report(writer, is_whole=not writer.full, reason=writer.full)
        self._reports.append(report)
        self._tell("dumped", f"{report.num_groups} groups, {report.num_bytes:,} bytes in {report.path} {report.reason}")
        return report

    # ---- what comes

    async def begin_next(self, num_groups: int, max_bytes: int) -> DumpReport:
        """From the next claim on; 0 ends the one that goes on. Raises BadRequest while another one goes on, DataError
        for an unwritable folder."""
        if num_groups == 0:
            async with self._writing:  # what was claimed before is written first
                if self._next is not None:
                    return self._end(self._next, "ended by request")
        if self._next is not None:
            raise BadRequest(
                f"{self._next.writer.path} waits for {self._next.num_left} more groups",
                remedy="wait for it, or ask for 0 groups to end it",
            )
        if not 0 < num_groups <= MAX_GROUPS:
            raise BadRequest(f"{num_groups} groups cannot be dumped", remedy=f"ask for 1 to {MAX_GROUPS}")
        self._next = _Next(self._open("next", max_bytes), num_groups)
        return _report(self._next.writer, is_whole=False, reason=f"waits for {num_groups} groups")

    def claimed(self, group_ids: Sequence[int]) -> None:
        """A batch was formed."""
        if (wanted := self._next) is None:
            return
        ids = group_ids[: wanted.num_left]
        wanted.num_left -= len(ids)
        self._spawn(self._add(wanted, ids, is_last=not wanted.num_left), name="dump-next")

    async def _add(self, wanted: _Next, group_ids: Sequence[int], *, is_last: bool) -> None:
        async with self._writing:
            if self._next is not wanted:
                return
            try:
                await in_own_thread(lambda: _write(wanted.writer, entries_of(self._ledger_path, group_ids)), "dump")
            except MyxaError as err:
                self._log.warning("dump: %s", err)
                self._end(wanted, str(err))
                return
            if is_last or wanted.writer.full:
                self._end(wanted, wanted.writer.full)

    def _end(self, wanted: _Next, reason: str) -> DumpReport:
        self._next = None
        wanted.writer.close()
        report = _report(wanted.writer, is_whole=not reason, reason=reason)
        self._reports.append(report)
        self._tell("dumped", f"{report.num_groups} groups, {report.num_bytes:,} bytes in {report.path} {reason}")
        return report

    def close(self) -> None:
        """The buffer ends."""
        if self._next is not None:
            self._next.writer.close()

    # ---- all of them

    def reports(self) -> tuple[DumpReport, ...]:
        """The newest dumps, oldest first."""
        going_on = self._next
        if going_on is None:
            return tuple(self._reports)
        waits = f"waits for {going_on.num_left} more groups"
        return (*self._reports, _report(going_on.writer, is_whole=False, reason=waits))

    def _open(self, what: str, max_bytes: int) -> DumpWriter:
        version, folder = self._version(), self._ledger_path.parent / FOLDER
        header = DumpHeader(format=FORMAT, run=self._run, what=what, version=version, wall_s=self._clock.wall())
        for number in range(1, MAX_NAMES):
            path = folder / f"{what}-v{version}-{number}.jsonl"
            if not path.exists():
                return DumpWriter(path, header, max_bytes)
        raise BadRequest(f"{folder} holds {MAX_NAMES} dumps of version {version}", remedy="delete some")


def _write(writer: DumpWriter, entries: Generator[Entry]) -> None:
    with contextlib.closing(entries):  # here: SQLite wants to be closed by the thread that opened it
        for entry in entries:
            if not writer.add(_line(entry)):
                return


def _line(entry: Entry) -> DumpedGroup:
    row = entry.row
    data, group_id = entry.payload, row.group_id
    return DumpedGroup(
        group_id=group_id,
        state=str(row.state),
        attempt=row.attempt,
        rollout=row.rollout,
        version=row.version,
        step=row.step,
        draw=row.draw,
        num_samples=row.num_samples,
        terms=msgspec.json.decode(entry.terms, type=Terms) if entry.terms else None,
        group=decode_group(group_id, data) if data is not None and entry.is_whole else None,
        partial=decode_partial(group_id, data) if data is not None and not entry.is_whole else (),
    )


def _report(writer: DumpWriter, *, is_whole: bool, reason: str = "") -> DumpReport:
    return DumpReport(
        path=str(writer.path),
        num_groups=writer.num_groups,
        num_bytes=writer.num_bytes,
        is_whole=is_whole,
        reason=reason,
    )
