"""The leader's checkpoints between ranks, buffer and coordinator that are no actors: files are real, failures scripted."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.harness.manual_clock import ManualClock
from tests.survival.checkpoint_maker import make_checkpoint

from myxa.actors.checkpoints.folder import Writer, begin, partial_of, version_in
from myxa.actors.telemetry import Reporter
from myxa.actors.trainer.checkpoints import CheckpointOptions, CheckpointOrders, Checkpoints
from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.config import TrainerConfig
from myxa.core.errors import RemoteError
from myxa.core.files import FileEntry, describe_file
from myxa.core.knobs import LiveKnobs

LOG = logging.getLogger("checkpoint-room")


def refused(why: str = "no space left on device") -> RemoteError:
    return RemoteError(why, remote_type="TrainError")


class Rank:
    """Writes whole checkpoints; a call whose name is in `failing` raises what stands there, once each."""

    def __init__(self, writer: Writer | None = None) -> None:
        """`writer`: who it says that it is; None: it does not."""
        self._writer = writer
        self.called: list[str] = []
        self.failing: dict[str, list[Exception]] = {}
        self.is_writing = asyncio.Event()
        self.is_writing.set()
        """Cleared: files are long in coming."""
        self._growing = Path()

    async def begin_checkpoint(self, folder: str, live: LiveKnobs) -> None:
        self._growing = Path(folder)
        begin(self._growing, self._writer)
        self._note("begin_checkpoint")

    async def checkpoint_written(self) -> None:
        await self.is_writing.wait()
        self._note("checkpoint_written")

    async def finish_checkpoint(self) -> None:
        self._write()  # what fails there fails when the folder is in its place
        self._note("finish_checkpoint")

    def _note(self, name: str) -> None:
        self.called.append(name)
        if errors := self.failing.get(name):
            raise errors.pop(0)

    def _write(self) -> None:
        assert partial_of(self._growing, self._writer).is_dir(), "somebody has deleted what was growing"
        version = version_in(self._growing)
        marks = {"life": self._writer[0], "attempt": self._writer[1]} if self._writer else {}
        make_checkpoint(self._growing, version, extra={"version": version, **marks})


class Buffer:
    def __init__(self) -> None:
        self.durables: list[int] = []
        self.oldest: list[int | None] = []
        self.failing: list[Exception] = []

    async def snapshot(self, path: str, version: int) -> FileEntry:
        if self.failing:
            raise self.failing.pop(0)
        Path(path).write_text(f"ledger of {version}")
        return describe_file(Path(path))

    async def durable(self, version: int, oldest: int | None = None) -> None:
        self.durables.append(version)
        self.oldest.append(oldest)


class Coordinator:
    def __init__(self) -> None:
        self.live = LiveKnobs()
        self.failing: list[Exception] = []

    async def live_knobs(self) -> LiveKnobs:
        if self.failing:
            raise self.failing.pop(0)
        return self.live


def checkpoint_options(run_dir: Path, **given: Any) -> CheckpointOptions:
    """Keys of [trainer], and the options' own."""
    trainer = {name: given.pop(name) for name in list(given) if name in TrainerConfig.model_fields}
    return CheckpointOptions(run_dir=str(run_dir), trainer=TrainerConfig(**trainer), **given)


class CheckpointRoom:
    def __init__(self, run_dir: Path, **options: Any) -> None:
        self.rank, self.buffer, self.coordinator = Rank(options.get("writer")), Buffer(), Coordinator()
        clock = self.clock = ManualClock()
        meter = ActivityMeter("trainer/0", clock)
        self._telemetry = TelemetryBuffer("trainer/0", clock)
        ctx: Any = SimpleNamespace(log=LOG, spawn=self._spawn, clock=clock)
        report = Reporter(ctx, meter, self._telemetry)
        ranks: Any = {"trainer/1": self.rank}
        buffer: Any = self.buffer
        coordinator: Any = self.coordinator
        settings = checkpoint_options(run_dir, **options)
        self.checkpoints = Checkpoints(report, settings, ranks, buffer, coordinator)
        self.orders = CheckpointOrders(report, self.checkpoints, ranks, str(run_dir))
        self._tasks: list[asyncio.Task[Any]] = []

    def _spawn(self, work: Any, *, name: str) -> asyncio.Task[Any]:
        self._tasks.append(task := asyncio.create_task(work, name=name))
        return task

    async def ask(self, version: int) -> str:
        """What `myxa ckpt` is told, the ranks standing at `version`."""
        asked = asyncio.create_task(self.orders.ask(is_export=False))
        await asyncio.sleep(0)
        await self.orders.serve(version)
        return await asked

    async def files_are_written(self) -> None:
        while self.checkpoints.is_pending and not self.checkpoints.is_written:
            await asyncio.sleep(0.001)

    def told(self, kind: str) -> list[str]:
        """Texts of events of that kind, since the last call."""
        events = self._telemetry.drain().events
        return [event.text for event in events if event.kind == kind]
