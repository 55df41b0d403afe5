"""Several calls at once: what is answered, who is named when members fail, what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar, assert_type

import pytest
import pytest_asyncio
from tests.harness.inproc import InprocNetwork
from tests.harness.waiting import until

from myxa.core.actor import Actor
from myxa.core.errors import BadRequest, ConfigError, DeadlineExceeded, GatherError, PeerDied, RemoteError
from myxa.core.handlers import call
from myxa.core.refs import together, with_deadline
from myxa.transport.node import Node

pytestmark = pytest.mark.timeout(60)
T = TypeVar("T")


class Rank(Actor):
    def __init__(self) -> None:
        self.log: list[str] = []

    @call(deadline=10)
    async def step(self, shard: int, factor: int = 1) -> int:
        return shard * factor

    @call(deadline=20)
    async def after(self, delays: dict[str, float]) -> str:
        try:
            await asyncio.sleep(delays.get(self.ctx.name, 0.0))
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        self.log.append("done")
        return self.ctx.name

    @call(deadline=5)
    async def fail(self, who: tuple[str, ...], how: str) -> str:
        if self.ctx.name in who:
            raise ConfigError(how) if how == "config" else ZeroDivisionError(how)
        return self.ctx.name

    @call(deadline=5)
    async def note(self, text: str) -> None:
        self.log.append(text)


class Scene:
    """A caller's node, and one with the ranks."""

    def __init__(self, near: Node, far: Node) -> None:
        self.near = near
        self.far = far
        self.ranks: dict[str, Rank] = {}

    async def all(self, send: Callable[[Rank], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """Each rank's answer."""
        return await together({name: send(self.near.ref(Rank, name)) for name in RANKS})

    async def add(self, *names: str) -> None:
        for name in names:
            self.ranks[name] = Rank()
            await self.far.start(self.ranks[name], name)
        await self.near.wait_for(*names, timeout_s=5)

    async def until(self, log: dict[str, list[str]]) -> None:
        await until(lambda: {name: self.ranks[name].log for name in log} == log)


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    network = InprocNetwork()
    near = await Node.attach(name="near", network=network)
    far = await Node.attach(name="far", rdzv=near.rendezvous, network=network)
    scene = Scene(near, far)
    await scene.add("rank/0", "rank/1", "rank/2")
    yield scene
    await far.close(grace_s=0)
    await near.close(grace_s=0)
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert tasks == []


RANKS = ("rank/0", "rank/1", "rank/2")


async def test_answers_keep_the_order_of_the_names_and_a_member_that_is_not_there_is_named(scene: Scene):
    refs = {name: scene.near.ref(Rank, name) for name in ("rank/2", "rank/0", "rank/77")}
    answers = await together({name: ref.step(5) for name, ref in refs.items() if name != "rank/77"})
    assert list(answers.items()) == [("rank/2", 5), ("rank/0", 5)]
    with pytest.raises(GatherError, match="1 of 3 members failed, all were needed: rank/77: no actor is called"):
        await together({name: with_deadline(ref, 0.5).step(1) for name, ref in refs.items()})
    assert await together({}) == {}


async def test_all_waits_for_all_and_names_those_who_failed(scene: Scene):
    with pytest.raises(GatherError) as caught:
        await scene.all(lambda rank: rank.fail(("rank/2", "rank/1"), "config"))
    error = caught.value
    assert list(error.errors) == ["rank/1", "rank/2"]
    assert all(type(e) is ConfigError for e in error.errors.values())
    assert error.__cause__ is error.errors["rank/1"]
    assert error.exit_code == ConfigError.exit_code
    assert str(error) == "2 of 3 members failed, all were needed: rank/1: config; rank/2: config"


async def test_a_call_that_returns_nothing(scene: Scene):
    assert await scene.all(lambda rank: rank.note("hello")) == dict.fromkeys(RANKS)
    await scene.until({name: ["hello"] for name in RANKS})


async def test_one_deadline_for_all(scene: Scene):
    with pytest.raises(GatherError) as caught:
        await scene.all(lambda rank: with_deadline(rank, 0.3).after({"rank/0": 30.0, "rank/2": 30.0}))
    assert {(name, type(e)) for name, e in caught.value.errors.items()} == {
        ("rank/0", DeadlineExceeded), ("rank/2", DeadlineExceeded)}  # fmt: skip


async def test_a_member_that_dies_is_named(scene: Scene):
    calls = asyncio.get_running_loop().create_task(scene.all(lambda rank: rank.after({"rank/1": 30.0})))
    await scene.until({"rank/0": ["done"], "rank/2": ["done"]})
    await scene.far.stop("rank/1", grace_s=0)
    with pytest.raises(GatherError) as caught:
        await calls
    assert {name: type(e) for name, e in caught.value.errors.items()} == {"rank/1": PeerDied}


async def test_the_rest_may_be_left_to_finish(scene: Scene):
    ranks = [scene.near.ref(Rank, name) for name in RANKS]
    calls = ranks[0].after({"rank/0": 0.2}), ranks[1].fail(RANKS, "x"), ranks[2].after({})
    with pytest.raises(GatherError, match="1 of 3 members failed") as caught:
        await together(dict(zip(RANKS, calls, strict=True)), fails_fast=True)
    assert "rank/0" in caught.value.unheard
    await scene.until({"rank/0": ["done"], "rank/1": [], "rank/2": ["done"]})


async def test_being_cancelled_cancels_the_calls(scene: Scene):
    waiting = asyncio.get_running_loop().create_task(
        scene.all(lambda rank: rank.after({"rank/0": 30.0, "rank/2": 30.0}))
    )
    await scene.until({"rank/1": ["done"]})
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await scene.until({"rank/0": ["cancelled"], "rank/2": ["cancelled"]})


async def test_inside_a_handler_calls_inherit_its_deadline_and_errors_arrive_as_anothers(scene: Scene):
    class Leader(Actor):
        errors: dict[str, Exception] = {}

        @call(deadline=0.5)
        async def ask(self) -> None:
            try:
                await together({name: self.ctx.ref(Rank, name).after(dict.fromkeys(RANKS, 30.0)) for name in RANKS})
            except GatherError as error:
                self.errors = error.errors

        @call(deadline=10)
        async def provoke(self) -> None:
            await together({name: self.ctx.ref(Rank, name).fail(RANKS, "x") for name in RANKS})

    leader = Leader()
    ref = await scene.near.start(leader, "leader")
    with suppress(DeadlineExceeded):  # the handler may answer at the very end of it
        await ref.ask()
    await scene.until({name: ["cancelled"] for name in RANKS})
    with pytest.raises(RemoteError, match="3 of 3 members failed") as caught:
        await ref.provoke()
    assert caught.value.remote_type == "GatherError"


async def test_what_a_type_checker_knows(scene: Scene):
    """Checked by pyright: the answers' types, and by a comment that must not be superfluous, that a wrong call is seen."""
    rank = scene.near.ref(Rank, "rank/0")
    assert_type(await together({"rank/0": rank.step(1)}), dict[str, int])
    with pytest.raises(BadRequest):
        await together({"rank/0": rank.step()})  # pyright: ignore[reportCallIssue]
