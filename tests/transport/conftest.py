"""Worlds of nodes over each transport, and the strict leak check of this folder.

After each test: no task, no thread, no child process, no open ZeroMQ socket or context, no new file descriptor, nothing
in /dev/shm, no socket directory.
"""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop
import zmq
from tests.harness.commands import left_processes
from tests.harness.inproc import InprocNetwork
from tests.harness.own_segments import own_segments
from tests.harness.programs import Program, start_program
from tests.harness.waiting import until

from myxa.core.actor import Actor
from myxa.transport.node import JobKey, Node

PATIENCE_S = 20.0
CHILD = Path(__file__).parent / "child.py"


ZMQ_THINGS: weakref.WeakSet[Any] = weakref.WeakSet()


def remember(kind: type) -> None:
    """Every context and socket that is made from now on: asking the garbage collector costs 0.1 s per test."""
    original = kind.__init__

    def remembered(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        ZMQ_THINGS.add(self)

    kind.__init__ = remembered


remember(zmq.Context)
remember(zmq.Socket)


def zmq_things() -> list[str]:
    return [repr(thing) for thing in ZMQ_THINGS if not thing.closed]


def open_fds() -> list[str]:
    targets: list[str] = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(link.readlink()))
        except OSError:
            continue  # the listing's own
    return sorted(targets)


def held() -> Counter[str]:
    """Of this process alone: others of the suite work beside it."""
    return Counter(
        [
            *(f"thread {t.name}" for t in threading.enumerate()),
            *left_processes(),
            *(f"segment {name}" for name in own_segments()),
            *("ZeroMQ's" for _ in zmq_things()),
        ]
    )


@pytest.fixture(scope="session", autouse=True)
def uvloop_is_warm() -> None:
    """Its first loop opens a pipe that stays with the process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    before, fds_before = held(), open_fds()
    yield
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        after, fds = held(), open_fds()
        new: list[Any] = sorted((after - before).elements())  # not what an earlier test left, and has gone meanwhile
        if len(fds) > len(fds_before):
            new.append((fds_before, fds))
        if not new or time.monotonic() > give_up_at:
            break
        gc.collect()
        time.sleep(0.02)
    assert not new, f"left behind: {new}"


class World:
    """Nodes of one test over one kind of transport."""

    def __init__(self, kind: str, tmp: Path) -> None:
        self.kind = kind
        self.network = InprocNetwork() if kind == "inproc" else None
        self.key = JobKey.generate() if kind == "tcp" else None
        self.tmp = tmp
        self.sockets = Path(tempfile.mkdtemp(prefix="w-"))  # a killed child leaves its socket directory behind
        self.nodes: list[Node] = []
        self.children: list[Program] = []
        self.host: Node

    async def found(self) -> Node:
        tcp = "127.0.0.1:0" if self.kind == "tcp" else ""
        self.host = await Node.attach(name="launcher/0", network=self.network, key=self.key, tcp=tcp)
        self.nodes.append(self.host)
        return self.host

    async def join(self, name: str, **options: Any) -> Node:
        rank = len(self.nodes) if self.kind == "tcp" else 0
        node = await Node.attach(
            name=name, rdzv=self.host.rendezvous, network=self.network, key=self.key, node_rank=rank, **options
        )
        self.nodes.append(node)
        return node

    async def pair(self, actor: Actor, name: str = "callee") -> tuple[Node, Node]:
        """Two nodes beside the registry's; the second hosts the actor."""
        near = await self.join("near")
        far = await self.join("far")
        await far.start(actor, name)
        await near.wait_for(name, timeout_s=20)
        return near, far

    async def child(self, name: str, *args: str) -> Program:
        """A process of its own that joins and hosts the actors of `child.py`."""
        rdzv = self.tmp / "rdzv.json"
        self.host.rendezvous.save(rdzv)
        key = self.tmp / "job.key"
        if self.key is not None and not key.exists():
            self.key.save(key)
        process = await start_program(CHILD, str(rdzv), str(key) if self.key else "", str(self.sockets), name, *args)
        self.children.append(process)
        return process

    async def close(self) -> None:
        for process in self.children:
            if process.returncode is None:
                process.kill()
            await process.wait()
        for node in reversed(self.nodes):
            await node.close(grace_s=1.0)
        shutil.rmtree(self.sockets)


@pytest.fixture
def seed() -> int:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it with a failure
    return seed


@pytest.fixture(params=["inproc", "ipc"])
def kind(request: pytest.FixtureRequest) -> str:
    """Beside these, tcp: `pytest.mark.parametrize("kind", ["tcp"], indirect=True)`."""
    return request.param


@pytest_asyncio.fixture
async def world(kind: str, tmp_path: Path) -> AsyncIterator[World]:
    world = World(kind, tmp_path)
    await world.found()
    yield world
    await world.close()
    await no_tasks_left()


async def no_tasks_left() -> None:
    mine = {asyncio.current_task()}
    await until(lambda: asyncio.all_tasks() <= mine, lambda: f"the end of {asyncio.all_tasks() - mine}")
