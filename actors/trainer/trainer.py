"""The trainer role: a gang of ranks, each around one `TrainBackend`. Rank 0 also runs the loop (`train_loop.py`).

A rank executes one call of the loop at a time in one worker thread: collectives need the same order on all ranks.
Weights leave in other threads (`weights/publish.py`), so an engine that takes weights never waits for a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from ...core.actor import PeerEvent
from ...core.daemon_thread import in_daemon_thread
from ...core.device_memory import MemoryCommand, MemoryReply, TenantReport
from ...core.errors import NotReady, TrainError, raised_as
from ...core.files import naming_disk
from ...core.knobs import KnobValue, KnobVerdict, LiveKnobs
from ...core.messages import EvalRequest, EvalResult, WeightManifest
from ...core.protocols import PendingSave, StepStats, TrainBackend
from ...core.samples import TrainShard
from ...core.timeouts import TIMEOUTS
from ...core.weight_channel import WRITTEN_CHANNELS, AnyAnswer, AnyOrder, SenderOrder
from ..checkpoints.folder import version_in
from ..contracts import TrainerContract
from ..knobs.owner import LOG_LEVEL, KnobOwner, OwnsKnobs
from ..telemetry import Reporter
from ..tenancy.time_share import TimeShare
from ..weights.publish import ChannelEnd
from .knobs import of_ranks, with_pending
from .start_point import StartFinder, StartPoint, restore
from .tenant import TrainerTenancy, TrainerTenant
from .train_loop import TrainLoop, TrainLoopOptions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """Plain settings of the role."""

    rank: int
    leader: TrainLoopOptions
    block_limit_s: float = 600.0
    """Setting up, the first step (kernels are compiled) and writing files may hold the interpreter lock for so long; a
    rank that hangs there is noticed that much later."""


@dataclass(eq=False, kw_only=True)
class Trainer(OwnsKnobs, TrainerContract):
    """One rank. See the module's head."""

    mailbox_size = 256

    backend: TrainBackend
    end: ChannelEnd
    """Of the weight channel."""
    options: TrainerOptions
    start: StartFinder
    """Answers rank 0 where all begin, in a thread."""
    tenancy: TrainerTenancy | None = None
    """Where the rank shares its device with an engine in turns."""

    def __post_init__(self) -> None:
        self._start = StartPoint()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="backend")
        self._is_set_up = asyncio.Event()
        self._leader: TrainLoop | None = None
        self._tenant: TrainerTenant | None = None
        self._share: TimeShare | None = None
        self._version = 0
        self._has_trained = False
        self._knobs = self.options.leader.knobs(takes_turns=self.tenancy is not None)
        self._live: LiveKnobs | None = None
        """Of the checkpoint that the run continues from."""
        self._pending_save: PendingSave | None = None
        self._saving: asyncio.Task[TrainError | None] | None = None
        self._saved_in = Path()

    async def on_start(self) -> None:
        self._report = report = Reporter.begin(self.ctx)
        self._meter, self._telemetry = report.meter, report.telemetry
        if self.tenancy is not None:  # from the first moment: the leader leases room for all ranks
            self._tenant = TrainerTenant(report, self.tenancy, self._in_thread)
        knobs = () if self.options.rank else (*self._knobs.knobs(), LOG_LEVEL)  # rank 0 owns them for all ranks
        self.knob_owner = KnobOwner(self.ctx.name, knobs, self._telemetry)
        self.ctx.spawn(self._run(), name="trainer-run")

    async def _run(self) -> None:
        """Model, optimizer, process group; rank 0 then leads until the run is over."""
        share = await self._wait_for_room()
        with self._blocking("sets up its backend"):
            facts = await self._in_thread(self.backend.setup)
            start = await self._restore()
        if self._tenant is not None:
            await self._tenant.set_up(self.backend.memory())
        self.ctx.log.info("rank %d is ready at version %d: %s", self.options.rank, self._version, facts)
        self._is_set_up.set()
        if self.options.rank == 0:
            self._leader = TrainLoop(self._report, self.options.leader, self.knob_owner, self._knobs, share)
            self.ctx.watch("coordinator")
            texts = {key: str(value) for key, value in facts.items()}
            await self._leader.run(self._version, texts, self._live, is_restart=start.is_restart)

    async def _restore(self) -> StartPoint:
        start, extra = await self._in_thread(lambda: restore(self.options.rank, self.start, self.backend))
        self._start, self._version, self._live = start, extra["version"], _live_knobs(extra)
        if self.options.rank == 0:
            for text in start.passed_over:
                self._telemetry.event("checkpoint-passed-over", text)
                self.ctx.log.error("a checkpoint is passed over: %s", text)
        if (start.is_restart or start.passed_over) and self.options.rank == 0:
            place = start.checkpoint or "the model folder"
            self._telemetry.event("trainer-goes-back", f"to version {self._version}, from {place}")
        return start

    async def _wait_for_room(self) -> TimeShare | None:
        """Where the device is shared in turns: nothing is loaded before this rank has it. The leader asks for all."""
        if self.tenancy is None or self._tenant is None:
            return None
        self._meter.switch("wait-memory", "room to load")
        share = None
        if self.options.rank == 0:
            share = TimeShare(self._report, self.tenancy.share)
            self.ctx.watch("rollout/")
            self._share = share
            await share.set_up()
        await self._tenant.turn.wait()
        self._meter.switch("other", "start")
        return share

    async def on_peer(self, event: PeerEvent) -> None:
        if self._share is not None:
            self._share.on_peer(event)
        if self._leader is not None:
            self._leader.link.on_peer(event)

    async def on_stop(self, why: str) -> None:
        if self._leader is not None:
            self._leader.stop(why)
        ends = {self._thread: self.backend.close, self.end.thread: self.end.close}
        in_thread = asyncio.get_running_loop().run_in_executor
        closing = {thread: in_thread(thread, close) for thread, close in ends.items()}
        done, _ = await asyncio.wait(closing.values(), timeout=TIMEOUTS.trainer.close_s)
        for thread, end in closing.items():
            thread.shutdown(wait=end in done, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _blocking(self, why: str, *, when: bool = True) -> AbstractContextManager[None]:
        return self.ctx.busy(self.options.block_limit_s, why) if when else nullcontext()

    # -- what every rank answers

    async def train_shard(self, shard: TrainShard, knobs: dict[str, float]) -> StepStats:
        await self._is_set_up.wait()
        if self._tenant is not None:
            await self._tenant.turn.wait()
        is_first, self._has_trained = not self._has_trained, True
        if is_first and self.options.rank:
            self._meter.switch("wait-data", "next step")
        with self._meter.during("compute", f"train {shard.step}"), self._blocking("first step", when=is_first):
            stats = await self._in_thread(lambda: self.backend.train(shard, knobs))
        self._version = shard.step + (not shard.is_held_out)
        return stats

    async def publish(self, version: int, unreleased: tuple[int, ...]) -> WeightManifest | None:
        await self._is_set_up.wait()
        leader = self.options.leader
        on_disk = naming_disk(Path(leader.run_dir)) if leader.channel in WRITTEN_CHANNELS else nullcontext()
        with self._meter.during("compute", f"publish {version}", makes_version=version), on_disk:
            return await self.end.publish(version, self.backend, self._in_thread, unreleased)

    async def begin_checkpoint(self, folder: str, live: LiveKnobs) -> None:
        knobs = msgspec.json.decode(msgspec.json.encode(live))
        # One of an earlier life, or of an attempt that was undone, may appear late and is not to count as the newest.
        writer = {"life": self._start.life, "attempt": self._start.attempt}
        extra = {"version": self._version, **writer, "knobs": knobs}
        with self._meter.during("compute", "copy checkpoint"), self._blocking("copies a checkpoint"):
            if self._saving is not None:  # one that failed on another rank; both would write files of the same names
                await asyncio.wait([self._saving])
            self._pending_save = self._saving = None  # its copy of the state too, before there is another
            pending = await self._in_thread(lambda: self.backend.begin_save(folder, extra))
        self._pending_save, self._saved_in = pending, Path(folder)
        self._saving = self.ctx.spawn(_attempt(pending.write, "write checkpoint"), name="write-checkpoint")

    async def checkpoint_written(self) -> None:
        error = await asyncio.shield(self._require_save()[1])
        if error is not None:
            with naming_disk(self._saved_in):
                raise error

    async def finish_checkpoint(self) -> None:
        await self.checkpoint_written()
        pending, _ = self._require_save()
        disk = naming_disk(self._saved_in)
        with disk, self._meter.during("compute", "finish checkpoint"), self._blocking("finishes a checkpoint"):
            await self._in_thread(pending.finish)
        self._telemetry.event("checkpoint", f"version {version_in(self._saved_in)} saved to {self._saved_in}")
        self._pending_save = self._saving = None

    def _require_save(self) -> tuple[PendingSave, asyncio.Task[TrainError | None]]:
        if self._pending_save is None or self._saving is None:
            raise TrainError(f"{self.ctx.name} is writing no checkpoint", remedy="begin one first")
        return self._pending_save, self._saving

    async def export_hf(self, folder: str) -> None:
        exporting = self._meter.during("compute", "export")
        with naming_disk(Path(folder)), exporting, self._blocking("exports the model"):
            await self._in_thread(lambda: self.backend.export_hf(folder))

    async def ask_sender(self, order: AnyOrder) -> AnyAnswer:
        """Each in its own thread: an engine that takes weights never waits for a training step."""
        sender_order = cast("SenderOrder[AnyAnswer]", order)
        return await in_daemon_thread(lambda: self.end.answer(sender_order), f"{type(order).__name__} of an engine")

    async def memory_command(self, command: MemoryCommand) -> MemoryReply:
        if self._tenant is None:
            raise TrainError(f"{self.ctx.name} has its device for itself", remedy='set memory.share = "switch"')
        return await self._tenant.command(command)

    async def memory_report(self) -> TenantReport | None:
        return None if self._tenant is None else self._tenant.report()

    # -- what only the leader answers

    def _require_leader(self) -> TrainLoop:
        if self.options.rank:
            raise TrainError(f"{self.ctx.name} does not lead", remedy="ask trainer/0")
        if self._leader is None:
            raise NotReady(f"{self.ctx.name} is still setting up", remedy="ask again after trainer_ready")
        return self._leader

    async def release_weights(self, version: int) -> None:
        await self.end.release(version)
        if self.options.rank == 0:
            await self._require_leader().publisher.released(version)

    async def run_leader(self, start_version: int) -> None:
        self._require_leader().go(start_version)

    async def stop_leader(self, reason: str) -> None:
        self._require_leader().stop(reason)

    async def judge_knobs(self, values: dict[str, KnobValue], at: int) -> KnobVerdict:
        verdict = await super().judge_knobs(values, at)
        return KnobVerdict(refusal=verdict.refusal or self._refusal(values, at))

    def _refusal(self, values: dict[str, KnobValue], at: int) -> str:
        """Why values do not go together, or with what is in force or waits. `at`: the first step to use them."""
        reason = self._knobs.refuses_end(values, at)
        if reason or not of_ranks(values):
            return reason
        return self.backend.judge_knobs(of_ranks(with_pending(self.knob_owner.sheet(), values)))

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        return await self._require_leader().evaluate(request.prompts)

    async def checkpoint_at_boundary(self, export: bool) -> str:
        return await self._require_leader().orders.ask(is_export=export)


def _live_knobs(extra: dict[str, Any]) -> LiveKnobs | None:
    """The knobs in a checkpoint. Raises TrainError when what is there cannot be read."""
    if "knobs" not in extra:
        return None
    remedy = "it was written by another version of myxa"
    with raised_as(TrainError, "the checkpoint's live knobs cannot be read", msgspec.ValidationError, remedy=remedy):
        return msgspec.convert(extra["knobs"], LiveKnobs)


async def _attempt(work: Callable[[], None], name: str) -> TrainError | None:
    """The error, for the caller; it does not end the actor."""
    try:
        await in_daemon_thread(work, name)
    except Exception as error:  # noqa: BLE001 -- a library writes there: whatever it raises is reported with the checkpoint
        failure = TrainError(
            f"could not {name}: {error}", remedy="check disk and rights; an older checkpoint stays whole"
        )
        failure.__cause__ = error
        return failure
    return None
