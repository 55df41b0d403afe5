"""One request to several actors: encoded once, without a task each; every callee keeps an outcome of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from myxa.core.actor import Actor, MailboxPolicy
from myxa.core.errors import GatherError, NoSuchActor
from myxa.core.handlers import call, durable_put
from myxa.transport.call_client import CallClient
from myxa.transport.codec import Codec
from myxa.transport.node import Node

pytestmark = [pytest.mark.timeout(60)]


class Member(Actor):
    mailbox = MailboxPolicy(size=1)

    @call(deadline=20)
    async def name(self, suffix: str) -> str:
        return self.ctx.name + suffix

    @call(deadline=20)
    async def total(self, field: npt.NDArray[np.float32]) -> float:
        return float(field.sum())

    @durable_put(key="key")
    async def put(self, key: str) -> str:
        return f"{self.ctx.name}: {key}"


NAMES = ("member/0", "member/1", "member/2")


class Scene:
    def __init__(self, near: Node, members: list[Member]) -> None:
        self.near, self.members = near, members
        self.group = near.group(Member, "member")


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    near = await Node.attach(name="near")
    far = await Node.attach(name="far", rdzv=near.rendezvous)
    members = [Member() for _ in NAMES]
    for name, member in zip(NAMES, members, strict=True):
        await far.start(member, name)
    await near.wait_for(*NAMES, timeout_s=10)
    yield Scene(near, members)
    await far.close(grace_s=0)
    await near.close(grace_s=0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert left == []


async def test_it_is_encoded_once_and_has_no_task_of_its_own_for_each(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    num_encoded = 0
    encode = Codec.encode

    def counted(self: Codec, value: object) -> object:
        nonlocal num_encoded
        num_encoded += type(value).__name__ == "Member_name"
        return encode(self, value)

    async def refused(*_: object) -> None:
        raise AssertionError("a call of its own")

    monkeypatch.setattr(Codec, "encode", counted)
    monkeypatch.setattr(CallClient, "request", refused)
    assert await scene.group.all(Member.name, "!") == {name: name + "!" for name in NAMES}
    assert num_encoded == 1


async def test_arrays_puts_and_names_that_are_not_known_take_the_other_way(scene: Scene):
    assert await scene.group.all(Member.total, np.ones(1 << 18, np.float32)) == dict.fromkeys(NAMES, float(1 << 18))
    assert await scene.group.all(Member.put, "a") == {name: f"{name}: a" for name in NAMES}
    with pytest.raises(GatherError) as caught:
        await scene.near.group(Member, ["member/0", "nobody"]).options(deadline_s=1).all(Member.name, "")
    assert {name: type(error) for name, error in caught.value.errors.items()} == {"nobody": NoSuchActor}
