"""A step has one deadline: ranks that hang, or are gone, are named, and nobody waits longer than for the first of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from myxa.actors.contracts import TrainerContract
from myxa.actors.telemetry import Reporter
from myxa.actors.trainer.train_loop import TrainerGang
from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.actor import Actor
from myxa.core.clock import SystemClock
from myxa.core.errors import TrainError
from myxa.core.protocols import StepStats
from myxa.core.samples import TrainShard
from myxa.transport.node import Node


class Rank(TrainerContract):
    """Answers when told to; a step hangs until then."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def train_shard(self, shard: TrainShard, knobs: dict[str, float]) -> StepStats:
        await self.may_answer.wait()
        return StepStats(metrics={"train/loss": knobs["lr"]})


class Asker(Actor):
    """Whose context the leader's calls have."""


@dataclass
class Gang:
    leader_node: Node
    nodes: list[Node]
    ranks: list[Rank]
    calls: TrainerGang


@asynccontextmanager
async def gang(step_timeout_s: float) -> AsyncIterator[Gang]:
    ranks = [Rank(), Rank(), Rank()]
    asker, clock = Asker(), SystemClock()
    leader_node = await Node.attach(name="launcher/0")
    nodes = [await Node.attach(name=f"rank-{i}", rdzv=leader_node.rendezvous) for i in range(len(ranks))]
    try:
        await leader_node.start(asker, name="asker")
        for number, (node, rank) in enumerate(zip(nodes, ranks, strict=True)):
            await node.start(rank, name=f"trainer/{number}")
        calls = TrainerGang(
            Reporter(asker.ctx, ActivityMeter("asker", clock), TelemetryBuffer("asker", clock)), len(ranks),
            shard_of_rank=(), step_timeout_s=step_timeout_s,
        )  # fmt: skip
        await asker.ctx.wait_for(*calls.ranks, timeout_s=20)
        yield Gang(leader_node, nodes, ranks, calls)
    finally:
        for node in (*nodes, leader_node):
            await node.close(grace_s=0)


SHARDS = tuple(
    TrainShard(step=5, samples=(), minibatches=(), minibatch_tokens=(), minibatch_rollouts=()) for _ in range(3)
)


async def test_who_has_not_answered_is_named_at_the_deadline():
    async with gang(2.0) as it:
        it.ranks[1].may_answer.set()
        began_s = time.monotonic()
        with pytest.raises(TrainError) as caught:
            await it.calls.train(SHARDS, {"lr": 1.0})
        assert 1.9 < time.monotonic() - began_s < 20
        assert "step 5 was not done within 2 s: no answer from trainer/0, trainer/2" in str(caught.value)
        assert "trainer.step_timeout_s" in str(caught.value)
        for rank in it.ranks:
            rank.may_answer.set()
        assert (await it.calls.train(SHARDS, {"lr": 2.0})).metrics == {"train/loss": 2.0}


async def test_a_rank_that_is_gone_ends_the_wait_at_once():
    async with gang(600.0) as it:
        step = asyncio.ensure_future(it.calls.train(SHARDS, {"lr": 1.0}))
        await asyncio.sleep(0.3)
        await it.nodes[2].close(grace_s=0)
        async with asyncio.timeout(20):
            with pytest.raises(TrainError, match="trainer/2 failed in step 5"):
                await step
