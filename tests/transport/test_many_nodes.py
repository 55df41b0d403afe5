"""What grows with the number of actors grows with it, not with its square: messages of a join, looks of those that wait."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from tests.harness.waiting import until
from tests.simulation.sim_network import Net
from tests.simulation.simulator import Sim, run
from tests.transport.cast_of_actors import Echo

from myxa.actors.telemetry import report_forever
from myxa.core.activity import TelemetryBuffer
from myxa.core.actor import Actor
from myxa.core.changes import LOOK_S, Changes
from myxa.core.clock import SystemClock
from myxa.core.errors import PeerDied
from myxa.core.ids import LEADER
from myxa.core.messages import Telemetry
from myxa.transport.node import Node
from myxa.transport.registry.directory import Directory, HostedActor
from myxa.transport.registry.registry import RegistryState
from myxa.transport.wire import Endpoints


class Light(Actor):
    pass


async def boot(node: Any) -> None:
    await node.start(Light(), f"light/{node.name}")


async def messages_of_a_join(num_nodes: int, seed: int) -> float:
    """Nodes come one after the other, 10 ms apart, until the first has heard of all."""
    async with Sim(seed, Net(delay_s=(0.0, 0.0005))) as sim:

        async def come(index: int) -> None:
            await asyncio.sleep(index * 0.01)
            await sim.node(f"n{index}", boot)

        await asyncio.gather(*map(come, range(num_nodes)))
        while len(sim.nodes["n0"].node.peers("light/")) < num_nodes:
            await asyncio.sleep(0.01)
        num_sent = sum(" send " in line for line in sim.log.lines())
        await sim.quiet()
    return num_sent / num_nodes


def test_a_join_takes_as_many_messages_with_64_nodes_as_with_16() -> None:
    few, many = (run(lambda seed, num=num: messages_of_a_join(num, seed), 7) for num in (16, 64))
    assert many < 1.6 * few, f"seed 7: {few:.0f} and {many:.0f} messages a node"


def records_told(num_rollouts: int) -> int:
    """All that mirrors are told, which look after each that comes, while a run with so many rollout actors starts."""
    state, mirrors, num = RegistryState(), dict[str, Directory](), 0
    for name in ("launcher/0", "buffer", "monitor", LEADER, *(f"rollout/{index}" for index in range(num_rollouts))):
        epoch, mirrors[name] = state.register(name, Endpoints(inproc=name)).epoch, Directory()
        state.announce(name, epoch, (HostedActor(name=name, index=0, handlers=()),), {})
        for mine, mirror in mirrors.items():
            for update in state.since(mirror.version, mine):
                mirror.apply(update)
                num += len(update.nodes)
            assert mirror.version == state.version
    assert mirrors["buffer"].names("rollout/") == tuple(sorted(f"rollout/{index}" for index in range(num_rollouts)))
    return num


def test_what_a_crowd_is_told_grows_with_its_number_and_not_with_its_square() -> None:
    few, many = records_told(50), records_told(200)
    assert many < 4.4 * few, f"{few} and {many}"


@pytest.mark.parametrize("kind", ["inproc", "ipc", "tcp"], indirect=True)
async def test_processes_of_crowds_hear_of_each_other_once_one_asks_for_the_other(world: Any) -> None:
    async def come(name: str) -> Node:
        node = await world.join(name)
        await node.start(Echo(), name)
        return node

    names = ("buffer", "rollout/0", "rollout/1", "trainer/1")
    buffer, first, second, trainer = [await come(name) for name in names]
    await buffer.wait_for(*names, timeout_s=20)
    await first.wait_for("buffer", timeout_s=20)
    assert not {"rollout/1", "trainer/1"} & set(first.peers(""))
    callee = first.ref(Echo, "trainer/1")
    assert await callee.ping() > 0
    await until(lambda: "rollout/0" in trainer.peers(""), "the callee hears of the caller")
    assert "rollout/1" not in (*first.peers(""), *trainer.peers(""))
    pending = asyncio.create_task(callee.sleep(60))
    while "asleep" not in await callee.seen():
        await asyncio.sleep(0.01)
    await world.host.registry.process_exited("trainer/1", trainer.epoch, -9)
    with pytest.raises(PeerDied, match="SIGKILL"):
        await pending
    await come("trainer/1")
    await first.wait_for("trainer/1", timeout_s=20)
    assert await callee.seen() == [], "the next incarnation"
    waiting = asyncio.create_task(second.wait_for("rollout/2", timeout_s=10))
    await asyncio.sleep(0.1)
    await come("rollout/2")
    await waiting
    assert await second.ref(Echo, "rollout/2").ping() > 0


async def test_a_node_joins_while_more_than_a_thousand_wait_for_news() -> None:
    host = await Node.attach(name="launcher/0")
    others = [await Node.attach(name=f"n{index}", rdzv=host.rendezvous) for index in range(3)]
    try:
        version = await others[0].registry.announce(others[0].name, others[0].epoch, (), {})
        async with asyncio.timeout(20):
            while host._mirror.directory.version != version:
                await asyncio.sleep(0.01)
        requests = [asyncio.create_task(node.registry.updates(version)) for node in others for _ in range(500)]
        async with asyncio.timeout(20):
            while host.num_waiting() < len(requests):
                await asyncio.sleep(0.01)
        others.append(await Node.attach(name="late", rdzv=host.rendezvous, timeout_s=20))
        answers = await asyncio.gather(*requests)
        assert all(updates[-1].nodes[0].name == "late" for updates in answers)
    finally:
        for node in (*others, host):
            await node.close(grace_s=1.0)


async def test_actors_report_less_often_to_a_monitor_that_has_much_to_do() -> None:
    num_actors, each_s, turn, num_taken = 16, 0.02, asyncio.Lock(), 0

    async def slow(bundle: Telemetry) -> None:
        nonlocal num_taken
        num_taken += 1
        async with turn:
            await asyncio.sleep(each_s)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        buffers = [TelemetryBuffer(f"rollout/{index}", SystemClock()) for index in range(num_actors)]
        tasks = [group.create_task(report_forever(buffer, slow, 0.01)) for buffer in buffers]
        began_s = time.monotonic()
        for _ in range(100):
            for buffer in buffers:
                buffer.event("beat", "")
            await asyncio.sleep(0.01)
        num_in_time, elapsed_s = num_taken, time.monotonic() - began_s
        for task in tasks:
            task.cancel()
    assert num_actors <= num_in_time <= 2 * num_actors * max(1.0, elapsed_s), num_in_time


async def test_looks_are_bounded_however_often_something_changes_and_the_last_change_is_seen() -> None:
    changes, num_waiting, value, num_looks = Changes(), 64, 0, 0

    async def wait_for(number: int) -> None:
        def has_come() -> bool:
            nonlocal num_looks
            num_looks += 1
            return value >= number

        assert await changes.until(has_come, 10.0)

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_waiting):
            group.create_task(wait_for(200))
        for number in range(1, 201):
            await asyncio.sleep(0.001)
            value = number
            changes.tell()
    num_rounds = (time.monotonic() - began_s) / (num_waiting * LOOK_S)
    assert num_looks <= num_waiting * (num_rounds + 3)


async def test_one_that_waits_alone_hears_at_once_and_none_waits_longer_than_it_said() -> None:
    changes = Changes()
    asyncio.get_running_loop().call_soon(changes.tell)
    assert await changes.next(10.0)
    assert not await changes.next(0.01)
    assert not await changes.until(lambda: False, 0.01)
