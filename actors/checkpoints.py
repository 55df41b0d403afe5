"""The leader's checkpoints: written while training waits, or (async) while it goes on.

    begin      all ranks copy what they will write; training waits for that only
    written    each rank's files are on its disk, whenever that is
    finish     at the boundary of a step, all ranks: the folder appears, and only now is the buffer told "durable"

One at a time: the next checkpoint first settles the one before. Knows ranks and buffer by their contracts.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from ..core.activity import ActivityMeter, TelemetryBuffer
from ..core.actor import ActorContext
from ..core.actor_group import ActorGroup
from ..core.clock import Clock
from ..core.errors import GatherError, TrainError
from .contracts import TrainerContract


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Plain settings."""

    run_dir: str
    every: int = 0
    """Steps between two; 0: none."""
    keep_last: int = 2
    """0: all."""
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class _Pending:
    version: int
    folder: Path
    begun_at: float
    written: asyncio.Task[TrainError | None]


class Checkpoints:
    """See the module's head."""

    def __init__(
        self,
        ctx: ActorContext,
        options: CheckpointOptions,
        ranks: ActorGroup[TrainerContract],
        durable: Callable[[int], Awaitable[None]],
        meter: ActivityMeter,
        telemetry: TelemetryBuffer,
        clock: Clock,
    ) -> None:
        """`ranks` fail fast together; `durable` tells the buffer that a version's checkpoint is there."""
        self._ctx = ctx
        self._options = options
        self._ranks = ranks
        self._durable = durable
        self._meter = meter
        self._telemetry = telemetry
        self._clock = clock
        self._pending: _Pending | None = None
        self._newest = -1

    @property
    def is_pending(self) -> bool:
        """Whether one is being written."""
        return self._pending is not None

    def is_due(self, version: int) -> bool:
        """After the step that made this version."""
        return bool(self._options.every) and version % self._options.every == 0

    async def save(self, version: int) -> None:
        """Write the checkpoint of `version`, or begin to, unless there is one. Raises TrainError naming a rank that
        could not."""
        if version == self._newest:
            return
        await self.settle()
        self._newest = version
        folder = Path(self._options.run_dir) / "checkpoints" / f"version_{version:08d}"
        if not self._options.is_async:
            await self._all("save", lambda: self._ranks.all(TrainerContract.save_checkpoint, str(folder)))
            await self._is_there(version, folder)
            return
        begun_at = self._clock.monotonic()
        await self._all("copy", lambda: self._ranks.all(TrainerContract.begin_checkpoint, str(folder)))
        copied_s = self._clock.monotonic() - begun_at
        self._telemetry.metric(version, {"checkpoint/copy_s": copied_s})
        task = self._ctx.spawn(self._until_written(), name=f"checkpoint-{version}")
        self._pending = _Pending(version, folder, begun_at, task)

    async def at_boundary(self) -> None:
        """Between two steps: finish a checkpoint that every rank has written; else nothing."""
        if self._pending is not None and self._pending.written.done():
            await self.settle()

    async def settle(self) -> None:
        """Wait until the one that is being written is there."""
        pending = self._pending
        if pending is None:
            return
        with self._meter.during("other", f"checkpoint {pending.version}"):
            if (error := await pending.written) is not None:
                raise error
            await self._all("finish", lambda: self._ranks.all(TrainerContract.finish_checkpoint))
        self._pending = None
        took_s = self._clock.monotonic() - pending.begun_at
        self._telemetry.metric(pending.version, {"checkpoint/async_s": took_s})
        await self._is_there(pending.version, pending.folder)

    async def _until_written(self) -> TrainError | None:
        """What went wrong, for the boundary at which it is looked for."""
        try:
            await self._all("write", lambda: self._ranks.all(TrainerContract.checkpoint_written))
        except TrainError as error:
            return error
        return None

    async def _is_there(self, version: int, folder: Path) -> None:
        await self._durable(version)
        await asyncio.get_running_loop().run_in_executor(None, self._prune, folder)

    def _prune(self, newest: Path) -> None:
        """Of all others the oldest go: folders of a life before a resume may bear higher versions."""
        kept = [*sorted(p for p in newest.parent.glob("version_*") if p.is_dir() and p != newest), newest]
        for old in kept[: -self._options.keep_last or None] if self._options.keep_last else []:
            shutil.rmtree(old, ignore_errors=True)

    async def _all(self, what: str, send: Callable[[], Awaitable[object]]) -> None:
        """A call to all ranks; one that fails is named."""
        try:
            await send()
        except GatherError as error:
            name, cause = next(iter(error.errors.items()))
            message = f"{name} could not {what} a checkpoint: {cause}"
            raise TrainError(message, remedy=f"see the log of {name}; an older checkpoint stays whole") from cause
