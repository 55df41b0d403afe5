"""Where a trainer rank begins: at a checkpoint on disk, or at the training state in the host's memory.

Rank 0 looks and sends the other ranks its choice: ranks that look for themselves might see different checkpoints and
silently train from different states.

`Standby` keeps the training state of a few steps back in a folder in memory, which outlives the ranks. It makes nothing
durable, since memory is lost with the host: the buffer keeps what an older checkpoint would need.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.errors import GatherError, MyxaError, TornCheckpoint, TrainError
from ...core.knobs import LiveKnobs
from ...core.protocols import TrainBackend
from ...core.refs import ActorGroup
from ..checkpoints.folder import sweep, version_in
from ..contracts import TrainerContract


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The same for all ranks of an attempt."""

    checkpoint: str = ""
    """Folder to restore; empty: the model folder, which is version 0."""
    is_restart: bool = False
    """The gang was here before, in this run: what was trained after that version is undone."""
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that are not whole, each in words. Where there are any, what is newer is undone as well."""
    life: int = 1
    """Of the run, as its checkpoints are to say."""
    attempt: int = 0
    """Of the gang, in this life."""


class StartFinder(Protocol):
    """What rank 0 asks. Both may block."""

    def find(self, torn: Mapping[str, str]) -> StartPoint:
        """Where to begin, as far as can be seen without reading every byte. `torn`: folders that it found before and
        that are not whole, each with the reason. Raises TrainError when there is none where one must be."""
        ...

    def begun(self, start: StartPoint, version: int) -> None:
        """All ranks have restored `start`, which is of `version`, and nothing is trained yet: from now on no newer one
        is found. Raises TrainError if the disk refuses."""


class _Word(msgspec.Struct, frozen=True, kw_only=True):
    start: StartPoint = StartPoint()
    problem: str = ""


def shared_start(
    rank: int, finder: StartFinder, torn: Mapping[str, str], exchange: Callable[[str], tuple[str, ...]]
) -> StartPoint:
    """What rank 0 finds, on every rank. Collective, by `exchange`. Raises TrainError on all if it finds none."""
    word, failure = _Word(), None
    if rank == 0:
        try:
            word = _Word(start=finder.find(torn))
        except (MyxaError, OSError) as error:
            word, failure = _Word(problem=str(error)), error
    word = msgspec.json.decode(exchange(msgspec.json.encode(word).decode())[0], type=_Word)
    if failure is not None:
        raise failure
    if word.problem:
        raise TrainError(f"rank 0 finds no place to begin: {word.problem}", remedy="see the log of trainer/0")
    return word.start


def restore(rank: int, finder: StartFinder, backend: TrainBackend) -> tuple[StartPoint, dict[str, Any]]:
    """Where all ranks begin, and what was saved beside it; version 0 of the model folder where nothing was. Collective,
    in the backend's thread. A checkpoint that turns out to be torn is passed over by all ranks, if there is another one
    to begin from. Raises TrainError if there is none, or if one cannot be restored."""
    torn: dict[str, str] = {}
    while True:
        start = shared_start(rank, finder, torn, backend.exchange)
        try:
            extra = backend.load(start.checkpoint) if start.checkpoint else {"version": 0}
        except TornCheckpoint as error:
            torn[start.checkpoint] = error.message
            continue
        if rank == 0:
            finder.begun(start, int(extra["version"]))
        return start, extra


REMEDY = "free memory of the host (its /dev/shm), or set trainer.standby_every = 0"


@dataclass(slots=True)
class Standby:
    """See the module's head. One per leader."""

    folder: Path
    """In memory, for this user only; the launcher removes it."""
    every: int
    """Steps between two; 0: none."""
    ranks: ActorGroup[TrainerContract]
    """Which fail fast together."""
    meter: ActivityMeter
    telemetry: TelemetryBuffer
    live_knobs: Callable[[], Awaitable[LiveKnobs]]
    """What was decided so far, kept with a copy."""
    _has_leftover: bool = False
    """Whether a copy lies there although no more are made."""

    def is_due(self, version: int) -> bool:
        """After the step that made this version."""
        return bool(self.every) and version % self.every == 0

    async def copy(self, version: int) -> None:
        """Keep the state of `version` beside the one before. Copies are optional: after a failed write no more are
        made; a copy for which the coordinator does not answer is skipped."""
        with self.meter.during("compute", f"standby {version}"):
            try:
                live = await self.live_knobs()
            except MyxaError as error:
                self.telemetry.event("standby-failed", f"version {version} is left out: {error}")
                return
            try:
                await asyncio.to_thread(self._make_room)
                folder = str(self.folder / f"version_{version:08d}")
                await self.ranks.all(TrainerContract.begin_checkpoint, folder, live)
                await self.ranks.all(TrainerContract.checkpoint_written)
                await self.ranks.all(TrainerContract.finish_checkpoint)
            except OSError as error:
                self._end(f"version {version}: {error} -- {REMEDY}")
            except GatherError as error:
                causes = "; ".join(f"{name}: {cause}" for name, cause in error.errors.items())
                self._end(f"version {version} was not written: {causes} -- see their logs, or {REMEDY}")
                self._has_leftover = True
                await asyncio.to_thread(self._drop, -1)

    def _end(self, why: str) -> None:
        self.every = 0
        self.telemetry.event("standby-failed", f"{why} (no more copies are made)")

    async def superseded(self, version: int) -> None:
        """There is a checkpoint of `version`. If no more copies are made, the last of them, as old, goes for it."""
        if self._has_leftover:
            await asyncio.to_thread(self._drop, version)

    def _drop(self, version: int) -> None:
        """The memory is wanted: copies up to that version go, and what was not completed."""
        with suppress(OSError):
            sweep(self.folder)
        copies = list(self.folder.glob("version_*"))
        for copy in copies:
            if version_in(copy) <= version:
                shutil.rmtree(copy, ignore_errors=True)
        self._has_leftover = any(copy.exists() for copy in copies)

    def _make_room(self) -> None:
        """For one more: of those that are there only the newest whole one stays meanwhile."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.stat().st_uid != os.getuid():  # anybody may make a folder where memory is mounted
            raise OSError(f"{self.folder} belongs to another user")
        newest = max(self.folder.glob("version_*"), default=None)
        for old in self.folder.iterdir():
            if old != newest:  # what a rank left unfinished goes too
                shutil.rmtree(old, ignore_errors=True)
