"""An actor that fails is stopped by its node; whoever closes the node at the same time waits for that."""

from __future__ import annotations

import asyncio

import pytest

from myxa.core.actor import Actor
from myxa.transport.node import InprocNetwork, Node

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


class Slow(Actor):
    """Fails at once and takes its time to end."""

    has_ended = False

    async def on_start(self) -> None:
        self.ctx.spawn(self._run(), name="run")

    async def _run(self) -> None:
        raise ValueError("boom")

    async def on_stop(self, why: str) -> None:
        assert why == "it failed: boom"
        await asyncio.sleep(0.3)
        self.has_ended = True


async def test_closing_does_not_cut_the_end_of_a_failed_actor_short() -> None:
    node = await Node.attach(name="root", network=InprocNetwork())
    slow = Slow()
    await node.start(slow, name="slow")
    assert str(await node.failed) == "boom"
    await asyncio.sleep(0.05)  # its end has begun
    assert not slow.has_ended
    await node.close(grace_s=5)
    assert slow.has_ended
