"""Coroutines that begin at once: to themselves they are in one task from the first line to the last."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest
from tests.transport.conftest import no_tasks_left

from myxa.core.actor import Actor, MailboxPolicy
from myxa.core.handlers import call
from myxa.transport.actor_runner import Eager
from myxa.transport.node import InprocNetwork, Node

pytestmark = [pytest.mark.timeout(30)]

mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="outside")


async def begun(coro) -> Any:
    """Start it from a callback of the loop, as the pump does."""
    loop = asyncio.get_running_loop()
    started = loop.create_future()
    eager = Eager(loop)

    def start():
        try:
            started.set_result(eager.start(coro, contextvars.copy_context()))
        except BaseException as error:
            started.set_exception(error)

    loop.call_soon(start)
    task = await started
    eager.close()
    return task


async def test_what_does_not_wait_is_over_at_once_and_needs_no_task():
    log = []

    async def work():
        log.append(asyncio.current_task() is not None)

    before = asyncio.all_tasks()
    assert await begun(work()) is None
    await asyncio.sleep(0)
    assert log == [True]
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("wait", ["sleep0", "sleep", "done", "future", "task", "gather", "timeout", "group"])
async def test_it_is_one_task_and_one_context_throughout(wait):
    seen = []
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.call_later(0.01, ready.set_result, 5)

    async def five():
        await asyncio.sleep(0.001)
        return 5

    async def work():
        mark.set("inside")
        seen.append(asyncio.current_task())
        if wait == "sleep0":
            await asyncio.sleep(0)
        elif wait == "sleep":
            await asyncio.sleep(0.001)
        elif wait == "done":
            done = loop.create_future()
            done.set_result(5)
            assert await done == 5
            await asyncio.sleep(0)
        elif wait == "future":
            assert await ready == 5
        elif wait == "task":
            assert await asyncio.ensure_future(five()) == 5
        elif wait == "gather":
            assert await asyncio.gather(five(), five()) == [5, 5]
        elif wait == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(10)
        else:
            async with asyncio.TaskGroup() as group:
                child = group.create_task(five())
            assert child.result() == 5
        seen.append(asyncio.current_task())
        seen.append(mark.get())
        return "result"

    task = await begun(work())
    assert task is not None
    assert await task == "result"
    assert seen == [task, task, "inside"]
    assert mark.get() == "outside"
    if not ready.done():
        await ready


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_cancelling_reaches_the_coroutine_whenever_it_comes(turns):
    log = []

    async def inner():
        try:
            await asyncio.sleep(10)
        finally:
            log.append("inner")

    async def work():
        try:
            await asyncio.ensure_future(inner())
        except asyncio.CancelledError:
            log.append("cancelled")
            raise
        finally:
            log.append("finally")

    task = await begun(work())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log[-2:] == ["cancelled", "finally"]
    await no_tasks_left()


async def test_errors_of_the_first_step_pass_through_later_ones_are_the_task_s():
    async def at_once():
        raise ValueError("now")

    async def later():
        await asyncio.sleep(0)
        raise ValueError("later")

    with pytest.raises(ValueError, match="now"):
        await begun(at_once())
    task = await begun(later())
    with pytest.raises(ValueError, match="later"):
        await task


async def test_from_within_a_task_and_within_another():
    loop = asyncio.get_running_loop()
    eager = Eager(loop)
    seen = []

    async def leaf():
        seen.append(asyncio.current_task())

    async def stem():
        mine = asyncio.current_task()
        assert eager.start(leaf(), contextvars.copy_context()) is None
        assert asyncio.current_task() is mine
        await asyncio.sleep(0)
        assert asyncio.current_task() is mine

    outer = asyncio.current_task()
    task = eager.start(stem(), contextvars.copy_context())
    assert asyncio.current_task() is outer
    assert task is not None
    await task
    assert seen[0] not in (outer, task)
    eager.close()


async def test_one_that_cancels_itself_harms_nobody_else():
    eager = Eager(asyncio.get_running_loop())

    async def suicidal():
        me = asyncio.current_task()
        assert me is not None
        me.cancel()

    async def other():
        await asyncio.sleep(0.001)
        return 1

    eager.start(suicidal(), contextvars.copy_context())
    task = eager.start(other(), contextvars.copy_context())
    assert task is not None
    assert await task == 1
    eager.close()


class Deep(Actor):
    mailbox = MailboxPolicy(size=10_000)

    def __init__(self):
        self.order: list[int] = []
        self.gate = asyncio.Event()

    @call(deadline=10)
    async def step(self, number: int) -> str:
        if number == 0:
            await self.gate.wait()
        self.order.append(number)
        left = mark.get()
        mark.set(f"step {number}")
        return left


async def hosted(actor):
    network = InprocNetwork()
    far = await Node.attach(name="far", network=network)
    near = await Node.attach(name="near", rdzv=far.rendezvous, network=network)
    await far.start(actor, "deep")
    return far, near, near.ref(Deep, "deep")


async def test_a_long_queue_is_worked_off_in_order_without_recursion_and_without_leaking_context():
    actor: Any = Deep()
    far, near, ref = await hosted(actor)
    calls = [asyncio.ensure_future(ref.step(n)) for n in range(3000)]
    while actor.ctx._cell.num_held < 900:  # the window of credit
        await asyncio.sleep(0.01)
    actor.gate.set()
    assert set(await asyncio.gather(*calls)) == {"outside"}
    assert actor.order == list(range(3000))
    await near.close()
    await far.close()
    await no_tasks_left()
