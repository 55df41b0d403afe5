"""The training state in the host's memory: what a gang that is started again goes on from, a few steps back at most.

It is a checkpoint as any other, by the same calls of the ranks, in a folder that lies in memory and outlives them. It
makes nothing durable: the memory is gone with the host, so the buffer keeps what it would need for an older one. Knows
ranks by their contract; must not know who reads it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.errors import GatherError, MyxaError
from ...core.knobs import LiveKnobs
from ...core.refs import ActorGroup
from ..checkpoints.folder import sweep, version_in
from ..contracts.roles import TrainerContract

REMEDY = "free memory of the host (its /dev/shm), or set trainer.standby_every = 0"


@dataclass(frozen=True, slots=True)
class StandbyOptions:
    """Plain settings."""

    folder: str = ""
    """In memory, for this user only; whoever starts the processes removes it. Empty: no copies are made."""
    every: int = 0
    """Steps between two copies; 0: none."""


class Standby:
    """See the module's head. One per leader."""

    def __init__(
        self,
        options: StandbyOptions,
        ranks: ActorGroup[TrainerContract],
        meter: ActivityMeter,
        telemetry: TelemetryBuffer,
        live_knobs: Callable[[], Awaitable[LiveKnobs]],
    ) -> None:
        """`ranks` fail fast together; `live_knobs`: what was decided so far, to be kept with a copy."""
        self._folder = Path(options.folder)
        self._every = options.every if options.folder else 0
        self._ranks = ranks
        self._meter = meter
        self._telemetry = telemetry
        self._live_knobs = live_knobs
        self._has_leftover = False
        """Whether a copy lies there although no more are made."""

    def is_due(self, version: int) -> bool:
        """After the step that made this version."""
        return bool(self._every) and version % self._every == 0

    async def copy(self, version: int) -> None:
        """Keep the state of `version` beside the one before. Copies are a convenience, and training goes on without:
        where one cannot be written no more are made; one for which the coordinator does not answer is left out."""
        with self._meter.during("compute", f"standby {version}"):
            try:
                live = await self._live_knobs()
            except MyxaError as error:
                self._telemetry.event("standby-failed", f"version {version} is left out: {error}")
                return
            try:
                await asyncio.to_thread(self._make_room)
                folder = str(self._folder / f"version_{version:08d}")
                await self._ranks.all(TrainerContract.save_checkpoint, folder, live)
            except OSError as error:
                self._end(f"version {version}: {error} -- {REMEDY}")
            except GatherError as error:
                causes = "; ".join(f"{name}: {cause}" for name, cause in error.errors.items())
                self._end(f"version {version} was not written: {causes} -- see their logs, or {REMEDY}")
                self._has_leftover = True
                await asyncio.to_thread(self._drop, -1)

    def _end(self, why: str) -> None:
        self._every = 0
        self._telemetry.event("standby-failed", f"{why} (no more copies are made)")

    async def superseded(self, version: int) -> None:
        """There is a checkpoint of `version`. If no more copies are made, the last of them, as old, goes for it."""
        if self._has_leftover:
            await asyncio.to_thread(self._drop, version)

    def _drop(self, version: int) -> None:
        """The memory is wanted: copies up to that version go, and what was not completed."""
        with suppress(OSError):
            sweep(self._folder)
        copies = list(self._folder.glob("version_*"))
        for copy in copies:
            if version_in(copy) <= version:
                shutil.rmtree(copy, ignore_errors=True)
        self._has_leftover = any(copy.exists() for copy in copies)

    def _make_room(self) -> None:
        """For one more: of those that are there only the newest whole one stays meanwhile."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():  # anybody may make a folder where memory is mounted
            raise OSError(f"{self._folder} belongs to somebody else")
        newest = max(self._folder.glob("version_*"), default=None)
        for old in self._folder.iterdir():
            if old != newest:  # what a rank left unfinished goes too
                shutil.rmtree(old, ignore_errors=True)
