"""A million calls and a hundred thousand connections leave nothing behind: memory, objects and descriptors stay flat.

`make soak` runs the full numbers; the default suite a two-hundredth, which shows a leak of one object per call as well.
"""

from __future__ import annotations

import asyncio
import logging
import socket

import numpy as np
import pytest
from tests.faults.depot import Crate, DepotContract, pair
from tests.faults.growth import check_flat, check_work, held

from myxa.core.errors import CallError
from myxa.core.refs import with_deadline
from myxa.transport.node import Node

pytestmark = [pytest.mark.timeout(110)]

IN_FLIGHT = 64


def scaled(full: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "number", [full // 200, pytest.param(full, marks=[pytest.mark.soak, pytest.mark.timeout(1700)])]
    )


async def in_flight(num: int, work) -> None:
    """`work(i)` for i < num, IN_FLIGHT of them at any time."""
    numbers = iter(range(num))

    async def one_after_another() -> None:
        for i in numbers:
            await work(i)

    await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))


@scaled(1_000_000)
async def test_calls(tmp_path, number):
    """Calls of all kinds, and calls that end badly: late, refused, cancelled, broken off."""
    content = np.zeros(10, np.uint8)
    async with pair(tmp_path) as (near, _):
        depot = near.ref(DepotContract, "depot")
        hasty = with_deadline(depot, 0.01)

        async def one(i: int) -> None:
            kind = i % 100
            if kind == 0:
                await depot.store(Crate(name=f"crate-{i % 50}", content=content), 0.0)
            elif kind < 3:
                task = asyncio.get_running_loop().create_task(depot.work("t", 5.0))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif kind == 3 and i % 1000 == 3:
                with pytest.raises(CallError):
                    await hasty.work("t", 5.0)
            elif kind < 10:
                await depot.work("t", 0.0)
            else:
                await depot.whoami()

        await check_work(lambda num: in_flight(num, one), 4_000, number)
        assert len(near._session.calls) == 1  # the mirror's subscription


@scaled(100_000)
async def test_links_that_open_and_close(tmp_path, number, caplog):
    """The caller gives its peer up and finds it again: sockets, monitors and sessions of the old link are gone."""
    caplog.set_level(logging.CRITICAL, "myxa")
    async with pair(tmp_path) as (near, far):
        depot = near.ref(DepotContract, "depot")
        await depot.whoami()

        async def reopen(num: int) -> None:
            for _ in range(num):
                near._session.unreachable(far._key, "given up by the test")
                await depot.whoami()

        await check_work(reopen, 100, number)


@scaled(100_000)
async def test_strangers_that_connect_and_go(tmp_path, number):
    """Ports are scanned: connections without a word, with half a greeting, with nonsense."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(54, b"\0")
    async with pair(tmp_path, tcp=True) as (near, _):
        host, port = near.rendezvous.endpoints.tcp[0].removeprefix("tcp://").split(":")

        async def scan(num: int) -> None:
            for i in range(num):
                with socket.create_connection((host, int(port)), timeout=5) as stranger:
                    stranger.sendall((b"", greeting[:10], greeting, b"GET / HTTP/1.1\r\n\r\n")[i % 4])
                if i % 20 == 0:
                    await near.ref(DepotContract, "depot").whoami()

        await scan(200)
        await asyncio.sleep(0.5)
        before = held()
        await scan(number)
        for _ in range(100):
            await asyncio.sleep(0.1)
            if held().num_fds <= before.num_fds:
                break
        check_flat(before, held())


@pytest.mark.parametrize(
    "number", [40, pytest.param(2_000, marks=[pytest.mark.soak, pytest.mark.timeout(1700)])]
)  # fmt: skip
async def test_nodes_that_join_and_leave(tmp_path, number):
    """The same name again and again, as a process that is restarted: epochs count up, nothing else does."""
    async with pair(tmp_path) as (near, _):
        epochs: list[int] = []

        async def come_and_go(num: int) -> None:
            for _ in range(num):
                node = await Node.attach(name="guest", rdzv=near.rendezvous)
                await node.ref(DepotContract, "depot").whoami()
                epochs[:] = [*epochs[:1], node.epoch]
                await node.close(grace_s=0.0)

        await check_work(come_and_go, 12, number, per_type=2_100)  # the last 512 changes are remembered
        assert epochs[-1] == epochs[0] + 12 + number - 1
