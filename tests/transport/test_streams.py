"""Streams: in order, paced by the consumer, gap-free or broken, and ended on both sides."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.harness.waiting import until
from tests.transport.cast_of_actors import Echo, EchoContract

from myxa.core.actor import Actor
from myxa.core.errors import CallError, EngineError
from myxa.core.handlers import stream
from myxa.core.refs import with_deadline

pytestmark = [pytest.mark.timeout(30)]


async def test_items_come_in_order_also_when_they_take_different_lanes(world):
    near, _ = await world.pair(Echo())
    got = [item async for item in near.ref(EchoContract, "callee").count(0, 40)]
    assert [item.name for item in got] == [str(i) for i in range(40)]
    for i, item in enumerate(got):
        np.testing.assert_array_equal(item.values, np.full(item.values.shape, i, np.float32))


async def test_a_slow_consumer_holds_the_producer_back(world):
    echo = Echo()
    near, _ = await world.pair(echo)
    items = near.ref(EchoContract, "callee").count(0, 1000)
    first = await anext(items)
    assert first.name == "0"
    await asyncio.sleep(0.2)
    assert len(echo.log) <= 8 + 2  # the window, and the one being made
    second = await anext(items)
    assert second.name == "1"
    await items.aclose()
    await until(lambda: echo.log[-1] == "stream over")
    assert len(echo.log) < 20


async def test_an_error_in_the_middle_comes_after_the_items_before_it(world):
    class Faulty(Actor):
        @stream(window=4)
        async def numbers(self, n: int):
            for i in range(n):
                yield i
            raise EngineError("no more")

        numbers.__annotations__["return"] = "AsyncIterator[int]"

    from collections.abc import AsyncIterator

    globals()["AsyncIterator"] = AsyncIterator
    near, _ = await world.pair(Faulty())
    got = []
    with pytest.raises(EngineError, match="no more"):
        async for i in near.ref(Faulty, "callee").numbers(10):
            got.append(i)
    assert got == list(range(10))


async def test_a_deadline_bounds_the_whole_stream(world):
    echo = Echo()
    near, _ = await world.pair(echo)
    with pytest.raises(CallError, match="deadline"):
        async for _ in with_deadline(near.ref(EchoContract, "callee"), 0.3).count(0, 1_000_000):
            await asyncio.sleep(0.05)
    await until(lambda: echo.log[-1] == "stream over")


async def test_the_end_of_the_consumer_ends_the_handler(world):
    echo = Echo()
    near, _ = await world.pair(echo)
    items = near.ref(EchoContract, "callee").count(0, 1000)
    await anext(items)
    await near.close(grace_s=0)
    world.nodes.remove(near)
    await until(lambda: echo.log[-1] == "stream over")
    await items.aclose()
