"""A node in somebody else's program: it takes nothing over and leaves nothing behind; on uvloop as on asyncio."""

from __future__ import annotations

import asyncio

import pytest
from tests.harness.waiting import until
from tests.transport.cast_of_actors import Echo

from myxa.core.errors import ConfigError, Draining, EngineError, NoSuchActor
from myxa.transport.node import Node

pytestmark = pytest.mark.timeout(60)


async def test_actors_stop_in_reverse_order_and_hear_why():
    order = []

    class Noted(Echo):
        async def on_stop(self, why):
            order.append((self.ctx.name, why))

    node = await Node.attach(name="host")
    for name in ("first", "second", "third"):
        await node.start(Noted(), name)
    await node.stop("second", "enough")
    with pytest.raises(NoSuchActor):
        await node.stop("second")
    await node.close()
    await node.close()
    assert order == [("second", "enough"), ("third", "shutdown"), ("first", "shutdown")]


async def test_names_are_checked_and_unique():
    node = await Node.attach(name="host")
    try:
        await node.start(Echo(), "echo")
        with pytest.raises(ConfigError, match="already"):
            await node.start(Echo(), "echo")
        for name in ("", "Echo", "a b", "a//b", "../x", "x" * 200):
            with pytest.raises(ConfigError, match="cannot name"):
                await node.start(Echo(), name)
        with pytest.raises(ConfigError, match="is no actor"):
            await node.start(object(), "thing")
    finally:
        await node.close()


async def test_background_tasks_end_with_their_actor_and_have_no_deadline():
    seen = []

    class Busy(Echo):
        mailbox_size = 4

        async def ping(self):
            self.ctx.spawn(self.work(), name="work")
            return 1

        async def work(self):
            seen.append(self.ctx.deadline())
            try:
                await asyncio.sleep(100)
            finally:
                seen.append("ended")

    node = await Node.attach(name="host")
    ref = await node.start(Busy(), "busy")
    await ref.ping()
    await until(lambda: seen == [None])
    await node.close()
    assert seen == [None, "ended"]


async def test_an_actor_that_fails_while_it_starts_is_not_there(caplog):
    caplog.set_level("CRITICAL")

    class Hasty(Echo):
        async def on_start(self):
            self.ctx.spawn(self.explode(), name="explode")
            await asyncio.sleep(0.1)

        async def explode(self):
            raise EngineError("too early")

    node = await Node.attach(name="host")
    with pytest.raises(EngineError, match="too early"):
        await node.start(Hasty(), "hasty")
    assert node.peers("hasty") == ()
    assert isinstance(node.failed.result(), EngineError)
    await node.close()


async def test_closing_lets_a_failed_actor_finish_its_end(caplog):
    caplog.set_level("CRITICAL")
    ends = []

    class Careful(Echo):
        async def on_stop(self, why):
            await asyncio.sleep(0.3)
            ends.append(why)

    node = await Node.attach(name="host")
    ref = await node.start(Careful(), "careful")
    await ref.fail("fatal")
    error = await node.failed
    await node.close(grace_s=0.1)
    assert isinstance(error, EngineError)
    assert ends == ["it failed: exploded in the background"]


async def test_an_actor_may_call_itself_back_only_reentrantly():
    class Selfish(Echo):
        async def sleep(self, seconds):
            return float(await self.ctx.ref(Echo, "self").ping() > 0)

    node = await Node.attach(name="host")
    ref = await node.start(Selfish(), "self")
    assert await ref.sleep(1) == 1.0
    await node.close()


async def test_a_process_that_closes_finishes_what_it_has_and_takes_no_more(world) -> None:
    near, far = await world.pair(Echo())
    ref = near.ref(Echo, "callee")
    under_way = asyncio.ensure_future(ref.sleep(1.0))
    async with asyncio.timeout(10):
        while "asleep" not in await ref.seen():
            await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(far.close(grace_s=4.0))
        while not far._is_draining:
            await asyncio.sleep(0.01)
    with pytest.raises(Draining, match="shutting down"):
        await ref.ping()
    assert await under_way == pytest.approx(10, abs=2), "what was accepted is finished"
    await closing
    world.nodes.remove(far)
    await until(lambda: not near.peers("callee"), "the registry's news of it, which may come after its own farewell")
    with pytest.raises(NoSuchActor, match="not there any more"):
        await ref.ping()
