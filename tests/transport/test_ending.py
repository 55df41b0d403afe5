"""An actor that fails is stopped by its node; whoever closes the node at the same time waits for that."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.transport.cast_of_actors import Echo, EchoContract, Item

from myxa.core.errors import Draining, NoSuchActor, NotSent
from myxa.core.refs import with_deadline

pytestmark = [pytest.mark.timeout(60)]


async def test_a_process_that_closes_finishes_what_it_has_and_says_when_to_come_back(world) -> None:
    near, far = await world.pair(Echo())
    ref = near.ref(EchoContract, "callee")
    under_way = asyncio.ensure_future(ref.sleep(1.0))
    items = ref.count(0, 3)
    assert (await anext(items)).name == "0"
    put = Item(name="a", values=np.zeros(3, np.float32))
    async with asyncio.timeout(10):
        while "asleep" not in await ref.seen():
            await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(far.close(grace_s=4.0))
        while not near._session.endpoints_of(far._key) or not near._session._links.find(far._key).drains_until:
            await asyncio.sleep(0.01)
    with pytest.raises(Draining, match="shutting down") as refused:
        await ref.ping()
    assert 0 < refused.value.retry_after_s <= 4.0
    with pytest.raises(NotSent):  # a put waits for the next incarnation, and there is none
        await with_deadline(ref, 0.3).put(put, 1)
    assert await under_way == pytest.approx(10, abs=2), "what was accepted is finished"
    assert [item.name async for item in items] == ["1", "2"]
    await closing
    world.nodes.remove(far)
    with pytest.raises(NoSuchActor, match="not there any more"):
        await ref.ping()
