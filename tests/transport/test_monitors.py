"""monitor and link: an actor's present state first, then what happens to it; who is linked to the dead fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from tests.harness.waiting import until
from tests.transport.cast_of_actors import Echo, EchoContract

from myxa.core.actor import PeerEvent
from myxa.core.errors import PeerDied

pytestmark = pytest.mark.timeout(60)


async def following(events: AsyncIterator[PeerEvent]) -> tuple[str, str]:
    async with asyncio.timeout(5):
        event = await anext(events)
    return event.kind, event.reason


async def test_a_monitor_tells_the_state_and_then_every_change(world: Any):
    near, far = await world.pair(Echo())
    async with aclosing(near.monitor("callee")) as events, aclosing(near.monitor("later")) as others:
        assert await following(events) == ("up", "")
        first = asyncio.get_running_loop().create_task(following(others))
        await far.stop("callee", "enough")
        assert await following(events) == ("down", "enough")
        assert not first.done()
        await far.start(Echo(), "later")
        assert await first == ("up", "")
        await far.start(Echo(), "callee")
        assert await following(events) == ("up", "")
    async with aclosing(near.monitor("callee")) as events:
        assert await following(events) == ("up", "")
    await far.stop("callee", "again")
    await until(lambda: not near.peers("callee"))
    async with aclosing(near.monitor("callee")) as events:
        assert await following(events) == ("down", "again"), "one that is gone is told at once"
    assert len(near.monitors) == 0


async def test_an_actor_fails_with_the_one_it_is_linked_to(world: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level("CRITICAL")

    class Dependent(Echo):
        async def on_start(self) -> None:
            self.ctx.link("callee")
            self.ctx.link("never")

    near, far = await world.pair(Echo())
    await near.start(Dependent(), "dependent")
    await near.ref(EchoContract, "dependent").ping()
    await far.stop("callee", "done with it")
    async with asyncio.timeout(5):
        error = await near.failed
    assert isinstance(error, PeerDied)
    assert str(error) == "callee, to which dependent is linked, is gone: done with it"
    await until(lambda: not near.peers("dependent"))
    assert len(near.monitors) == 0


async def test_a_node_may_be_linked_too_and_waits_for_who_was_never_there(world: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level("CRITICAL")
    near, far = await world.pair(Echo())
    near.link("later")
    await far.start(Echo(), "later")
    await near.wait_for("later", timeout_s=5)
    assert not near.failed.done()
    await far.stop("later", "over")
    async with asyncio.timeout(5):
        assert isinstance(await near.failed, PeerDied)


async def test_actors_monitor_through_their_context(world: Any):
    seen: list[str] = []

    class Watching(Echo):
        async def on_start(self) -> None:
            self.ctx.spawn(self.follow(), name="follow")

        async def follow(self) -> None:
            async for event in self.ctx.monitor("callee"):
                seen.append(event.kind)

    near, far = await world.pair(Echo())
    await near.start(Watching(), "watching")
    async with asyncio.timeout(5):
        while seen != ["up"]:
            await asyncio.sleep(0.01)
        await far.stop("callee")
        while seen != ["up", "down"]:
            await asyncio.sleep(0.01)
