"""Real processes and sockets: the buffer's process is killed with SIGKILL and started again, and a rollout's too."""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from myxa.actors.contracts import BufferContract
from myxa.core.errors import CallError
from myxa.core.messages import DrawRequest
from myxa.core.refs import with_deadline
from myxa.core.samples import Group
from myxa.transport.node import Node

SEED = 31
NUM_KILLS = 3
PATIENCE_S = 40.0


class Host:
    """The registry's node, and children that host one actor each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sockets = tempfile.mkdtemp(prefix="b-")
        self.children: list[asyncio.subprocess.Process] = []
        self.node: Node

    async def found(self) -> None:
        self.node = await Node.attach(name="launcher/0")
        self.node.rendezvous.save(self.folder / "rdzv.json")

    async def child(self, name: str) -> asyncio.subprocess.Process:
        words = [str(self.folder / "rdzv.json"), self.sockets, name, str(self.folder / "ledger.sqlite")]
        child = await asyncio.create_subprocess_exec(sys.executable, str(Path(__file__).with_name("child.py")), *words)
        self.children.append(child)
        return child

    async def kill(self, child: asyncio.subprocess.Process) -> None:
        child.kill()
        await child.wait()

    async def close(self) -> None:
        for child in self.children:
            if child.returncode is None:
                await self.kill(child)
        await self.node.close(grace_s=0.5)
        shutil.rmtree(self.sockets)


@pytest_asyncio.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    made = Host(tmp_path)
    await made.found()
    yield made
    await made.close()


@pytest.mark.asyncio
@pytest.mark.timeout(110)
async def test_training_goes_on_over_a_killed_buffer(host: Host, make_group: Callable[..., Group]) -> None:
    """The trainer and one rollout actor ask until they are answered; whatever is killed when, the books balance."""
    rng = random.Random(SEED)
    buffer = with_deadline(host.node.ref(BufferContract, "buffer"), 5.0)
    trained: list[int] = []
    holding: set[int] = set()

    async def ask(send: Callable[[], Any]) -> Any:
        while True:
            try:
                return await send()
            except CallError:
                await asyncio.sleep(0.05)

    async def roll() -> None:
        while len(trained) < 60:
            version = len(trained) // 2
            request = DrawRequest(
                rollout="rollout/0", epoch=1, version=version, max_groups=3, wait_s=0.1, holding=tuple(holding)
            )
            for assignment in (await ask(lambda request=request: buffer.draw(request))).assignments:
                group, group_id = make_group(assignment, versions=(version,)), assignment.prompt.group_id
                holding.add(group_id)
                result = await ask(lambda g=group, a=assignment.attempt: buffer.put_group(g, a, "rollout/0"))
                holding.discard(group_id)
                assert result.outcome in ("ready", "duplicate"), f"seed {SEED}: {result}"

    async def train() -> None:
        while len(trained) < 60:
            step = len(trained) // 2
            claim = await ask(lambda step=step: buffer.claim(step, 0.2))
            if claim.groups:
                ids = tuple(meta.group_id for meta in claim.groups)
                groups = await ask(lambda ids=ids: buffer.fetch(ids))
                assert [group.group_id for group in groups] == list(ids)
                assert all(step - group.oldest_version() <= 1 for group in groups), f"seed {SEED}"
                await ask(lambda step=step: buffer.trained(step))
                trained.extend(ids)

    child = await host.child("buffer")
    async with asyncio.timeout(PATIENCE_S * 2), asyncio.TaskGroup() as tasks:
        tasks.create_task(roll())
        tasks.create_task(train())
        for kill in range(NUM_KILLS):
            while len(trained) < (kill + 1) * 12:
                await asyncio.sleep(0.01)
            await asyncio.sleep(rng.random() * 0.05)
            await host.kill(child)
            child = await host.child("buffer")
    assert len(trained) == len(set(trained)) == 60, f"seed {SEED}"
    stats = await ask(buffer.stats)
    assert stats.trained == 60
    assert stats.dropped == {}


@pytest.mark.asyncio
@pytest.mark.timeout(110)
async def test_groups_of_a_killed_rollout_actor_go_elsewhere(host: Host) -> None:
    """The launcher tells the registry, the registry those who watch: no rollout actor has to ask for it."""
    buffer = host.node.ref(BufferContract, "buffer")
    await host.child("buffer")
    victim = await host.child("rollout/0")
    await host.node.wait_for("buffer", "rollout/0", timeout_s=PATIENCE_S)
    await until(buffer, "DISPATCHED")
    await host.kill(victim)
    await host.node.registry.process_exited("rollout/0-node", 0, -9)
    await until(buffer, "REQUEUED")


async def until(buffer: BufferContract, state: str) -> None:
    """Both groups are in that state."""
    async with asyncio.timeout(PATIENCE_S):
        while (await buffer.stats()).states != {state: 2}:
            await asyncio.sleep(0.05)
