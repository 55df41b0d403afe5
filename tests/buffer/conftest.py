"""A buffer on a real node, with a dataset of numbered rows and a rollout actor's side of the talk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from tests.harness.decider import Decider, Outcome

from myxa.actors.buffer.buffer import Buffer
from myxa.actors.buffer.filters import GroupFilters
from myxa.actors.buffer.knobs import BufferLimits
from myxa.actors.contracts import BufferContract, DataContract
from myxa.actors.coordinator.knob_decisions import Decisions
from myxa.actors.monitor.monitor import Monitor
from myxa.algos.filters import GROUP_FILTERS, SampleFilter, learn_from_all
from myxa.algos.staleness import Admission
from myxa.core.clock import Clock
from myxa.core.knobs import KnobState, KnobValue
from myxa.core.messages import (
    Assignment,
    DrawBlock,
    DrawReply,
    DrawRequest,
    GroupFinished,
    GroupReturned,
    PutResult,
    SamplingParams,
)
from myxa.core.samples import Group, Message, Prompt, Sample
from myxa.transport.node import Node

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where ledgers of machines lie, which are opened hundreds of times: a disk would be waited for each time."""


@dataclass
class NumberedRows:
    """`num_rows` rows in file order, gone through `max_passes` times (0: for ever)."""

    num_rows: int = 1000
    max_passes: int = 0
    name: str = ""

    def __len__(self) -> int:
        return self.num_rows

    @property
    def fingerprint(self) -> str:
        return f"{self.name}-{self.num_rows}"

    @property
    def by_name(self) -> dict[str, Any]:
        """It is all the data there is."""
        return {"": self}

    weights = MappingProxyType[str, float]({})

    def row_of(self, draw: int) -> int | None:
        return None if self.max_passes and draw >= self.num_rows * self.max_passes else draw % self.num_rows

    def prompt(self, draw: int) -> Prompt | None:
        row = self.row_of(draw)
        if row is None:
            return None
        said = (Message(role="user", content=f"{self.name or 'row'} {row}"),)
        return Prompt(
            group_id=draw, row=row, pass_index=draw // self.num_rows, messages=said, source=self.name,
            source_name=self.name,
        )  # fmt: skip

    def num_held_out(self, name: str = "") -> int:
        return len(self.eval_prompts(1 << 30, name))

    def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        found = [self.prompt(draw) for draw in range(min(limit, 3))]
        return tuple(prompt for prompt in found if prompt is not None)


def make_sample(group_id: int, index: int, versions: Sequence[int], finish: Any = "stop") -> Sample:
    count = len(versions)
    return Sample(
        group_id=group_id, index=index, prompt_ids=np.array([1, 2, 3], dtype=np.int32),
        response_ids=np.arange(count, dtype=np.int32), logprobs=np.full(count, -0.5, dtype=np.float32),
        loss_mask=np.ones(count, dtype=np.uint8), versions=np.array(versions, dtype=np.int32), finish=finish,
        text=f"{group_id}/{index}",
    )  # fmt: skip


def make_group(
    assignment: Assignment, versions: Sequence[int] = (0, 0), rewards: Sequence[float] | None = None
) -> Group:
    prompt, count = assignment.prompt, assignment.num_samples
    values = rewards if rewards is not None else [float(i) for i in range(count)]
    return Group(
        prompt=prompt,
        samples=tuple(make_sample(prompt.group_id, i, versions) for i in range(count)),
        rewards=np.array(values, dtype=np.float32),
        reward_parts=tuple({"length": float(i)} for i in range(count)),
    )


