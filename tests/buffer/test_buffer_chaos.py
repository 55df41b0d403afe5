"""Rollout actors that die, lie and return, a trainer that goes back, a buffer that is restarted: the books balance."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.buffer.conftest import make_group, make_sample

from myxa.core.errors import CallError, RemoteError
from myxa.core.messages import Assignment, GroupDropped, GroupReturned

SEED = 4477
BATCH = 3
ETA = 2
NUM_ROWS = 90


class World:
    """Everybody but the buffer. `desk` is the buffer that is open now, None while it is down."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.desk: Any = None
        self.version = 0
        self.serving = [0, 0, 0]
        self.lineage = 1
        self.made_by = [1] * len(self.serving)
        """Lineage of what each engine serves."""
        self.trained: list[tuple[int, ...]] = []
        """Groups per step of the lineage that counts."""
        self.checkpoint = 0
        self.num_calls = 0
        self.num_restarts = 0
        self.crashes = {2, 9, 17}
        """Steps at which the trainer dies, once each."""
        self.is_needed = True
        self.is_over = False

    async def ask(self, verb: str, *args: Any) -> Any:
        """Call the buffer, again and again while it is down."""
        while True:
            try:
                if self.desk is not None:
                    self.num_calls += 1
                    return await getattr(self.desk.ref, verb)(*args)
            except RemoteError:
                raise
            except CallError:
                pass
            await asyncio.sleep(0.002)

    async def rollout(self, index: int) -> None:
        """One rollout actor over many incarnations."""
        name, epoch = f"rollout/{index}", 1
        while not self.is_over:
            desk = self.desk
            if desk is None:
                await asyncio.sleep(0.002)
                continue
            try:
                reply = await desk.draw(4, self.serving[index], name, epoch, 0.05, (), lineage=self.made_by[index])
            except CallError:
                continue
            for assignment in reply.assignments:
                await asyncio.sleep(self.rng.random() * 0.004)
                if self.rng.random() < 0.04:
                    epoch += 1
                    await self.ask("rollout_gone", name, epoch - 1)
                    self.serving[index] = self.version
                    break
                await self.answer(name, index, assignment)

    async def answer(self, name: str, index: int, assignment: Assignment) -> None:
        rng, group_id, version = self.rng, assignment.prompt.group_id, self.serving[index]
        fate = rng.random()
        if fate < 0.06:
            kept = make_sample(group_id, 0, [version], "abort")
            await self.ask(
                "return_group",
                GroupReturned(group_id=group_id, attempt=assignment.attempt, rollout=name, partial=(kept,)),
            )
            return
        if fate < 0.09:
            dropped = GroupDropped(group_id=group_id, attempt=assignment.attempt, rollout=name, reason="workflow-error")
            await self.ask("drop_group", dropped)
            return
        oldest = min([version, *(sample.oldest_version() for sample in assignment.partial)])
        group = make_group(assignment, versions=[oldest, self.serving[index]])
        if fate < 0.12:
            group = msgspec.structs.replace(group, samples=group.samples[:-1])
        await self.ask("put_group", group, assignment.attempt, name)
        if rng.random() < 0.1:
            again = msgspec.structs.replace(group, reward_parts=())
            assert (await self.ask("put_group", again, assignment.attempt, name)).outcome != "ready"

    async def train(self) -> None:
        while True:
            claim = await self.ask("claim", self.version, 0.05)
            if claim.finished:
                self.is_over = True
                return
            if not claim.groups:
                continue
            assert len(claim.groups) == BATCH
            ids = tuple(meta.group_id for meta in claim.groups)
            for group in await self.ask("fetch", ids):
                assert self.version - group.oldest_version() <= ETA
            await asyncio.sleep(self.rng.random() * 0.01)
            if self.version in self.crashes:
                self.crashes.discard(self.version)
                await self.go_back()
                continue
            await self.ask("trained", self.version)
            self.trained.append(ids)
            self.version += 1
            if self.version % 4 == 0:
                self.checkpoint = self.version - 1
                await self.ask("durable", self.checkpoint)

    async def go_back(self) -> None:
        """The trainer died in the middle of a step and starts again from its checkpoint; engines are rolled back."""
        self.version = self.checkpoint
        self.lineage += 1
        await self.ask("rewind", self.version, self.lineage)
        del self.trained[self.version :]
        self.serving = [min(version, self.version) for version in self.serving]

    async def adopt(self) -> None:
        """Engines follow, one after another."""
        while not self.is_over:
            index = self.rng.randrange(len(self.serving))
            if self.serving[index] < self.version:
                self.serving[index] += 1
                self.made_by[index] = self.lineage
                await self.ask("adopted", f"rollout/{index}", 1, self.serving[index], self.lineage)
            await asyncio.sleep(0.002)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("policy", ["pace", "wait", "drop"])
async def test_the_books_balance(shop: Any, rows: Any, policy: str) -> None:
    world = World(SEED)

    async def live() -> None:
        """Open the buffer again and again, for some calls each time, until nobody needs it any more."""
        while world.is_needed:
            async with shop.open(
                rows=rows(NUM_ROWS, 1), policy=policy, max_staleness=ETA, batch_size=BATCH
            ) as world.desk:
                until = world.num_calls + world.rng.randint(10, 40)
                while world.num_calls < until and world.is_needed:
                    await asyncio.sleep(0.005)
                world.desk = None
            world.num_restarts += 1

    async with asyncio.timeout(80):
        alive = asyncio.create_task(live())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.adopt())
            tasks.create_task(world.train())
            for index in range(3):
                tasks.create_task(world.rollout(index))
        world.is_needed = False
        await alive

    note = f"seed {SEED}, policy {policy}"
    assert world.num_restarts > 2, note
    assert not world.crashes, note
    counts = Counter(group_id for ids in world.trained for group_id in ids)
    assert set(counts.values()) == {1}, f"{note}: trained twice in one lineage"
    with sqlite3.connect(shop.path) as db:
        found = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall())
        trained = {row[0] for row in db.execute("SELECT group_id FROM groups WHERE state IN ('TRAINED', 'DURABLE')")}
        lasts = db.execute(
            "SELECT draw, GROUP_CONCAT(reason) FROM groups WHERE draw NOT IN "
            "(SELECT draw FROM groups WHERE state IN ('TRAINED', 'DURABLE')) GROUP BY draw"
        ).fetchall()
    db.close()
    assert trained == set(counts), note
    assert set(found) <= {"TRAINED", "DURABLE", "DROPPED"}, f"{note}: {found}"
    final = {"workflow-error", "invalid-samples", "leftover"}
    assert all(reasons.split(",")[-1] in final for _, reasons in lasts), f"{note}: {lasts}"
    assert len(trained) + len(lasts) == NUM_ROWS, f"{note}: a row is lost"
