"""Whom a manager has watched on other nodes, also when agents refuse or are not there; over real sockets."""

from __future__ import annotations

import asyncio
import subprocess

import pytest
from tests.harness.waiting import until

from myxa.actors.contracts import NodeAgentContract
from myxa.actors.tenancy import node_agent
from myxa.actors.tenancy.node_agent import NodeWatch, has_ended
from myxa.core.actor import Actor
from myxa.core.device_memory import WatchedProcess
from myxa.core.errors import MemoryFault
from myxa.core.process import start_time
from myxa.memory.meters import DeviceMeters
from myxa.transport.node import Node

pytestmark = [pytest.mark.timeout(30)]

ONE, OTHER = WatchedProcess(1, 4_000_001, 7), WatchedProcess(1, 4_000_002, 8)


class Agent(NodeAgentContract):
    """Says what the test has it say."""

    def __init__(self) -> None:
        self.asked: list[set[WatchedProcess]] = []
        self.refusals = 2
        self.ended: set[WatchedProcess] = set()

    async def gone(self, processes: tuple[WatchedProcess, ...]) -> tuple[WatchedProcess, ...]:
        self.asked.append(set(processes))
        if self.refusals:
            self.refusals -= 1
            raise MemoryFault("not now", remedy="later")
        return tuple(self.ended.intersection(processes))


class Manager(Actor):
    """It watches."""

    def __init__(self) -> None:
        self.ended: list[WatchedProcess] = []

    async def on_start(self) -> None:
        self.sight = NodeWatch(self.ctx, node=0, agents={1: "memory/1"}, meter=DeviceMeters(), on_end=self.ended.append)


async def test_an_agent_is_asked_until_it_answers_and_an_end_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "ASK_AGAIN_S", 0.05)
    here = await Node.attach(name="launcher/0")
    there = await Node.attach(name="there", rdzv=here.rendezvous)
    manager, agent = Manager(), Agent()
    try:
        await here.start(manager, "memory/0")
        for process in (ONE, OTHER):
            assert manager.sight.watch(process)
        await asyncio.sleep(0.2)  # there is no agent yet
        await there.start(agent, "memory/1")
        await until(lambda: len(agent.asked) > 3)
        assert agent.asked[:3] == [{ONE, OTHER}] * 3 and not manager.ended
        agent.ended = {ONE}
        await until(lambda: agent.asked[-1] == {OTHER})
        assert manager.ended == [ONE]
    finally:
        await there.close()
        await here.close()


async def test_the_next_process_of_a_number_is_not_taken_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has ended, and nobody has looked yet."""
    monkeypatch.setattr(node_agent, "ASK_AGAIN_S", 0.05)
    here = await Node.attach(name="launcher/0")
    manager = Manager()
    child = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220
    process = WatchedProcess(0, child.pid, start_time(child.pid))
    try:
        await here.start(manager, "memory/0")
        assert manager.sight.watch(process) and manager.sight.watch(process)
        assert not manager.sight.watch(WatchedProcess(0, child.pid, process.started_at + 1))
        child.kill()
        await until(lambda: has_ended(child.pid, process.started_at))  # nobody has reaped it
        child.wait()
        await until(lambda: bool(manager.ended))
        await asyncio.sleep(0.1)
        assert manager.ended == [process] and not manager.sight.watch(process)
    finally:
        child.kill()
        child.wait()
        await here.close()
