"""Histories of the real buffer and real producers under SIGKILL, judged by a checker that is itself tested."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.put_history import History, faults_of
from tests.harness.decider import Decider
from tests.harness.programs import Program, start_program

from myxa.actors.contracts import BufferContract
from myxa.core.errors import CallError
from myxa.core.refs import with_deadline
from myxa.transport.node import Node

CHILD = Path(__file__).with_name("history_child.py")
PRODUCERS = ("rollout/0", "rollout/1", "rollout/2")
SPARE_DRAWS = 64
"""More than are drawn while the end of the data is written."""
GROUPS_BETWEEN = 8
"""Trained between two kills, at least."""


def sound() -> History:
    return History(
        put={1: {"a"}, 2: {"a", "b"}, 3: {"a"}, 4: {"a"}},
        acked={1: {"a"}, 2: {"b"}, 3: {"a"}},
        refused={2: {"a"}},
        trained=[(1, "a"), (2, "b")],
        ends={1: ("TRAINED", ""), 2: ("DURABLE", ""), 3: ("DROPPED", "leftover"), 4: ("REQUEUED", "")},
    )


def test_the_checker_bites():
    assert faults_of(sound()) == []
    for spoil, complaint in (
        (lambda h: h.trained.append((1, "a")), "group 1 was trained 2 times"),
        (lambda h: h.acked.update({9: {"a"}}), "group 9 was acknowledged and is lost"),
        (lambda h: h.put.update({1: {"z"}}), "group 1 was trained with 'a', which nobody put"),
        (lambda h: h.trained.__setitem__(1, (2, "a")), "group 2 was trained with 'a', which was refused"),
        (lambda h: h.ends.update({1: ("READY", "")}), "group 1 was trained, but the ledger has READY"),
    ):
        spoil(history := sound())
        assert any(fault.startswith(complaint) for fault in faults_of(history)), complaint


class Arena:
    """The registry and the trainer here; the buffer and the producers in processes that are killed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.folder = folder
        self.sockets = tempfile.mkdtemp(prefix="h-")
        self.processes: dict[str, Program] = {}
        self.kills: dict[str, int] = dict.fromkeys(("buffer", *PRODUCERS), 0)
        self.history = History()
        self.step = 0
        self.node: Node

    async def open(self) -> None:
        self.node = await Node.attach(name="launcher/0")
        self.node.rendezvous.save(self.folder / "rdzv.json")
        await self.node.start(Decider(), "coordinator")
        self._tell_version()
        for name in self.kills:
            await self.start(name)

    async def start(self, name: str) -> None:
        order = {"name": name, "folder": str(self.folder), "sockets": self.sockets, "seed": self.seed}
        self.processes[name] = await start_program(CHILD, json.dumps(order))

    async def kill(self, name: str) -> None:
        """SIGKILL, the report that a launcher makes, and the next incarnation."""
        process = self.processes[name]
        assert process.returncode is None, f"seed {self.seed}: {name} ended by itself with {process.returncode}"
        process.kill()
        status = await process.wait()
        self.kills[name] += 1
        await self.node.registry.process_exited(f"{name}-node", 0, status, pid=process.pid)
        await self.start(name)

    async def close(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        await self.node.close(grace_s=0.5)
        shutil.rmtree(self.sockets)

    def _tell_version(self) -> None:
        draft = self.folder / "version.draft"
        draft.write_text(str(self.step))
        draft.replace(self.folder / "version")

    async def ask(self, send: Callable[[], Awaitable[Any]]) -> Any:
        """Until it is answered."""
        while True:
            try:
                return await send()
            except CallError:
                await asyncio.sleep(0.03)

    async def train(self) -> None:
        """The one consumer: claims, fetches and trains until there is no whole batch any more."""
        buffer = with_deadline(self.node.ref(BufferContract, "buffer"), 5.0)
        while True:
            claim = await self.ask(lambda: buffer.claim(self.step, 0.2))
            if claim.finished:
                return
            if not claim.groups:
                continue
            ids = tuple(claim.groups)
            groups = await self.ask(lambda ids=ids: buffer.fetch(ids))
            assert tuple(group.group_id for group in groups) == ids
            await self.ask(lambda: buffer.trained(self.step))
            self.history.trained += [(group.group_id, group.samples[0].text) for group in groups]
            self.step += 1
            self._tell_version()

    async def torment(self, num_kills: int) -> None:
        """Kill somebody whenever work has gone on for a moment, now and then two; in the end nobody draws any more."""
        names = list(self.kills)
        while sum(self.kills.values()) < num_kills:
            goal = len(self.history.trained) + GROUPS_BETWEEN
            while len(self.history.trained) < goal:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.rng.random() * 0.2)
            # Everybody's turn comes, in an order that the seed decides; the buffer's twice as often.
            least = min(self.kills, key=lambda name: self.kills[name] / (2 if name == "buffer" else 1))
            victims = {least, self.rng.choice(names)} if self.rng.random() < 0.4 else {least}
            await asyncio.gather(*map(self.kill, sorted(victims)))
        buffer = with_deadline(self.node.ref(BufferContract, "buffer"), 5.0)
        drawn = (await self.ask(buffer.stats)).drawn
        (self.folder / "last_draw").write_text(str(drawn + SPARE_DRAWS))


async def check_history(seed: int, folder: Path, num_kills: int, limit_s: float) -> Arena:
    arena = Arena(seed, folder)
    await arena.open()
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
            tasks.create_task(arena.train())
            tasks.create_task(arena.torment(num_kills))
    finally:
        await arena.close()
    for journal in folder.glob("*.journal"):
        arena.history.read(journal)
    arena.history.read_ledger(folder / "ledger.sqlite")
    return arena


@pytest.mark.parametrize(
    ("num_kills", "limit_s"),
    [
        pytest.param(4, 90.0, marks=pytest.mark.timeout(110)),
        pytest.param(200, 1500.0, marks=[pytest.mark.soak, pytest.mark.timeout(1600)]),
    ],
)
async def test_no_acknowledged_group_is_lost_and_none_is_trained_twice(tmp_path, num_kills, limit_s):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    arena = await check_history(seed, tmp_path, num_kills, limit_s)
    history = arena.history
    print(f"kills {arena.kills}; {len(history.put)} put, {len(history.acked)} acked, {len(history.trained)} trained")
    assert faults_of(history) == []
    assert arena.kills["buffer"] >= max(1, num_kills // 6)
    assert len(history.trained) >= GROUPS_BETWEEN * (num_kills // 2)
