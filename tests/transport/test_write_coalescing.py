"""When envelopes leave: together under load, at once where they are alone."""

from __future__ import annotations

import asyncio

import pytest

from myxa.core.actor import Actor, MailboxPolicy
from myxa.core.handlers import call
from myxa.transport.node import Node
from myxa.transport.outbox import Outbox
from myxa.transport.session.frames import split


class Echo(Actor):
    mailbox = MailboxPolicy(size=2000)

    @call(deadline=20, reentrant=True)
    async def echo(self, number: int) -> int:
        return number


async def test_under_load_messages_travel_together_and_alone_they_leave_at_once(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    put = Outbox._put

    def counted(self: Outbox, message: bytes | memoryview) -> bool:
        parts = split(memoryview(message))
        sizes.append(len(parts) if isinstance(parts, list) else 0)
        return put(self, message)

    monkeypatch.setattr(Outbox, "_put", counted)
    near = await Node.attach(name="near")
    far = await Node.attach(name="far", rdzv=near.rendezvous)
    await far.start(Echo(), "echo")
    there = near.ref(Echo, "echo")
    assert await there.echo(1) == 1
    sizes.clear()
    for number in range(20):
        assert await there.echo(number) == number
    assert max(sizes) <= 2  # nothing waits for company (a heartbeat may happen to be there)
    sizes.clear()
    numbers = await asyncio.gather(*(there.echo(n) for n in range(1000)))
    assert numbers == list(range(1000))
    assert sum(sizes) >= 2000
    assert len(sizes) < 500  # a message of ZeroMQ each would be 2000
    await far.close()
    await near.close()
