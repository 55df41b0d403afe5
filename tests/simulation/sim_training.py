"""The real buffer, with its ledger on disk, between scripted rollout actors and a scripted trainer, all of which crash.

The ledger is SQLite without threads, so it runs on virtual time as it is; a crash closes its file as the kernel would.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.buffer.conftest import NumberedRows
from tests.harness.decider import Decider
from tests.simulation.sim_network import Net
from tests.simulation.simulator import Nemesis, Sim, carry_out

from myxa.actors.buffer.buffer import Buffer
from myxa.actors.buffer.filters import GroupFilters
from myxa.actors.contracts import BufferContract
from myxa.algos.filters import keep_all
from myxa.algos.staleness import Admission
from myxa.core.actor import Actor
from myxa.core.errors import CallError, RemoteError
from myxa.core.messages import Assignment, DrawRequest, GroupDropped, GroupFinished, GroupReturned, SamplingParams
from myxa.core.refs import with_deadline
from myxa.core.retry import until_answered
from myxa.core.samples import Group, Sample

BATCH = 2
CHECKPOINT_EVERY = 3


@dataclass
class Plant:
    """What outlives processes: the published version (shared memory), the trainer's checkpoint, the world's notes."""

    eta: int
    published: int = 0
    lineage: int = 0
    """Epoch of the leader that published it."""
    checkpoint: int = 0
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Step -> groups, as the trainer's weights have seen them in the lineage that counts."""
    is_over: bool = False
    wrong: list[str] = field(default_factory=list)
    num_puts: int = 0


def sample(group_id: int, index: int, versions: list[int], finish: Any = "stop") -> Sample:
    count = len(versions)
    return Sample(
        group_id=group_id, index=index, prompt_ids=np.array([1, 2], dtype=np.int32),
        response_ids=np.arange(count, dtype=np.int32), logprobs=np.full(count, -0.5, dtype=np.float32),
        loss_mask=np.ones(count, dtype=np.uint8), versions=np.array(versions, dtype=np.int32), finish=finish,
    )  # fmt: skip


class Script(Actor):
    """Asks the buffer again and again, as the real roles do."""

    def __init__(self, plant: Plant, rng: random.Random) -> None:
        self.plant = plant
        self.rng = rng

    async def ask(self, verb: str, *args: Any, deadline_s: float = 5.0) -> Any:
        ref = with_deadline(self.ctx.ref(BufferContract, "buffer"), deadline_s)
        return await until_answered(
            lambda: getattr(ref, verb)(*args), who="buffer", clock=self.ctx.clock, log=self.ctx.log, give_up_s=600.0
        )


class RolloutScript(Script):
    """Draws, takes its time, puts; adopts what is published."""

    async def on_start(self) -> None:
        self.version, self.lineage = self.plant.published, self.plant.lineage
        self.in_hand: set[int] = set()
        self.ctx.spawn(self._draw(), name="draw")
        self.ctx.spawn(self._adopt(), name="adopt")

    async def _adopt(self) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(0.05, 0.3))
            if (self.version, self.lineage) != (self.plant.published, self.plant.lineage):
                self.version, self.lineage = self.plant.published, self.plant.lineage
                await self.ask("adopted", self.ctx.name, self.ctx.epoch, self.version, self.lineage)

    async def _draw(self) -> None:
        while True:
            request = DrawRequest(
                rollout=self.ctx.name, epoch=self.ctx.epoch, version=self.version, max_groups=3, wait_s=1.0,
                holding=tuple(sorted(self.in_hand)), lineage=self.lineage,
            )  # fmt: skip
            try:
                reply = await with_deadline(self.ctx.ref(BufferContract, "buffer"), 2.0).draw(request)
            except RemoteError:
                raise
            except CallError:
                await asyncio.sleep(0.2)
                continue
            if reply.blocked_by == "finished":
                await asyncio.sleep(0.5)  # a trainer that goes back may need more
            for assignment in reply.assignments:
                self.in_hand.add(assignment.prompt.group_id)
                self.ctx.spawn(self._answer(assignment), name=f"group {assignment.prompt.group_id}")

    async def _answer(self, assignment: Assignment) -> None:
        group_id, began = assignment.prompt.group_id, self.version
        await asyncio.sleep(self.rng.random() * 0.4)
        fate = self.rng.random()
        common = {"group_id": group_id, "attempt": assignment.attempt, "rollout": self.ctx.name}
        if fate < 0.05:
            part = sample(group_id, 0, [began], "abort")
            await self.ask("return_group", GroupReturned(**common, partial=(part,)))
        elif fate < 0.08:
            await self.ask("drop_group", GroupDropped(**common, reason="workflow-error"))
        else:
            oldest = min([began, *(part.oldest_version() for part in assignment.partial)])
            members = tuple(sample(group_id, i, [oldest, self.version]) for i in range(assignment.num_samples))
            rewards = np.arange(len(members), dtype=np.float32)
            group = Group(prompt=assignment.prompt, samples=members, rewards=rewards)
            finished = (GroupFinished(group=group, attempt=assignment.attempt),)
            await self.ask("put_groups", finished, self.ctx.name, deadline_s=30.0)
            self.plant.num_puts += 1
        self.in_hand.discard(group_id)