@dataclass
class Desk:
    node: Node
    ref: BufferContract
    data: DataContract
    buffer: Buffer
    decider: Decider
    seen: list[Assignment] = field(default_factory=list)
    lineage: int = 1
    """Epoch of the trainer's leader; engines that say nothing else serve what it made."""

    async def draw(
        self, max_groups: int = 100, version: int = 0, rollout: str = "rollout/0", epoch: int = 1, wait_s: float = 0.0,
        holding: tuple[int, ...] | None = None, blocked_by: DrawBlock | None = None, lineage: int | None = None,
    ) -> DrawReply:  # fmt: skip
        request = DrawRequest(
            rollout=rollout, epoch=epoch, version=version, max_groups=max_groups, wait_s=wait_s, holding=holding,
            blocked_by=blocked_by, lineage=self.lineage if lineage is None else lineage,
        )  # fmt: skip
        reply = await self.ref.draw(request)
        self.seen += reply.assignments
        return reply

    async def put(
        self, assignment: Assignment, versions: Sequence[int] = (0, 0), rollout: str = "rollout/0"
    ) -> PutResult:
        return await self.put_group(make_group(assignment, versions), assignment.attempt, rollout)

    async def put_group(self, group: Group, attempt: int, rollout: str) -> PutResult:
        (result,) = await self.ref.put_groups((GroupFinished(group=group, attempt=attempt),), rollout)
        return result

    async def fill(self, max_groups: int = 100, version: int = 0, versions: Sequence[int] = (0, 0)) -> list[Assignment]:
        drawn = list((await self.draw(max_groups, version)).assignments)
        for assignment in drawn:
            assert (await self.put(assignment, versions)).outcome == "ready"
        return drawn

    async def give_back(self, assignment: Assignment, rollout: str = "rollout/0", **more: Any) -> None:
        told = {"group_id": assignment.prompt.group_id, "attempt": assignment.attempt, "rollout": rollout}
        await self.ref.return_group(GroupReturned(**told, **more))

    async def adopted(self, rollout: str, epoch: int, version: int) -> None:
        await self.ref.adopted(rollout, epoch, version, self.lineage)

    async def rewind(self, version: int) -> int:
        """The trainer's next leader goes on from `version`."""
        self.lineage += 1
        return await self.ref.rewind(version, self.lineage)

    async def change(self, epoch: int, **values: KnobValue) -> Outcome:
        return await self.decider.change(self.ref, epoch, **values)

    async def pause(self, at: int = 0) -> None:
        await self.decider.hold_from(self.ref, at)

    async def knobs(self) -> dict[str, KnobState]:
        return {state.tunable.name: state for state in (await self.ref.knobs()).knobs}

    async def failure(self) -> BaseException:
        """The error that ended the buffer, once it has ended."""
        async with asyncio.timeout(20):
            error = await self.node.failed
            while self.buffer.ctx.peers("buffer"):
                await asyncio.sleep(0.01)
        return error

    async def train(self, step: int) -> tuple[int, ...]:
        claim = await self.ref.claim(step, 0.0)
        ids = tuple(claim.groups)
        assert [group.group_id for group in await self.ref.fetch(ids)] == list(ids)
        assert ids
        await self.ref.trained(step)
        return ids


def make_buffer(
    path: Path,
    *,
    run: str = "run-1",
    rows: Any = None,
    policy: str = "pace",
    max_staleness: int = 1,
    batch_size: int = 2,
    num_samples: int = 2,
    group_filter: Callable[[Group], str | None] | str = GROUP_FILTERS["none"],
    of_samples: SampleFilter = learn_from_all,
    sampling: SamplingParams | None = None,
    limits: BufferLimits | None = None,
    resume_from: Path | None = None,
) -> Buffer:
    """`group_filter`: a function, which is then the run file's own and called "own", or the name of a built-in."""
    is_built_in = isinstance(group_filter, str)
    filters = GROUP_FILTERS if is_built_in else {**GROUP_FILTERS, "own": group_filter}
    return Buffer(
        source=rows or NumberedRows(),
        ledger_path=path,
        run=run,
        admission=Admission(policy, max_staleness=max_staleness, batch_size=batch_size),
        num_samples=num_samples,
        sampling=sampling or SamplingParams(max_new_tokens=4),
        group_filter=GroupFilters(group_filter if is_built_in else "own", filters, of_samples),
        limits=limits or BufferLimits(),
        resume_from=resume_from,
    )


@dataclass
class Shop:
    path: Path
    run: str = "run-1"
    decisions: Decisions = field(default_factory=lambda: Decisions("test"))

    @asynccontextmanager
    async def open(self, *, clock: Clock | None = None, **options: Any) -> AsyncIterator[Desk]:
        node = await Node.attach(name="buffer-node", clock=clock)
        buffer = make_buffer(self.path, run=self.run, **options)
        try:
            await node.start(Monitor(self.path.parent, ()), name="monitor")
            await node.start(decider := Decider(self.decisions), name="coordinator")
            await node.start(buffer, name="buffer")
            yield Desk(node, node.ref(BufferContract, "buffer"), node.ref(DataContract, "buffer"), buffer, decider)
        finally:
            await node.close(grace_s=0.3)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "ledger.sqlite")


@pytest.fixture(name="rows")
def rows_maker() -> Callable[..., NumberedRows]:
    return NumberedRows
