"""A buffer and rollout actors on a real node, over an engine whose tokens come when the test lets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.buffer.conftest import NumberedRows
from tests.harness.decider import Decider, Outcome
from tests.harness.group_runner import rollout_options
from tests.harness.manifests import manifest_of
from tests.harness.waiting import WAIT_S, until

from myxa.actors.buffer.buffer import Buffer
from myxa.actors.buffer.filters import load_group_filters
from myxa.actors.contracts import BufferContract, RolloutContract
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.actors.monitor.monitor import Monitor
from myxa.actors.rewards.rewarder import FixedReward
from myxa.actors.rollout.rollout import Rollout
from myxa.actors.workflows import named
from myxa.algos.staleness import Admission
from myxa.core.knobs import KnobValue
from myxa.core.messages import EngineStatus, SamplingParams, WeightManifest
from myxa.core.protocols import Delta, EngineInfo, GenerateRequest, PauseMode
from myxa.core.weight_channel import WeightProgress
from myxa.transport.node import Node

PER_TURN = 6
"""New tokens of an answer."""


class GateEngine:
    """Every request gives one token at once, and the others when the gate opens."""

    def __init__(self) -> None:
        self.pause_mode: PauseMode = "in_place"
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.gate = asyncio.Event()
        self.version = -1
        self.token, self.logprob = 7, -0.5
        self.requests: list[GenerateRequest] = []
        self.open = 0
        self.most_open = 0
        self._is_aborted = asyncio.Event()

    async def start(self) -> EngineInfo:
        await self.may_start.wait()
        return await self.info()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.requests.append(request)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        aborted = self._is_aborted
        try:
            yield self._delta(1, None)
            waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            left = request.sampling.max_new_tokens - 1
            yield self._delta(0, "abort") if aborted.is_set() else self._delta(left, "length")
        finally:
            self.open -= 1

    def _delta(self, count: int, finish: Any) -> Delta:
        return Delta(
            output_ids=np.full(count, self.token, dtype=np.int32), logprobs=np.full(count, self.logprob, dtype=np.float32),
            versions=np.full(count, self.version, dtype=np.int32), finish=finish,
        )  # fmt: skip

    async def abort(self, request_id: str | None = None) -> None:
        aborted, self._is_aborted = self._is_aborted, asyncio.Event()
        aborted.set()

    def weight_progress(self) -> WeightProgress:
        return WeightProgress(at="idle")

    async def prepare_weights(self, manifest: WeightManifest) -> None: ...

    async def commit_weights(self, version: int) -> None:
        self.version = version

    async def info(self) -> EngineInfo:
        return EngineInfo(
            kind="gate", vocab_size=512, context_length=1 << 16, max_running=8, version=self.version, running=self.open
        )

    async def until_lost(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None: ...


class ToyCoordinator(Decider):
    def __init__(self) -> None:
        super().__init__()
        self.ready: set[str] = set()

    async def rollout_ready(self, status: EngineStatus, epoch: int) -> None:
        self.ready.add(status.rollout)


@dataclass
class Floor:
    node: Node
    buffer_actor: Buffer
    coordinator: ToyCoordinator
    tokenizer: Any
    engines: dict[str, GateEngine] = field(default_factory=dict)
    rollouts: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def buffer(self) -> BufferContract:
        return self.node.ref(BufferContract, "buffer")

    def ref(self, name: str = "rollout/0") -> RolloutContract:
        return self.node.ref(RolloutContract, name)

    async def add(
        self, name: str = "rollout/0", *, max_groups: int = 1, serves: int | None = 0, lineage: int = 0, **options: Any
    ) -> GateEngine:
        """Start a rollout actor; `serves`: bring it to that version, None: leave that to the test."""
        engine = self.engines[name] = options.pop("engine", None) or GateEngine()
        rollout = self.rollouts[name] = Rollout(
            engine=engine, workflow=options.pop("workflow", named.answer_once),
            scorer=options.pop("scorer", None) or FixedReward(), evaluation=options.pop("evaluation", None),
            tokenizer=self.tokenizer,
            options=rollout_options(max_groups=max_groups, report_s=0.05, **options),
        )  # fmt: skip
        await self.node.start(rollout, name=name)
        if serves is not None:
            await self.serve(name, serves, lineage)
        return engine

    async def serve(self, name: str, version: int, lineage: int = 0) -> None:
        await until(lambda: name in self.coordinator.ready, f"{name} ready")
        manifest = manifest_of(version, channel="shm", lineage=lineage)
        assert (await self.ref(name).prepare_weights(manifest)).accepted
        assert (await self.ref(name).commit_weights(version)).accepted

    async def change(self, owner: str, epoch: int, **values: KnobValue) -> Outcome:
        ref = self.buffer if owner == "buffer" else self.ref(owner)
        return await self.coordinator.change(ref, epoch, **values)

    async def pause(self, at: int = 0) -> None:
        await self.coordinator.hold_from(self.buffer, at)

    async def states(self) -> dict[str, int]:
        return (await self.buffer.stats()).states

    async def until_states(self, wanted: Callable[[dict[str, int]], bool], what: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not wanted(found := await self.states()):
                await asyncio.sleep(0.01)
        assert wanted(found), what


@asynccontextmanager
async def data_floor(
    folder: Path, *, batch_size: int = 4, max_staleness: int = 3, num_samples: int = 2, max_new_tokens: int = PER_TURN
) -> AsyncIterator[Floor]:
    """Open a buffer and a coordinator; rollout actors are added by the test."""
    if not (folder / "model").exists():
        make_tiny_model(folder / "model", preset="0p5m", seed=0)
    node = await Node.attach(name="floor")
    buffer = Buffer(
        source=NumberedRows(), ledger_path=folder / "ledger.sqlite", run="run-1",
        admission=Admission("pace", max_staleness=max_staleness, batch_size=batch_size), num_samples=num_samples,
        sampling=SamplingParams(max_new_tokens=max_new_tokens), group_filter=load_group_filters("none"),
    )  # fmt: skip
    coordinator = ToyCoordinator()
    try:
        await node.start(Monitor(folder, ()), name="monitor")
        await node.start(coordinator, name="coordinator")
        await node.start(buffer, name="buffer")
        yield Floor(node, buffer, coordinator, load_tokenizer(folder / "model"))
    finally:
        await node.close(grace_s=2.0)