class TrainerScript(Script):
    """Claims, trains, checkpoints; starts again from its checkpoint."""

    async def on_start(self) -> None:
        self.ctx.spawn(self._lead(), name="lead")

    async def _lead(self) -> None:
        plant, version = self.plant, self.plant.checkpoint
        plant.is_over = False
        await self.ask("rewind", version, self.ctx.epoch)
        plant.trained = {step: ids for step, ids in plant.trained.items() if step < version}
        plant.published, plant.lineage = version, self.ctx.epoch
        while True:
            claim = await self.ask("claim", version, 1.0)
            if claim.finished:
                plant.is_over = True
                return
            if not claim.groups:
                continue
            ids = tuple(claim.groups)
            for group in await self.ask("fetch", ids):
                lag = version - group.oldest_version()
                if lag > plant.eta:
                    plant.wrong.append(f"step {version} trains group {group.group_id} with lag {lag}")
            await asyncio.sleep(self.rng.random() * 0.2)
            plant.trained[version] = ids
            await self.ask("trained", version)
            version += 1
            plant.published = version
            if version % CHECKPOINT_EVERY == 0:
                plant.checkpoint = version
                await self.ask("durable", version)


async def training(seed: int, folder: Path) -> Sim:
    """Two or three rollout actors and a trainer over one buffer, until the data is used up."""
    rng = random.Random(f"{seed}/training")
    plant = Plant(eta=rng.choice((0, 1, 2)))
    rows = NumberedRows(rng.choice((9, 14)), max_passes=1)
    ledger = folder / f"{seed}.sqlite"
    policy = rng.choice(("pace", "wait", "drop"))
    buffers: list[Buffer] = []

    async def open_buffer(node: Any) -> None:
        buffers.append(
            Buffer(
                source=rows, ledger_path=ledger, run="run-1", num_samples=2,
                admission=Admission(policy, max_staleness=plant.eta, batch_size=BATCH),
                sampling=SamplingParams(max_new_tokens=4), group_filter=GroupFilters("none", {"none": keep_all}),
            )
        )  # fmt: skip
        await node.start(buffers[-1], "buffer")

    def buffer_killed() -> None:
        opened = buffers[-1]._opened if buffers else None
        if opened is not None:
            opened[0].ledger.close()

    async with Sim(seed, Net(delay_s=(0.0, 0.02))) as sim:

        async def open_coordinator(node: Any) -> None:
            await node.start(Decider(), "coordinator")

        await sim.node("coordinator", open_coordinator)
        await sim.node("buffer", open_buffer, on_crash=buffer_killed)
        names = [f"rollout-{i}" for i in range(rng.choice((2, 3)))]
        for index, name in enumerate(names):

            async def open_rollout(node: Any, index: int = index) -> None:
                await node.start(RolloutScript(plant, random.Random(rng.random())), f"rollout/{index}")

            await sim.node(name, open_rollout)

        async def open_trainer(node: Any) -> None:
            await node.start(TrainerScript(plant, random.Random(rng.random())), "trainer/0")

        await sim.node("trainer", open_trainer)
        sim.degrade(Net(drop=rng.choice((0.0, 0.003)), duplicate=rng.choice((0.0, 0.02)), delay_s=(0.0, 0.05)))
        schedule = Nemesis(lasts_s=(0.05, 2.0)).schedule(
            rng, ["buffer", "trainer", *names], rng.choice((0.0, 3.0, 6.0))
        )
        await carry_out(sim, schedule)
        sim.degrade(Net())
        async with asyncio.timeout(600):
            while not plant.is_over:
                await asyncio.sleep(0.5)
        for name in names:
            await sim.spawn(name, sim.nodes[name].node.stop(f"rollout/{name[-1]}"))
        await sim.quiet()
        for text in [*plant.wrong, *books(ledger, plant, rows.num_rows)]:
            sim.audit.find(text)
        for who, error in sim.failures:
            sim.audit.find(f"{who} failed: {error!r}")
    return sim


def books(ledger: Path, plant: Plant, num_rows: int) -> list[str]:
    """What is wrong in the ledger: a prompt lost or trained twice, a batch that is not the one that was trained."""
    db = sqlite3.connect(ledger)
    try:
        found = db.execute("SELECT step, group_id FROM groups WHERE state IN ('TRAINED', 'DURABLE')").fetchall()
        draws = Counter(
            draw for (draw,) in db.execute("SELECT draw FROM groups WHERE state IN ('TRAINED', 'DURABLE')").fetchall()
        )
        open_states = db.execute(
            "SELECT group_id, state FROM groups WHERE state NOT IN ('TRAINED', 'DURABLE', 'DROPPED')"
        )
        wrong = [f"group {group_id} is still {state}" for group_id, state in open_states.fetchall()]
        known = {draw for (draw,) in db.execute("SELECT DISTINCT draw FROM groups").fetchall()}
        last = db.execute(
            "SELECT draw, reason FROM groups WHERE state = 'DROPPED' AND group_id NOT IN (SELECT redraw_of FROM groups)"
        ).fetchall()
    finally:
        db.close()
    wrong += [f"prompt {draw} was trained {count} times" for draw, count in draws.items() if count != 1]
    final = {"workflow-error", "leftover"}
    wrong += [f"prompt {draw} is lost: {reason}" for draw, reason in last if reason not in final and not draws[draw]]
    if known != set(range(num_rows)):
        wrong.append(f"of {num_rows} prompts only {sorted(known)} were drawn")
    by_step: dict[int, set[int]] = {}
    for step, group_id in found:
        by_step.setdefault(step, set()).add(group_id)
    if by_step != {step: set(ids) for step, ids in plant.trained.items()}:
        wrong.append(f"the ledger says {by_step}, the trainer trained {plant.trained}")
    return wrong
