"""A real trainer (one rank, the torch backend, a tiny model) between a buffer and a coordinator that the test leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.harness.decider import Decider
from tests.survival.checkpoint_room import checkpoint_options

from myxa.actors.backends.rank_backend import RankSettings
from myxa.actors.backends.torch_backend.backend import TorchBackend
from myxa.actors.contracts import BufferContract, TrainerContract
from myxa.actors.trainer.knobs import step_values
from myxa.actors.trainer.start_point import StartPoint
from myxa.actors.trainer.step_plan import StepPlanOptions
from myxa.actors.trainer.train_loop import TrainLoopOptions
from myxa.actors.trainer.trainer import Trainer, TrainerOptions
from myxa.actors.weights.channels.host import make_writer
from myxa.actors.weights.publish import ChannelEnd
from myxa.core.actor import Actor
from myxa.core.config import AlgoConfig, OptimizerConfig, TrainerConfig
from myxa.core.errors import TrainError
from myxa.core.files import FileEntry, describe_file
from myxa.core.knobs import KnobValue, LiveKnobs
from myxa.core.messages import BufferStats, Claim, StepReport, WeightManifest
from myxa.core.samples import Group, Message, Prompt, Sample
from myxa.transport.node import Node

BATCH = 4
WAIT_S = 60


class FixedStart:
    def __init__(self, checkpoint: str = "") -> None:
        """Empty: the model folder."""
        self._start = StartPoint(checkpoint=checkpoint)

    def find(self, torn: Mapping[str, str]) -> StartPoint:
        if self._start.checkpoint in torn:
            raise TrainError(torn[self._start.checkpoint], remedy="name another checkpoint")
        return self._start

    def begun(self, start: StartPoint, version: int) -> None: ...


def make_group(group_id: int, version: int, temperature: float = 1.0) -> Group:
    rng = np.random.default_rng(group_id)
    samples = tuple(
        Sample(
            group_id=group_id, index=index, prompt_ids=np.asarray([1, 2, 3], np.int32),
            response_ids=rng.integers(0, 200, 4).astype(np.int32), logprobs=np.full(4, -5.0, np.float32),
            loss_mask=np.ones(4, np.uint8), versions=np.full(4, version, np.int32), finish="stop",
            temperature=temperature,
        )
        for index in range(2)
    )  # fmt: skip
    prompt = Prompt(group_id=group_id, row=group_id, pass_index=0, messages=(Message(role="user", content="q"),))
    return Group(prompt=prompt, samples=samples, rewards=np.asarray([0.0, 1.0], np.float32))


class Data(BufferContract):
    """Has a batch for every step below `limit`; under way until told otherwise."""

    def __init__(self) -> None:
        self.limit = 0
        self.blocked_by = "wait-data"
        self.under_way = 1
        self.durables: list[int] = []
        self.claims: list[str | None] = []
        self.when_trained: Callable[[int], Awaitable[None]] | None = None
        """Called in the step that was just trained, before the leader hears that it was noted."""
        self._changed = asyncio.Event()

    def allow(self, limit: int) -> None:
        self.limit = limit
        self.ring()

    def ring(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def claim(self, step: int, wait_s: float, blocked_by: str | None = None) -> Claim:
        self.claims.append(blocked_by)
        if step >= self.limit and blocked_by == self.blocked_by:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        if step >= self.limit:
            return Claim(step=step, blocked_by=self.blocked_by)  # pyright: ignore[reportArgumentType]
        return Claim(step=step, groups=dict.fromkeys(range(step * BATCH, step * BATCH + BATCH), step))

    async def fetch(self, group_ids: tuple[int, ...]) -> tuple[Group, ...]:
        return tuple(make_group(g, g // BATCH) for g in group_ids)

    async def trained(self, step: int) -> None:
        if self.when_trained is not None:
            await self.when_trained(step)

    async def rewind(self, version: int, lineage: int) -> int:
        return 0

    async def durable(self, version: int, oldest: int | None = None) -> None:
        self.durables.append(version)

    async def snapshot(self, path: str, version: int) -> FileEntry:
        Path(path).write_text(f"ledger of {version}")
        return describe_file(Path(path))

    async def stats(self) -> BufferStats:
        return BufferStats(
            states={"DISPATCHED": self.under_way}, drawn=0, trained=0, dropped={}, slots_total=1, slots_used=1,
            max_staleness=1, policy="pace",
        )  # fmt: skip


class Conductor(Decider):
    """Lets the leader go, takes notes, releases what is older than the newest version."""

    def __init__(self, restored: dict[str, KnobValue] | None = None) -> None:
        """`restored`: knobs that are changed before the leader may go, as a resumed run's are."""
        super().__init__()
        self._restored = restored or {}
        self.reports: list[StepReport] = []
        self.given: list[int] = []
        self.manifests: list[WeightManifest] = []
        self.live = LiveKnobs()
        self.resumed: LiveKnobs | None = None
        self.finished = asyncio.Event()
        self._news = asyncio.Event()

    @property
    def trainer(self) -> Any:
        return self.ctx.ref(TrainerContract, "trainer/0")

    async def trainer_ready(
        self, version: int, manifest: WeightManifest | None, facts: dict[str, str], live: LiveKnobs | None = None,
        is_leading: bool = False,
    ) -> None:  # fmt: skip
        self.resumed, self.first = live, version
        await self._given(manifest)
        self.ctx.spawn(self._start(version), name="go")

    async def _start(self, version: int) -> None:
        if self._restored:
            await self.change(1, **self._restored)
        await self.trainer.run_leader(version)

    async def version_made(self, manifest: WeightManifest | None, report: StepReport) -> None:
        self.reports.append(report)
        await self._given(manifest)

    async def weights_offered(self, manifest: WeightManifest) -> None:
        await self._given(manifest)

    async def _given(self, manifest: WeightManifest | None) -> None:
        if manifest is not None:
            for version in self.given[-1:]:
                self.ctx.spawn(self.trainer.release_weights(version), name="release")
            self.given.append(manifest.version)
            self.manifests.append(manifest)
        self._news.set()

    async def trainer_finished(self, version: int, reason: str) -> None:
        self.finished.set()

    async def live_knobs(self) -> LiveKnobs:
        return self.live

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{what} did not happen within {WAIT_S} s") from None

    async def steps(self, count: int) -> list[dict[str, float]]:
        await self.until(lambda: len(self.reports) >= count, f"step {count}")
        return [report.metrics for report in self.reports[:count]]

    async def change(self, epoch: int, **values: KnobValue) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the boundary's number. AssertionError with the trainer's reason if it refuses."""
        version = self.reports[-1].version if self.reports else self.first
        outcome = await super().change(self.trainer, epoch, -1, version, **values)
        assert outcome.accepted, outcome.reason
        return outcome.at

    async def refused(self, epoch: int, **values: KnobValue) -> str:
        version = self.reports[-1].version if self.reports else self.first
        outcome = await super().change(self.trainer, epoch, -1, version, **values)
        assert not outcome.accepted, values
        return outcome.reason


class Room:
    def __init__(self, trainer: Trainer, data: Data, conductor: Conductor, folder: Path, node: Node) -> None:
        self.trainer, self.data, self.conductor, self.folder, self.node = trainer, data, conductor, folder, node


@asynccontextmanager
async def trainer_room(
    model: Path, run_dir: Path, *, num_steps: int = 0, algo: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None, checkpoints: dict[str, Any] | None = None,
    resume: str = "", restored: dict[str, KnobValue] | None = None, conductor: Conductor | None = None,
    make_pair: Callable[[Prompt], Group] | None = None, second: Actor | None = None,
) -> AsyncGenerator[Room]:  # fmt: skip
    """`second`: stands for another rank."""
    algo_config = AlgoConfig.model_validate({"batch_size": BATCH, **(algo or {})})
    optimizer_config = OptimizerConfig.model_validate({"lr": 1e-3, **(optimizer or {})})
    settings = RankSettings(model_path=str(model), algo=algo_config, optimizer=optimizer_config, num_steps=num_steps)
    leader = TrainLoopOptions(
        world_size=1 if second is None else 2, num_steps=num_steps, make_pair=make_pair,
        plan=StepPlanOptions(algo_config, num_ranks=1 if second is None else 2, max_tokens=64, minibatches=algo_config.minibatches),
        publishes=True, run_dir=str(run_dir),
        checkpoints=checkpoint_options(run_dir, **(checkpoints or {})), trainer=TrainerConfig(export_at_end=False),
        step_values=step_values(algo_config, optimizer_config),
    )  # fmt: skip
    trainer = Trainer(
        backend=TorchBackend(settings), end=ChannelEnd("shm", writer=make_writer("shm", run_dir / "weights", model)),
        options=TrainerOptions(rank=0, leader=leader), start=FixedStart(resume),
    )  # fmt: skip
    node = await Node.attach(name="launcher/0")
    room = Room(trainer, Data(), conductor or Conductor(restored), run_dir, node)
    try:
        await node.start(room.conductor, name="coordinator")
        await node.start(room.data, name="buffer")
        if second is not None:
            await node.start(second, name="trainer/1")
        await node.start(trainer, name="trainer/0")
        await room.conductor.until(lambda: bool(room.conductor.given), "set-up")
        yield room
    finally:
        await node.close(grace_s=1)
