"""The run's checkpoints. Training waits for the whole of one, or (async) for its beginning and its end.

    begin      all ranks copy what they will write
    written    each rank's files are on its disk, and a copy of the ledger beside them, whenever that is
    finish     between two steps, or while training waits for data (unless engines have the devices meanwhile), all
               ranks: the folder appears, then the run's part of it (`checkpoints/folder.py`), and only then does the
               buffer get "durable"

One at a time. A checkpoint that lacks a later decision about knobs is written again in its place. A scheduled one that
cannot be written is reported, and tried again at a later boundary, without end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...core.config import TrainerConfig
from ...core.errors import CallError, GatherError, MyxaError, RemoteError, TrainError
from ...core.files import FileEntry
from ...core.knobs import LiveKnobs
from ...core.refs import together
from ...core.timeouts import TIMEOUTS
from ..checkpoints.folder import (
    CheckpointInfo,
    RunPart,
    Writer,
    is_kept,
    list_checkpoints,
    look_at,
    partial_of,
    place_of,
    sweep,
    take_away,
    version_in,
    write_run_part,
)
from ..contracts import BufferContract, CoordinatorContract, TrainerContract
from ..ledger.file import LEDGER
from ..telemetry import Reporter

T = TypeVar("T")


class RankSilent(TrainError):
    """A rank did not answer: the gang is not whole, so no other attempt can help."""


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Plain settings."""

    run_dir: str
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Steps between two, and how many stay, are live."""
    at_stop: bool = False
    """Whether a run that is stopped writes one, also with `every` = 0."""
    origin: Callable[[], tuple[tuple[str, str], ...]] = tuple
    """Events about the checkpoint that the run continues from, told once all ranks have begun."""
    keep_start: Callable[[Path], None] = lambda _: None
    """Copies what the run is started from into a checkpoint. May raise MyxaError or OSError."""
    writer: Writer = (1, 0)
    """Under whose name all of it is written, by the ranks too."""


@dataclass(frozen=True, slots=True)
class _Pending:
    version: int
    live: LiveKnobs
    begun_at: float
    written: asyncio.Task[FileEntry | TrainError]


@dataclass(slots=True)
class Checkpoints:
    """See the module's head."""

    report: Reporter
    options: CheckpointOptions
    ranks: Mapping[str, TrainerContract]
    """By name."""
    buffer: BufferContract
    coordinator: CoordinatorContract
    _pending: _Pending | None = None
    _newest: tuple[int, LiveKnobs] | None = None
    """Version and knobs of the one that was written last, with all its parts, and reported to the buffer."""
    _num_failed: int = 0
    """Attempts by schedule since one was written."""
    _try_at_s: float = 0.0
    """When the next of them may be made."""
    _covered: int = 0
    """Version that is safe: of the newest checkpoint, or the one that training continued from."""

    def __post_init__(self) -> None:
        for kind, text in self.options.origin():
            self.report.tell(kind, text)

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    @property
    def is_written(self) -> bool:
        """Whether one waits for nothing but a boundary to be finished at."""
        return self._pending is not None and self._pending.written.done()

    @property
    def newest(self) -> int:
        """Version of the one that was written last; -1: none yet."""
        return -1 if self._newest is None else self._newest[0]

    def continue_from(self, version: int) -> None:
        self._covered = version

    def is_due(self, version: int) -> bool:
        """After the step that made this version; if the last one failed, whenever it is time to try again."""
        if not self.options.trainer.checkpoint_every:
            return False
        if self._num_failed and not self.is_pending:
            return self.report.clock.monotonic() >= self._try_at_s
        return version % self.options.trainer.checkpoint_every == 0

    def folder_of(self, version: int) -> Path:
        return Path(self.options.run_dir) / "checkpoints" / f"version_{version:08d}"

    def lacks(self, version: int) -> bool:
        """Whether this run's own folder has no checkpoint of it, although something was trained."""
        return version > 0 and not look_at(self.folder_of(version)).is_complete

    async def save(self, version: int) -> None:
        """Write the checkpoint of `version`, or begin to, unless there is one with all that was decided about the
        knobs. Raises TrainError naming a rank that could not, and CallError if coordinator or buffer stay away."""
        with self.report.meter.during("compute", f"checkpoint {version}"):
            await self.settle()
            live = await self.report.ask("coordinator", self.coordinator.live_knobs)
            if (version, live) == self._newest:
                return
            self._newest = None  # its folder may be replaced: until the new one has all its parts there is none
            await self._in_thread(self._sweep)  # what others left may have filled the disk
            await self._begin(version, live)
            if not self.options.trainer.async_save:
                await self.settle()

    async def save_by_schedule(self, version: int) -> None:
        """The same. A failure is reported, and the next scheduled one tries again; raises only for a silent rank."""
        await self._attempt(version, lambda: self.save(version))

    async def settle_by_schedule(self, version: int) -> None:
        """As `settle`, with failures as in `save_by_schedule`; the ranks are at `version`."""
        await self._attempt(version, self.settle)

    async def at_boundary(self, version: int) -> None:
        """Between two steps: finish a checkpoint that every rank has written; else nothing."""
        if self.is_written:
            await self.settle_by_schedule(version)

    async def _attempt(self, version: int, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except RankSilent:
            raise
        except MyxaError as error:
            self._num_failed += 1
            pause_s = min(
                TIMEOUTS.trainer.longest_repeat_s, TIMEOUTS.trainer.first_repeat_s * 2 ** min(self._num_failed - 1, 10)
            )
            self._try_at_s = self.report.clock.monotonic() + pause_s
            text = (
                f"{error} (attempt {self._num_failed}; training continues, the next follows in {pause_s:g} s; steps "
                f"not covered by a checkpoint: {version - self._covered}, since version {self._covered})"
            )
            self.report.warn("checkpoint-failed", text)

    async def _begin(self, version: int, live: LiveKnobs) -> None:
        folder, begun_at = str(self.folder_of(version)), self.report.clock.monotonic()
        try:
            await self._all("begin", lambda rank: rank.begin_checkpoint(folder, live))
        except MyxaError as error:
            await self._clear_after(error)
            raise
        if self.options.trainer.async_save:
            self.report.telemetry.metric(version, {"checkpoint/copy_s": self.report.clock.monotonic() - begun_at})
        written = self.report.ctx.spawn(self._until_written(version), name=f"checkpoint-{version}")
        self._pending = _Pending(version, live, begun_at, written)

    async def settle(self) -> None:
        """Wait until the one that is being written is there. If that fails, nothing of it is left to be settled."""
        pending = self._pending
        if pending is None:
            return
        try:
            with self.report.meter.during("compute", f"checkpoint {pending.version}"):
                ledger = await pending.written
                if isinstance(ledger, TrainError):
                    raise ledger
                await self._all("finish", lambda rank: rank.finish_checkpoint())
                if self.options.trainer.async_save:
                    took_s = self.report.clock.monotonic() - pending.begun_at
                    self.report.telemetry.metric(pending.version, {"checkpoint/async_s": took_s})
                await self._complete(pending.version, pending.live, ledger)
        except MyxaError as error:
            await self._clear_after(error)
            raise
        finally:
            self._pending = None

    async def _until_written(self, version: int) -> FileEntry | TrainError:
        """The copy of the ledger, or what went wrong, for the boundary at which it is looked for."""
        try:
            await self._all("write", lambda rank: rank.checkpoint_written())
            return await self._copy_ledger(version)
        except TrainError as error:
            return error

    async def _copy_ledger(self, version: int) -> FileEntry:
        """Durably, with everything in it that was trained up to `version`. Raises TrainError if it cannot be made."""
        path = str(self._copy_of(version))
        try:  # that disk is this checkpoint's: training does not wait for it
            return await self.report.ask("buffer", lambda: self.buffer.snapshot(path, version), waits_for_disk=False)
        except MyxaError as error:
            message = f"checkpoint {version} lacks its copy of the ledger: {error.message}"
            raise TrainError(message, remedy=error.remedy or "see the log of buffer") from error

    def _copy_of(self, version: int) -> Path:
        """Made beside the folder, since the folder may not be there yet."""
        draft = partial_of(self.folder_of(version), self.options.writer)
        return draft.with_name(f"{draft.name}-{LEDGER}")

    async def _complete(self, version: int, live: LiveKnobs, ledger: FileEntry) -> None:
        """The ranks' part of the folder is there."""
        folder = self.folder_of(version)
        period = self.options.trainer.keep_every * self.options.trainer.checkpoint_every
        part = RunPart(
            run=Path(self.options.run_dir).name,
            version=version,
            ledger=msgspec.structs.replace(ledger, name=LEDGER),
            is_kept=bool(period) and version % period == 0,
        )
        await self._in_thread(lambda: self._write_run_part(folder, part))
        oldest = await self._in_thread(lambda: self._oldest_to_fall_back_to(folder))
        await self.report.ask("buffer", lambda: self.buffer.durable(version, oldest))
        self._newest, self._num_failed, self._covered = (version, live), 0, version
        await self._in_thread(lambda: self._prune(folder))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(None, work)

    def _write_run_part(self, folder: Path, part: RunPart) -> None:
        try:
            with place_of(folder, self.options.writer):
                self.options.keep_start(folder)
                write_run_part(folder, part, self._copy_of(part.version))
        except OSError as error:
            raise TrainError(f"{folder} cannot be completed: {error}", remedy="check disk and rights") from error

    def _prune(self, newest: Path) -> None:
        """Of all others the oldest go: folders of a life before a resume may bear higher versions. A torn one goes once
        all that stay are newer. Never raises for the disk: the next one finds again what should have gone."""
        self._sweep()
        try:
            if look_at(newest).is_complete:
                complete, torn = _others(newest)
                oldest = self._oldest_kept(newest, complete)
                surplus = [info for info in complete[: self._num_surplus(complete)] if not is_kept(info.path)]
                for info in (*surplus, *(info for info in torn if version_in(info.path) < oldest)):
                    take_away(info.path)
        except OSError as error:
            self.report.ctx.log.warning("older checkpoints beside %s could not all be deleted: %s", newest, error)

    def _oldest_to_fall_back_to(self, newest: Path) -> int | None:
        """Version of the oldest one that training may fall back to once the others have gone; those that stay for ever
        bring a ledger of their own. None: the disk does not say."""
        try:
            return self._oldest_kept(newest, _others(newest)[0])
        except OSError:
            return None

    def _num_surplus(self, complete: list[CheckpointInfo]) -> int:
        return max(len(complete) + 1 - self.options.trainer.keep_last, 0)

    def _oldest_kept(self, newest: Path, complete: list[CheckpointInfo]) -> int:
        kept = (info.path for info in complete[self._num_surplus(complete) :])
        return min(version_in(path) for path in (*kept, newest))

    async def _clear_after(self, error: MyxaError) -> None:
        """What could not be finished has filled the disk, which the ledger needs; unless a rank may write on."""
        if not isinstance(error, RankSilent):
            await self._in_thread(self._sweep)

    def _sweep(self) -> None:
        """Nothing is being written, but perhaps by ranks whose mates have failed. Never raises for the disk."""
        holder = self.folder_of(0).parent
        try:
            sweep(holder, self.options.writer)
        except OSError as error:
            self.report.ctx.log.warning("leftovers in %s could not be deleted: %s", holder, error)

    async def _all(self, action: str, send: Callable[[TrainerContract], Coroutine[Any, Any, object]]) -> None:
        try:
            await together({name: send(rank) for name, rank in self.ranks.items()}, fails_fast=True)
        except GatherError as error:
            name, cause = next(iter(error.errors.items()))
            message = f"{name} could not {action} a checkpoint: {cause}"
            # What a handler raised travels as what it is where it is of our tree: only a call that failed is silence.
            is_silent = isinstance(cause, CallError) and not isinstance(cause, RemoteError)
            kind = RankSilent if is_silent else TrainError
            raise kind(message, remedy=f"see the log of {name}; an older checkpoint stays whole") from cause


def _others(newest: Path) -> tuple[list[CheckpointInfo], list[CheckpointInfo]]:
    """The other checkpoints there: complete ones, oldest first, and torn ones."""
    infos = list_checkpoints(newest.parent)  # one that lost its place to a newer one in a crash is among them
    others = [info for info in infos if info.path != newest and version_in(info.path) >= 0]
    complete = sorted((info for info in others if info.is_complete), key=lambda info: version_in(info.path))
    return complete, [info for info in others if not info.is_complete]


@dataclass(frozen=True, slots=True)
class _Order:
    is_export: bool
    done: asyncio.Future[str]


@dataclass(slots=True)
class CheckpointOrders:
    """Checkpoints and exports on request. An order that fails is answered with the error; the run continues."""

    report: Reporter
    checkpoints: Checkpoints
    ranks: Mapping[str, TrainerContract]
    """By name."""
    run_dir: str
    _waiting: list[_Order] = field(default_factory=list[_Order])
    _closed: str = ""

    @property
    def are_waiting(self) -> bool:
        return bool(self._waiting)

    async def ask(self, *, is_export: bool) -> str:
        """The folder, once it is written. Raises TrainError when it cannot be, or when the run is at its end."""
        if self._closed:
            raise TrainError(f"nothing is written on request any more: {self._closed}", remedy="see what it wrote then")
        order = _Order(is_export, asyncio.get_running_loop().create_future())
        self._waiting.append(order)
        return await order.done

    async def serve(self, version: int) -> None:
        """Write what is waited for; the ranks are at `version` and may compute."""
        while self._waiting:
            if not self._waiting[0].is_export:  # one by schedule that cannot be written is no business of who asks now
                await self.checkpoints.settle_by_schedule(version)
            order = self._waiting.pop(0)
            if order.done.done():  # the caller is gone
                continue
            try:
                folder = await (self._export(version) if order.is_export else self._save(version))
            except MyxaError as error:
                self.report.ctx.log.warning("what was asked for could not be written: %s", error)
                _tell(order, error)
            except BaseException as error:
                _tell(order, TrainError(f"the trainer stopped while writing: {error!r}", remedy="see its log"))
                raise
            else:
                _tell(order, str(folder))

    def close(self, reason: str) -> None:
        self._closed = reason
        for order in self._waiting:
            _tell(
                order, TrainError(f"it was not written before the end: {reason}", remedy="see what the run wrote then")
            )
        self._waiting.clear()

    async def _save(self, version: int) -> Path:
        await self.checkpoints.save(version)
        await self.checkpoints.settle()
        return self.checkpoints.folder_of(version)

    async def _export(self, version: int) -> Path:
        folder = Path(self.run_dir) / "exports" / f"version_{version:08d}"
        try:
            with self.report.meter.during("compute", f"export {version}"):
                exports = {name: rank.export_hf(str(folder)) for name, rank in self.ranks.items()}
                await together(exports, fails_fast=True)
        except GatherError as error:
            name, cause = next(iter(error.errors.items()))
            raise TrainError(f"{name} could not export the model: {cause}", remedy=f"see the log of {name}") from cause
        return folder


def _tell(order: _Order, outcome: str | Exception) -> None:
    if order.done.done():
        return
    if isinstance(outcome, str):
        order.done.set_result(outcome)
    else:
        order.done.set_exception(outcome)
