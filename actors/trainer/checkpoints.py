"""The leader's checkpoints: written while training waits, or (async) while it goes on.

    begin      all ranks copy what they will write; training waits for that only
    written    each rank's files are on its disk, and a copy of the ledger beside them, whenever that is
    finish     at the boundary of a step, all ranks: the folder appears, then the run's part of it
               (`checkpoints/run_part.py`), and only now is the buffer told "durable"

One at a time: the next checkpoint first settles the one before. One that lacks what was decided about the knobs since
is written again, in its place. Knows ranks and buffer by their contracts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.actor import ActorContext
from ...core.actor_group import ActorGroup
from ...core.clock import Clock
from ...core.errors import GatherError, TrainError
from ...core.file_entry import FileEntry
from ...core.knobs import LiveKnobs
from ..checkpoints.folder import GROWING, look_at, read_manifest, sweep, version_in
from ..checkpoints.folder_swap import take_away
from ..checkpoints.run_part import RunPart, is_kept, write_run_part
from ..contracts.roles import TrainerContract
from ..ledger.resume import LEDGER
from .checkpoint_side import RunSide


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Plain settings."""

    run_dir: str
    every: int = 0
    """Steps between two; 0: none."""
    keep_last: int = 2
    """0: all."""
    keep_every: int = 0
    """Of the checkpoints by schedule each one of so many stays for ever; 0: none."""
    at_stop: bool = False
    """Whether a run that is told to stop writes one, also with `every` = 0."""
    origin: tuple[tuple[str, str], ...] = ()
    """What is to be told of where the run goes on from: kinds and texts of events."""
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class _Pending:
    version: int
    folder: Path
    live: LiveKnobs
    begun_at: float
    written: asyncio.Task[FileEntry | TrainError]


