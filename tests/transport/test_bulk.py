"""Large messages: whole, on their own lane, and never in the way of small ones."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.transport.cast_of_actors import Echo, Item, Keeper

from myxa.core.errors import MessageTooLarge
from myxa.core.refs import with_deadline
from myxa.transport.session import frames, pending, serving
from myxa.transport.wire import Lane

pytestmark = [pytest.mark.timeout(60)]


@pytest.mark.parametrize("kind", ["inproc", "ipc", "tcp"], indirect=True)
async def test_twenty_mebibytes_there_and_back_while_small_calls_go_on(world):
    near, _ = await world.pair(Echo())
    ref = with_deadline(near.ref(Echo, "callee"), 30)
    data = np.random.default_rng(7).integers(0, 256, 20 << 20, dtype=np.uint8)
    big = asyncio.ensure_future(ref.mirror(data))
    num_small = 0
    while not big.done():
        await ref.ping()
        num_small += 1
    np.testing.assert_array_equal(await big, data)
    if world.kind != "inproc":
        assert num_small > 3  # they did not wait for the 40 chunks


async def test_a_large_argument_is_the_caller_s_again_when_the_call_returns(world):
    near, _ = await world.pair(Keeper())
    ref = near.ref(Keeper, "callee")
    data = np.ones(5 << 17)
    assert await ref.keep(data) == data.size
    data[:] = 2
    assert await ref.keep(data) == 2 * data.size
    data[:] = 3
    assert await ref.kept() == [data.size, 2 * data.size]


async def test_several_large_ones_at_once_arrive_whole(world):
    near, _ = await world.pair(Echo())
    ref = near.ref(Echo, "callee")
    sizes = [3 << 20, (1 << 20) + 1, 1 << 20, (1 << 18) + 1, 1 << 18, 17, 0]
    got = await asyncio.gather(*(ref.mirror(np.full(n, i, np.uint8)) for i, n in enumerate(sizes)))
    for i, (n, back) in enumerate(zip(sizes, got, strict=True)):
        assert back.shape == (n,)
        assert not n or (back.min() == back.max() == i)


async def test_credit_comes_back_for_large_messages_too(world):
    near, far = await world.pair(Echo())
    ref = with_deadline(near.ref(Echo, "callee"), 40)
    data = np.zeros(12 << 20, np.uint8)  # 192 of 1024 units each: 12 of them need credit to come back
    assert await asyncio.gather(*(ref.size(data) for _ in range(12))) == [12 << 20] * 12
    link = near._session._links.find(far._key)
    await ref.ping()
    assert link.windows[Lane.BULK].num_units == 0


async def test_over_the_limit_is_refused_before_it_is_sent(world, monkeypatch):
    limits = frames.FrameLimits(message=8 << 20, body=100_000)
    for module in (pending, serving):
        monkeypatch.setattr(module, "LIMITS", limits)
    near, _ = await world.pair(Echo())
    ref = near.ref(Echo, "callee")
    with pytest.raises(MessageTooLarge, match="over the limit"):
        await ref.size(np.zeros(9 << 20, np.uint8))
    with pytest.raises(MessageTooLarge, match="over the limit"):
        await ref.echo(Item(name="x" * 200_000, values=np.zeros(1, np.float32)))
    with pytest.raises(MessageTooLarge, match="reply"):
        await ref.echo(Item(name="x" * 60_000, values=np.zeros(1, np.float32)), times=2)
    assert await ref.ping() > 0


@pytest.mark.parametrize("size", [140_000, 270_000, 600_000])
@pytest.mark.parametrize("kind", ["ipc", "tcp"], indirect=True)
async def test_the_first_message_of_a_connection_arrives_at_any_size(world, size):
    near, _ = await world.pair(Echo())
    ref = with_deadline(near.ref(Echo, "callee"), 5)
    got = await asyncio.gather(*(ref.mirror(np.full(size, i, np.uint8)) for i in range(3)))
    assert [(back.shape, int(back[0])) for back in got] == [((size,), i) for i in range(3)]
