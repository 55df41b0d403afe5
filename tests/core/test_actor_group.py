"""Groups: who is called, what each way of waiting returns, who is named when members fail, what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import assert_type

import pytest
import pytest_asyncio
from tests.harness.inproc import InprocNetwork
from tests.harness.waiting import until

from myxa.core.actor import Actor
from myxa.core.errors import BadRequest, ConfigError, DeadlineExceeded, GatherError, NoSuchActor, PeerDied, RemoteError
from myxa.core.handlers import call
from myxa.transport.node import Node
from myxa.transport.registry.registry import RegistryContract

pytestmark = pytest.mark.timeout(60)


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
        self.group = near.group(Rank, "rank")

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
    made = Scene(near, far)
    await made.add("rank/0", "rank/1", "rank/2")
    yield made
    await far.close(grace_s=0)
    await near.close(grace_s=0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert left == []


RANKS = ("rank/0", "rank/1", "rank/2")

# -- who


async def test_members_are_those_under_the_prefix_when_the_call_begins_in_the_order_of_their_numbers(scene: Scene):
    await scene.add("rank/10", "ranking/0", "rank/9")
    assert scene.group.names == ("rank/0", "rank/1", "rank/2", "rank/9", "rank/10")
    assert scene.near.group(Rank, "rank/").names == scene.group.names
    await scene.far.stop("rank/9")
    await until(lambda: "rank/9" not in scene.group.names)
    assert await scene.group.all(Rank.step, 2, factor=3) == dict.fromkeys((*RANKS, "rank/10"), 6)


async def test_members_by_name_keep_their_order_and_need_not_be_there(scene: Scene):
    group = scene.near.group(Rank, ["rank/2", "rank/0"])
    assert list(await group.all(Rank.step, 5)) == ["rank/2", "rank/0"]
    with pytest.raises(GatherError, match="1 of 2 members failed, all were needed: rank/77: no actor is called"):
        await scene.near.group(Rank, ["rank/0", "rank/77"]).options(deadline_s=0.5).all(Rank.step, 1)


async def test_nobody_and_wrong_methods_are_refused_before_anything_is_sent(scene: Scene):
    with pytest.raises(NoSuchActor, match="trainer/"):
        await scene.near.group(Rank, "trainer").all(Rank.step, 1)
    with pytest.raises(NoSuchActor, match="no members"):
        await scene.near.group(Rank, []).all(Rank.step, 1)
    with pytest.raises(BadRequest, match="is none of its handlers"):
        await scene.group.all(Rank.on_start)
    with pytest.raises(GatherError, match=r"rank/0: rank/0\.step"):
        await scene.group.all(Rank.step, "many")  # pyright: ignore[reportArgumentType]
    assert all(rank.log == [] for rank in scene.ranks.values())


# -- all


async def test_all_waits_for_all_and_names_those_who_failed(scene: Scene):
    with pytest.raises(GatherError) as caught:
        await scene.group.all(Rank.fail, ("rank/2", "rank/1"), "config")
    error = caught.value
    assert list(error.errors) == ["rank/1", "rank/2"]
    assert all(type(e) is ConfigError for e in error.errors.values())
    assert error.__cause__ is error.errors["rank/1"]
    assert error.exit_code == ConfigError.exit_code
    assert str(error) == "2 of 3 members failed, all were needed: rank/1: config; rank/2: config"


async def test_a_call_that_returns_nothing(scene: Scene):
    assert await scene.group.all(Rank.note, "hello") == dict.fromkeys(RANKS)
    await scene.until({name: ["hello"] for name in RANKS})


async def test_scatter_gives_each_member_its_own(scene: Scene):
    shards = [5, 6, 7]
    assert await scene.group.scatter(lambda rank, i: rank.step(shards[i], 2)) == dict(
        zip(RANKS, (10, 12, 14), strict=True)
    )


async def test_one_deadline_for_all(scene: Scene):
    with pytest.raises(GatherError) as caught:
        await scene.group.options(deadline_s=0.3).all(Rank.after, {"rank/0": 30.0, "rank/2": 30.0})
    assert {(name, type(e)) for name, e in caught.value.errors.items()} == {
        ("rank/0", DeadlineExceeded), ("rank/2", DeadlineExceeded)}  # fmt: skip


async def test_a_member_that_dies_is_named(scene: Scene):
    calls = asyncio.get_running_loop().create_task(scene.group.all(Rank.after, {"rank/1": 30.0}))
    await scene.until({"rank/0": ["done"], "rank/2": ["done"]})
    await scene.far.stop("rank/1", grace_s=0)
    with pytest.raises(GatherError) as caught:
        await calls
    assert {name: type(e) for name, e in caught.value.errors.items()} == {"rank/1": PeerDied}


async def test_the_rest_may_be_left_to_finish(scene: Scene):
    async def send(rank: Rank, i: int) -> str:
        return await (rank.fail(RANKS, "x") if i == 1 else rank.after({"rank/0": 0.2}))

    with pytest.raises(GatherError, match="1 of 3 members failed"):
        await scene.group.options(fails_fast=True).scatter(send)
    await scene.until({"rank/0": ["done"], "rank/1": [], "rank/2": ["done"]})


async def test_being_cancelled_cancels_the_calls(scene: Scene):
    waiting = asyncio.get_running_loop().create_task(scene.group.all(Rank.after, {"rank/0": 30.0, "rank/2": 30.0}))
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
                await self.ctx.group(Rank, "rank").all(Rank.after, dict.fromkeys(RANKS, 30.0))
            except GatherError as error:
                self.errors = error.errors

        @call(deadline=10)
        async def provoke(self) -> None:
            await self.ctx.group(Rank, "rank").all(Rank.fail, RANKS, "x")

    leader = Leader()
    ref = await scene.near.start(leader, "leader")
    with pytest.raises(DeadlineExceeded):
        await ref.ask()
    await scene.until({name: ["cancelled"] for name in RANKS})
    with pytest.raises(RemoteError, match="3 of 3 members failed") as caught:
        await ref.provoke()
    assert caught.value.remote_type == "GatherError"


async def test_what_a_type_checker_knows(scene: Scene):
    """Checked by pyright: the answers' types, and by comments that must not be superfluous, that wrong calls are seen."""
    assert_type(await scene.group.all(Rank.step, 1), dict[str, int])
    assert_type(await scene.group.scatter(lambda rank, i: rank.step(i)), dict[str, int])
    with pytest.raises(GatherError):
        await scene.group.all(Rank.step)  # pyright: ignore[reportCallIssue]
    with pytest.raises(BadRequest):
        await scene.group.all(RegistryContract.updates, 0)  # pyright: ignore[reportArgumentType]