class Checkpoints:
    """See the module's head."""

    def __init__(
        self,
        ctx: ActorContext,
        options: CheckpointOptions,
        ranks: ActorGroup[TrainerContract],
        run: RunSide,
        meter: ActivityMeter,
        telemetry: TelemetryBuffer,
        clock: Clock,
    ) -> None:
        """`ranks` fail fast together."""
        self._run = run
        self._ctx = ctx
        self._options = options
        self._ranks = ranks
        self._meter = meter
        self._telemetry = telemetry
        self._clock = clock
        self._pending: _Pending | None = None
        self._newest: tuple[int, LiveKnobs] | None = None
        """Version and knobs that were written last, or are being written."""
        self.every = options.every
        """Live: steps between two; 0: none."""
        self.keep_last = options.keep_last
        """Live: how many stay; 0: all."""
        self.at_stop = options.at_stop
        """Whether a run that is told to stop writes one, also with `every` = 0."""
        for kind, text in options.origin:
            ctx.log.info("%s: %s", kind, text)
            telemetry.event(kind, text)

    @property
    def is_pending(self) -> bool:
        """Whether one is being written."""
        return self._pending is not None

    def is_due(self, version: int) -> bool:
        """After the step that made this version."""
        return bool(self.every) and version % self.every == 0

    def folder_of(self, version: int) -> Path:
        """Where its checkpoint lies."""
        return Path(self._options.run_dir) / "checkpoints" / f"version_{version:08d}"

    def lacks(self, version: int) -> bool:
        """Whether this run's own folder has no checkpoint of it, although something was trained."""
        return version > 0 and not look_at(self.folder_of(version)).is_complete

    async def save(self, version: int) -> None:
        """Write the checkpoint of `version`, or begin to, unless there is one with all that was decided about the
        knobs. Raises TrainError naming a rank that could not."""
        with self._meter.during("compute", f"checkpoint {version}"):
            await self.settle()
            live = await self._run.live_knobs()
            if (version, live) == self._newest:
                return
            await (self._begin(version, live) if self._options.is_async else self._write(version, live))
        self._newest = (version, live)

    async def _write(self, version: int, live: LiveKnobs) -> None:
        folder = self.folder_of(version)
        await self._all("save", lambda: self._ranks.all(TrainerContract.save_checkpoint, str(folder), live))
        await self._is_there(version, folder, live, await self._copy_ledger(version))

    async def _begin(self, version: int, live: LiveKnobs) -> None:
        folder = self.folder_of(version)
        begun_at = self._clock.monotonic()
        await self._all("copy", lambda: self._ranks.all(TrainerContract.begin_checkpoint, str(folder), live))
        copied_s = self._clock.monotonic() - begun_at
        self._telemetry.metric(version, {"checkpoint/copy_s": copied_s})
        task = self._ctx.spawn(self._until_written(version), name=f"checkpoint-{version}")
        self._pending = _Pending(version, folder, live, begun_at, task)

    async def at_boundary(self) -> None:
        """Between two steps: finish a checkpoint that every rank has written; else nothing."""
        if self._pending is not None and self._pending.written.done():
            await self.settle()

    async def settle(self) -> None:
        """Wait until the one that is being written is there."""
        pending = self._pending
        if pending is None:
            return
        with self._meter.during("compute", f"checkpoint {pending.version}"):
            ledger = await pending.written
            if isinstance(ledger, TrainError):
                self._pending = self._newest = None
                raise ledger
            await self._all("finish", lambda: self._ranks.all(TrainerContract.finish_checkpoint))
        self._pending = None
        took_s = self._clock.monotonic() - pending.begun_at
        self._telemetry.metric(pending.version, {"checkpoint/async_s": took_s})
        await self._is_there(pending.version, pending.folder, pending.live, ledger)

    async def _until_written(self, version: int) -> FileEntry | TrainError:
        """The copy of the ledger, or what went wrong, for the boundary at which it is looked for."""
        try:
            await self._all("write", lambda: self._ranks.all(TrainerContract.checkpoint_written))
            return await self._copy_ledger(version)
        except TrainError as error:
            return error

    async def _copy_ledger(self, version: int) -> FileEntry:
        """Made beside the folder, since the folder may not be there yet."""
        return await self._run.copy_ledger(self._copy_of(version), version)

    def _copy_of(self, version: int) -> Path:
        folder = self.folder_of(version)
        return folder.with_name(f"{GROWING}{folder.name}-{LEDGER}")

    async def _is_there(self, version: int, folder: Path, live: LiveKnobs, ledger: FileEntry) -> None:
        stays = bool(self._options.keep_every and self.every) and version % (self._options.keep_every * self.every) == 0
        part = RunPart(
            run=Path(self._options.run_dir).name,
            version=version,
            files=(msgspec.structs.replace(ledger, name=LEDGER),),
            knobs=live,
            is_kept=stays,
        )
        in_thread = asyncio.get_running_loop().run_in_executor
        await in_thread(None, self._write_run_part, folder, part)
        await self._run.durable(version)
        await in_thread(None, self._prune, folder)

    def _write_run_part(self, folder: Path, part: RunPart) -> None:
        write_run_part(folder, part, self._copy_of(part.version), read_manifest(folder).files)

    def _prune(self, newest: Path) -> None:
        """Of all others the oldest go: folders of a life before a resume may bear higher versions. What is torn is no
        reason for a whole one to go; it goes once all that stay are newer."""
        if not self.keep_last or not look_at(newest).is_complete:
            return
        others = [look_at(path) for path in newest.parent.glob("version_*") if path.is_dir() and path != newest]
        old = sorted((info for info in others if info.is_complete), key=lambda info: info.path.name)
        num_going = max(len(old) + 1 - self.keep_last, 0)
        first = min(version_in(path) for path in (*(info.path for info in old[num_going:]), newest))
        torn = [info for info in others if not info.is_complete and version_in(info.path) < first]
        for info in (*(info for info in old[:num_going] if not is_kept(info.path)), *torn):
            take_away(info.path)
        sweep(newest.parent)

    async def _all(self, what: str, send: Callable[[], Awaitable[object]]) -> None:
        """A call to all ranks; one that fails is named."""
        try:
            await send()
        except GatherError as error:
            name, cause = next(iter(error.errors.items()))
            message = f"{name} could not {what} a checkpoint: {cause}"
            raise TrainError(message, remedy=f"see the log of {name}; an older checkpoint stays whole") from cause
