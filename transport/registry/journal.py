"""What the registry must not forget when its process dies: which epochs it gave out, to whom, and which are over.

An append-only file of JSON lines, each with a checksum before it. A grant is on the disk before it is answered, so no
epoch is ever given out twice; news of ends and of actors are written as well, but not waited for. A line that was being
written when the machine died is cut off at the next start, and named. Around 300 bytes per process start, a kilobyte
per actor that registers; never rewritten.

SQLite was considered (the ledger of prompts uses it): there is one writer, nothing is looked up by key, a run writes
some hundred lines, and this file can be read with `less` and needs no second file for its own recovery.
"""

from __future__ import annotations

import asyncio
import logging
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ...core.errors import LaunchError
from ...core.files import lock_now, refusal, until_written
from .directory import NodeRecord

_log = logging.getLogger("myxa.transport")

SUM_BYTES: Final = 9
"""Eight hexadecimal digits and a blank before every line."""


class RegistryAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="seat"):
    """Address of the registry: its next incarnation listens there again, so that it is found."""

    node: str
    epoch: int
    socket_dir: str = ""
    tcp: str = ""
    """"host:port" of its control lane; empty: it does not listen on tcp."""


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="known"):
    """An incarnation as it is now; the first entry with its epoch is the grant."""

    record: NodeRecord


class NodeEnded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="over"):
    """An incarnation has ended."""

    node: str
    epoch: int
    reason: str


JournalLine = RegistryAddress | NodeEntry | NodeEnded
_decoder = msgspec.json.Decoder(JournalLine)


class RegistryJournal:
    """Use `open`; one process at a time."""

    def __init__(self, path: Path, descriptor: int, entries: tuple[JournalLine, ...], size: int) -> None:
        self.path = path
        self.entries = entries
        self._descriptor = descriptor
        self._durable_bytes = size
        self._lines: list[bytes] = []
        """Appended and not known to be on the disk."""
        self._num_in_file = 0
        self._is_torn = False
        """An attempt failed: it is unknown which of these lines are in the file."""
        self._num_appended = 0
        self._num_durable = 0
        self._sync: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="myxa-journal")
        self._trouble = ""

    @classmethod
    def open(cls, path: Path) -> RegistryJournal:
        """Open or make it. Raises LaunchError if another process has it, or if it is damaged otherwise than at its
        end: then epochs may be missing, and it is unknown which."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LaunchError(f"registry journal {path}: {error.strerror}", remedy="name another path") from error
        try:
            if not lock_now(descriptor):
                raise LaunchError(f"registry journal {path} is in use", remedy="end the other registry first")
            data = path.read_bytes()
            entries, size = _read(path, data)
            if size < len(data):
                _log.warning("%s: %d bytes of an unfinished line were cut off at byte %d", path, len(data) - size, size)
                os.ftruncate(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        _sync_folder(path)
        return cls(path, descriptor, entries, size)

    @property
    def address(self) -> RegistryAddress | None:
        """Of the registry's last incarnation; None: there was none."""
        return next((entry for entry in reversed(self.entries) if isinstance(entry, RegistryAddress)), None)

    def append(self, entry: JournalLine) -> None:
        """Write it; a process that dies keeps it, a machine that dies may not (see `settle`). While the disk refuses it
        is kept here, and written before all that comes later. Raises LaunchError, also for everything that comes later,
        if it cannot be written for another reason."""
        if self._trouble:
            raise LaunchError(self._trouble, remedy="restart the registry when it can be written again")
        body = msgspec.json.encode(entry)
        self._lines.append(b"%08x %b\n" % (zlib.crc32(body), body))
        self._num_appended += 1
        if not self._is_torn:
            try:
                self._write()
            except OSError as error:
                self._failed(error)

    async def settle(self) -> None:
        """Until all that was appended so far is on the disk, however long that refuses. Those who wait at the same time
        share one fsync. Raises as `append`."""
        wanted = self._num_appended
        while self._num_durable < wanted:
            if self._sync is None:
                self._sync = asyncio.get_running_loop().create_task(self._flush(), name="registry journal")
            await asyncio.shield(self._sync)

    async def _flush(self) -> None:
        try:
            await until_written(self._attempt, path=self.path, tell=lambda _, text: _log.warning("%s", text))
        finally:
            self._sync = None

    async def _attempt(self) -> None:
        try:
            self._write()
            num_lines = self._num_in_file
            await asyncio.get_running_loop().run_in_executor(self._worker, os.fsync, self._descriptor)
        except OSError as error:
            self._failed(error)
            raise
        self._durable_bytes += sum(len(line) for line in self._lines[:num_lines])
        del self._lines[:num_lines]
        self._num_in_file -= num_lines
        self._num_durable += num_lines

    def _write(self) -> None:
        if self._is_torn:
            self._cut()
        for line in self._lines[self._num_in_file :]:
            left = line
            while left:
                left = left[os.write(self._descriptor, left) :]
            self._num_in_file += 1

    def _cut(self) -> None:
        os.ftruncate(self._descriptor, self._durable_bytes)
        self._num_in_file, self._is_torn = 0, False

    def _failed(self, error: OSError) -> None:
        self._is_torn = True
        if refusal(error) is None:
            self._trouble = f"registry journal {self.path} cannot be written: {error.strerror}"
            with suppress(OSError):
                self._cut()
            raise LaunchError(self._trouble, remedy="is the disk broken?") from error

    def close(self) -> None:
        """Write what is left and give the file free. Harmless to call again."""
        if self._descriptor < 0:
            return
        self._worker.shutdown(wait=True)
        if self._lines and not self._trouble:
            with suppress(OSError):  # news of the last moments, while the disk refused
                self._write()
        os.close(self._descriptor)
        self._descriptor = -1


def _read(path: Path, data: bytes) -> tuple[tuple[JournalLine, ...], int]:
    entries: list[JournalLine] = []
    good = 0
    while good < len(data):
        end = data.find(b"\n", good)
        line = data[good:end] if end >= 0 else b""
        if not _is_whole(line):
            break
        try:
            entries.append(_decoder.decode(line[SUM_BYTES:]))
        except msgspec.DecodeError as error:
            raise LaunchError(
                f"registry journal {path}, line {len(entries) + 1}: {error}", remedy="it is of another version of myxa"
            ) from error
        good = end + 1
    later = data[good:].split(b"\n")[1:]
    if any(_is_whole(line) for line in later):
        raise LaunchError(
            f"registry journal {path} is damaged at line {len(entries) + 1}, and continues after it",
            remedy="epochs may be lost: end all processes of the job and start it with a new journal",
        )
    return tuple(entries), good


def _is_whole(line: bytes) -> bool:
    body = line[SUM_BYTES:]
    return bool(body) and line[:SUM_BYTES] == b"%08x " % zlib.crc32(body)


def _sync_folder(path: Path) -> None:
    """A new file's name must be as durable as its content."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
