"""Durable puts: executed once per key and content, whatever breaks; also to the next incarnation of the callee."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.harness.waiting import until
from tests.transport.cast_of_actors import Echo, EchoContract, Item

from myxa.core.errors import EngineError

pytestmark = [pytest.mark.timeout(30)]


def item(name, n=3):
    return Item(name=name, values=np.arange(n, dtype=np.float32))


def cell_of(actor: Any) -> Any:
    return actor.ctx._cell


async def test_the_same_put_twice_is_executed_once(world):
    echo = Echo()
    near, far = await world.pair(echo)
    ref = near.ref(EchoContract, "callee")
    assert await ref.put(item("a"), 1) == 1
    assert await ref.put(item("a"), 1) == 1  # replayed
    assert await ref.put(item("a"), 2) == 2  # another attempt is another put
    assert await ref.put(item("a", 4), 2) == 3  # and so is other content
    assert far.counters()["puts_replayed"] == 1
    assert echo.stock == {"a": 3}


async def test_a_put_that_comes_again_while_it_runs_joins_it(world):
    echo = Echo()
    echo.gate.clear()
    near, _ = await world.pair(echo)
    ref = near.ref(EchoContract, "callee")
    both = [asyncio.ensure_future(ref.put(item("a"), 1)) for _ in range(2)]
    await asyncio.sleep(0.05)
    echo.gate.set()
    assert await asyncio.gather(*both) == [1, 1]
    assert echo.stock == {"a": 1}


async def test_a_put_that_failed_may_be_tried_again(world):
    echo = Echo()
    near, _ = await world.pair(echo)
    ref = near.ref(EchoContract, "callee")
    for _ in range(2):
        with pytest.raises(EngineError):
            await ref.put(item("a"), -1)
    assert echo.log == ["put a", "put a"]


async def test_cancelling_does_not_undo_a_put(world):
    echo = Echo()
    echo.gate.clear()
    near, _ = await world.pair(echo)
    ref = near.ref(EchoContract, "callee")
    task = asyncio.ensure_future(ref.put(item("a"), 1))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    echo.gate.set()
    await until(lambda: echo.stock == {"a": 1})
    assert await ref.put(item("a"), 1) == 1


async def test_a_put_waits_for_the_next_incarnation(world):
    echo = Echo()
    echo.gate.clear()
    near, far = await world.pair(echo)
    ref = near.ref(EchoContract, "callee")
    task = asyncio.ensure_future(ref.put(item("a"), 1))
    await until(lambda: cell_of(echo)._running)
    await far.close(grace_s=0)
    world.nodes.remove(far)
    await until(lambda: not near.peers("callee"))
    late = asyncio.ensure_future(ref.put(item("b"), 1))
    epoch = asyncio.ensure_future(ref.epoch())  # idempotent: may wait, too
    await asyncio.sleep(0.05)
    assert not (task.done() or late.done() or epoch.done())
    again = Echo()
    reborn = await world.join("far")
    assert reborn.epoch == 2
    await reborn.start(again, "callee")
    assert await asyncio.gather(task, late, epoch) == [1, 1, 2]
    assert again.stock == {"a": 1, "b": 1}
