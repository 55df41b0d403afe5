"""What a restarted coordinator must know and no other actor can report: a small file in the run directory.

    coordinator.journal     digest of the rest, end of line, one JSON record

The file is replaced as a whole and made durable before its content takes effect, by one writer at a time; a write
completes even if its caller is gone. Knobs are in the audit log; everything else (the trainer's version, what engines
serve) the actors report. A journal of an earlier launch in the same directory is not used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.actor import ActorContext
from ...core.clock import Clock
from ...core.errors import ConfigError, LedgerError, MyxaError
from ...core.files import Tell, read_regular, until_written, write_durably
from ...core.messages import Record
from ..daemon_thread import in_daemon_thread
from .options import CoordinatorOptions
from .run_state import RunState

JOURNAL_FILE = "coordinator.journal"
MAX_BYTES = 64 << 20
_DIGEST_BYTES = 32


class Kept(Record, frozen=True):
    """All of it."""

    launch: str
    """Names the launcher of this run: another one's journal is no word of this run."""
    run: RunState = msgspec.field(default_factory=RunState)


class CoordinatorJournal:
    """See the module's head. Cheap to make; holds nothing open."""

    def __init__(self, path: Path, launch: str) -> None:
        self.path = path
        self.launch = launch
        self.make: Callable[[], Kept] = lambda: Kept(launch=launch)
        """What is to be kept now; set by the owner."""
        self.tell: Tell = lambda kind, text: None
        """Of a disk that refuses; set by the owner."""
        self._turn = asyncio.Lock()
        self._writing: set[asyncio.Task[None]] = set()

    def load(self) -> tuple[Kept | None, str]:
        """What an earlier incarnation kept, or None and why there is nothing (empty for a first start). Blocking.
        Raises ConfigError, since nothing that is tried again mends it, for a file that is not as it was written."""
        try:
            data = read_regular(self.path, MAX_BYTES)
        except FileNotFoundError:
            return None, ""
        except OSError as error:
            raise self._damage(error.strerror or str(error)) from error
        digest, _, body = data.partition(b"\n")
        if digest != _digest(body):
            raise self._damage("its digest does not fit")
        try:
            kept = msgspec.json.decode(body, type=Kept)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._damage(str(error)) from error
        if kept.launch != self.launch:
            return None, f"{self.path} was written under another launcher: it is not used"
        return kept, ""

    async def keep(self) -> None:
        """What `make` gives is durable once this returns. Raises LedgerError when it cannot be written; then the file
        is unchanged. If the caller is cancelled, the write still completes, and the next one begins after it."""
        task = asyncio.get_running_loop().create_task(self._write(), name="coordinator journal")
        self._writing.add(task)
        task.add_done_callback(self._written)
        await asyncio.shield(task)

    async def until_kept(self) -> None:
        """As `keep`, but while the disk refuses, it is tried again."""
        await until_written(self.keep, path=self.path, tell=self.tell)

    async def _write(self) -> None:
        async with self._turn:
            body = msgspec.json.encode(self.make())
            data = _digest(body) + b"\n" + body
            try:
                await in_daemon_thread(lambda: write_durably(self.path, data, 0o600), "journal")
            except OSError as error:
                raise LedgerError(
                    f"{self.path}: {error.strerror or error}", remedy="check disk and rights of the run directory"
                ) from error

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writing.discard(task)
        if not task.cancelled():
            task.exception()  # raised to the callers that wait; without any, it is dropped

    def _damage(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.path} cannot be used: {what}",
            remedy="the run cannot continue without it; `myxa resume` continues from the last checkpoint",
        )


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).hexdigest().encode()


KEEP_S = 10.0
"""Limit for a journal write that the run does not depend on."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all parts of the coordinator work with."""

    ctx: ActorContext
    options: CoordinatorOptions
    clock: Clock
    meter: ActivityMeter
    telemetry: TelemetryBuffer
    journal: CoordinatorJournal
    state: RunState

    def version(self) -> int:
        return self.state.known_version

    def tell(self, kind: str, text: str, **data: object) -> None:
        """An event."""
        self.ctx.log.info("%s: %s", kind, text)
        self.telemetry.event(kind, text, **data)

    async def keep(self) -> None:
        """Write the journal. A disk that refuses or hangs is reported, and tried again with the next change."""
        try:
            await self.keep_in_time()
        except MyxaError as error:
            self.tell("journal-not-written", str(error))

    async def keep_in_time(self) -> None:
        """As the journal's `keep`; raises LedgerError also for a disk that hangs. The write continues."""
        try:
            async with asyncio.timeout(KEEP_S):
                await self.journal.keep()
        except TimeoutError:
            why = f"{self.journal.path}: not written within {KEEP_S:g} s"
            raise LedgerError(why, remedy="check the disk of the run directory") from None
