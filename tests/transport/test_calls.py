"""Calls, errors, deadlines, cancelling and overload over every transport."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import numpy as np
import pytest
from tests.harness.waiting import until
from tests.transport.cast_of_actors import Echo, Item, Relay

from myxa.core.actor import Actor
from myxa.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineError,
    NoSuchActor,
    NotSent,
    Overloaded,
    RemoteError,
)
from myxa.core.handlers import call
from myxa.core.refs import with_deadline

pytestmark = [pytest.mark.timeout(30)]


def cell_of(actor: Any) -> Any:
    return actor.ctx.fail.__self__


async def test_values_and_arrays_come_back_as_they_went(world):
    near, _ = await world.pair(Echo())
    item = Item(name="ä", values=np.arange(6, dtype=np.float32), extra={"x": [1, None, float("inf")], "y": {"z": "w"}})
    (back, again) = await near.ref(Echo, "callee").echo(item, times=2)
    assert back.name == "ä"
    assert back.extra == item.extra
    np.testing.assert_array_equal(back.values, item.values)
    assert back.values.dtype == np.float32
    back.values[0] = 9  # its own memory
    assert again.values[0] == 0


async def test_wrong_arguments_are_refused(world):
    near, _ = await world.pair(Echo())
    ref = near.ref(Echo, "callee")
    with pytest.raises(BadRequest, match="times"):
        await ref.echo(Item(name="a", values=np.zeros(1, np.float32)), times="many")
    with pytest.raises(BadRequest, match="float32, got float64"):
        await ref.echo(Item(name="a", values=np.zeros(1, np.float64)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadRequest, match="signature"):
        await ref.sleep()
    with pytest.raises(BadRequest, match="cannot travel"):
        await ref.echo(Item(name="a", values=np.array([object()])))
    assert await ref.ping() > 0


async def test_errors_keep_their_class_if_it_is_in_the_tree(world):
    near, _ = await world.pair(Echo())
    ref = near.ref(Echo, "callee")
    with pytest.raises(EngineError, match="made of glass -- do not drop it") as caught:
        await ref.fail("engine")
    assert any("callee" in note for note in caught.value.__notes__)
    with pytest.raises(RemoteError, match="ZeroDivisionError: by hand") as other:
        await ref.fail("by hand")
    assert other.value.remote_type == "ZeroDivisionError"
    assert "cast_of_actors.py" in other.value.remote_traceback


async def test_unknown_name_fails_and_says_who_is_known(world):
    near, _ = await world.pair(Echo())
    with pytest.raises(NoSuchActor, match=r"nobody.*known now: callee, registry"):
        await with_deadline(near.ref(Echo, "nobody"), 0.2).ping()


async def test_a_call_to_somebody_who_is_just_coming_waits_for_it(world):
    near, far = await world.join("near"), await world.join("far")
    early = asyncio.ensure_future(near.ref(Echo, "late").ping())
    await asyncio.sleep(0.05)
    await far.start(Echo(), "late")
    assert await early > 0


async def test_deadline_ends_the_call_and_the_handler(world):
    echo = Echo()
    near, _ = await world.pair(echo)
    with pytest.raises(DeadlineExceeded, match=r"callee\.sleep") as late:
        await with_deadline(near.ref(Echo, "callee"), 0.2).sleep(30)
    assert late.value.callee == "callee"
    await until(lambda: "cancelled" in echo.log)
    assert await near.ref(Echo, "callee").ping() > 0


async def test_deadlines_are_inherited_by_nested_calls(world):
    near, far = await world.pair(Echo())
    await far.start(Relay(), "relay")
    await near.wait_for("relay", timeout_s=20)
    left_s = await with_deadline(near.ref(Relay, "relay"), 3).through("callee", 0.01)
    assert left_s is not None
    assert 0 < left_s <= 3


async def test_what_expired_in_the_mailbox_is_not_executed(world):
    echo = Echo()
    near, _ = await world.pair(echo)
    ref = near.ref(Echo, "callee")
    first = asyncio.ensure_future(ref.sleep(0.4))
    await until(lambda: echo.log == ["asleep"])
    with pytest.raises(DeadlineExceeded):
        await with_deadline(ref, 0.1).sleep(0)
    await first
    assert await ref.seen() == ["asleep", "awake"]


async def test_cancelling_the_waiter_cancels_the_handler(world):
    echo = Echo()
    near, _ = await world.pair(echo)
    task = asyncio.ensure_future(near.ref(Echo, "callee").sleep(30))
    await until(lambda: echo.log == ["asleep"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: "cancelled" in echo.log)


async def test_what_is_not_cancellable_runs_to_its_end(world):
    echo = Echo()
    echo.gate.clear()
    near, _ = await world.pair(echo)
    task = asyncio.ensure_future(near.ref(Echo, "callee").put(Item(name="a", values=np.zeros(1, np.float32)), 1))
    await until(lambda: cell_of(echo)._running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    echo.gate.set()
    await until(lambda: echo.stock == {"a": 1})


mark: contextvars.ContextVar[int] = contextvars.ContextVar("mark", default=-1)


async def test_a_long_queue_is_worked_off_in_order_and_each_has_a_context_of_its_own(world):
    class Deep(Actor):
        mailbox_size = 10_000

        @call(deadline=20)
        async def step(self, number: int) -> int:
            if number == 0:
                await gate.wait()
            order.append(number)
            left = mark.get()
            mark.set(number)
            return left

    order, gate = [], asyncio.Event()
    near, _ = await world.pair(deep := Deep())
    ref = near.ref(Deep, "callee")
    calls = [asyncio.ensure_future(ref.step(n)) for n in range(3000)]
    await until(lambda: cell_of(deep).num_held > 900)  # the window of credit
    gate.set()
    assert set(await asyncio.gather(*calls)) == {-1}
    assert order == list(range(3000))


async def test_serial_by_default_reentrant_beside(world):
    echo = Echo()
    near, _ = await world.pair(echo)
    ref = near.ref(Echo, "callee")
    sleepers = [asyncio.ensure_future(ref.sleep(0.4)) for _ in range(3)]
    await until(lambda: "asleep" in echo.log)
    assert await ref.ping() > 0  # re-entrant: does not wait
    assert "awake" not in echo.log
    await asyncio.gather(*sleepers)
    assert echo.log == ["asleep", "awake"] * 3


async def test_a_full_mailbox_refuses_calls(world):
    echo = Echo()
    echo.gate.clear()
    near, _ = await world.pair(echo)
    ref = near.ref(Echo, "callee")
    notes = [asyncio.ensure_future(ref.note("x")) for _ in range(16)]
    await until(lambda: cell_of(echo).num_held == 16)
    with pytest.raises(Overloaded, match="mailbox is full"):
        await ref.note("too much")
    echo.gate.set()
    await asyncio.gather(*notes)
    await ref.note("welcome")
    assert echo.log == ["x"] * 16 + ["welcome"]


async def test_an_inherited_deadline_that_is_over_sends_nothing(world):
    class Late(Actor):
        @call(deadline=0.2, cancellable=False)
        async def go(self) -> str:
            await asyncio.sleep(0.4)
            try:
                await self.ctx.ref(Echo, "callee").ping()
            except NotSent as error:
                outcome.append(error)
            return ""

    outcome = []
    near, far = await world.pair(Echo())
    await far.start(Late(), "late")
    with pytest.raises(DeadlineExceeded):
        await near.ref(Late, "late").go()
    await until(lambda: outcome)
    assert "no time is left" in str(outcome[0])


async def test_a_caller_with_other_declarations_is_refused(world):
    class EchoTwo(Actor):
        @call(deadline=5)
        async def ping(self, text: str) -> int:
            raise NotImplementedError

        @call(deadline=5)
        async def pong(self) -> int:
            raise NotImplementedError

    near, _ = await world.pair(Echo())
    with pytest.raises(BadRequest, match="callee.ping: Object contains unknown field `text`"):
        await near.ref(EchoTwo, "callee").ping("x")
    from myxa.core.errors import NoSuchMethod

    with pytest.raises(NoSuchMethod, match="pong"):
        await near.ref(EchoTwo, "callee").pong()
