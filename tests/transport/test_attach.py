"""A node in somebody else's program: it takes nothing over and leaves nothing behind; on uvloop as on asyncio."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop
from tests.transport.cast_of_actors import Echo, EchoContract

from myxa.core.actor import MailboxPolicy
from myxa.core.errors import ConfigError, EngineError, NoSuchActor
from myxa.transport.node import Node

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
import asyncio, logging, signal, sys, threading
sys.path.insert(0, sys.argv[1])
from tests.transport.cast_of_actors import Echo, EchoContract
from myxa.transport.node import Node

async def main():
    loop = asyncio.get_running_loop()
    before = (asyncio.get_event_loop_policy(), [signal.getsignal(s) for s in (2, 15)], logging.getLogger().handlers[:],
              logging.getLogger("myxa").handlers[:], threading.active_count())
    async with asyncio.timeout(20):
        node = await Node.attach(name="guest")
        other = await Node.attach(name="other", rdzv=node.rendezvous)
        await node.start(Echo(), "echo")
        ticks = asyncio.ensure_future(tick())
        ref = other.ref(EchoContract, "echo")
        for _ in range(50):
            await ref.ping()
        assert [i.name async for i in ref.count(0, 20)] == [str(i) for i in range(20)]
        await other.close()
        await node.close()
        ticks.cancel()
    after = (asyncio.get_event_loop_policy(), [signal.getsignal(s) for s in (2, 15)], logging.getLogger().handlers[:],
             logging.getLogger("myxa").handlers[:], threading.active_count())
    assert before == after, (before, after)
    assert [t for t in asyncio.all_tasks() if t not in (ticks, asyncio.current_task())] == []

async def tick():
    while True:
        await asyncio.sleep(0.001)

asyncio.run(main(), debug=True)
assert "torch" not in sys.modules and "transformers" not in sys.modules
print("fine")
"""


def test_in_a_plain_asyncio_program():
    folder = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", PROGRAM, folder],
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"
    problems = [line for line in done.stderr.splitlines() if "Executing <" not in line]  # slow machine, debug mode
    assert problems == []


def test_on_uvloop():
    async def main():
        node = await Node.attach(name="host")
        other = await Node.attach(name="other", rdzv=node.rendezvous)
        await node.start(Echo(), "echo")
        ref = other.ref(EchoContract, "echo")
        num_done = 0
        for _ in range(20):
            num_done += len(await asyncio.gather(*(ref.ping() for _ in range(10))))
        await other.close()
        await node.close()
        return num_done

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(asyncio.wait_for(main(), 20)) == 200


@pytest.mark.asyncio
async def test_closing_lets_running_calls_finish_and_refuses_new_ones():
    node = await Node.attach(name="host")
    other = await Node.attach(name="other", rdzv=node.rendezvous)
    echo = Echo()
    await node.start(echo, "echo")
    running = asyncio.ensure_future(other.ref(EchoContract, "echo").sleep(0.3))
    while not echo.log:
        await asyncio.sleep(0.01)
    await node.close(grace_s=5)
    assert await running is not None
    assert echo.log == ["asleep", "awake"]
    await other.close(grace_s=0)


@pytest.mark.asyncio
async def test_actors_stop_in_reverse_order_and_hear_why():
    order = []

    class Noted(Echo):
        async def on_stop(self, why):
            order.append((self.ctx.name, why))

    node = await Node.attach(name="host")
    for name in ("first", "second", "third"):
        await node.start(Noted(), name)
    await node.stop("second", "enough")
    with pytest.raises(NoSuchActor):
        await node.stop("second")
    await node.close()
    await node.close()
    assert order == [("second", "enough"), ("third", "shutdown"), ("first", "shutdown")]


@pytest.mark.asyncio
async def test_names_are_checked_and_unique():
    node = await Node.attach(name="host")
    try:
        await node.start(Echo(), "echo")
        with pytest.raises(ConfigError, match="already"):
            await node.start(Echo(), "echo")
        for name in ("", "Echo", "a b", "a//b", "../x", "x" * 200):
            with pytest.raises(ConfigError, match="cannot name"):
                await node.start(Echo(), name)
        with pytest.raises(ConfigError, match="is no actor"):
            await node.start(object(), "thing")
    finally:
        await node.close()


@pytest.mark.asyncio
async def test_background_tasks_end_with_their_actor_and_have_no_deadline():
    seen = []

    class Busy(Echo):
        mailbox = MailboxPolicy(size=4)

        async def ping(self):
            self.ctx.spawn(self.work(), name="work")
            return 1

        async def work(self):
            seen.append(self.ctx.deadline())
            try:
                await asyncio.sleep(100)
            finally:
                seen.append("ended")

    node = await Node.attach(name="host")
    ref = await node.start(Busy(), "busy")
    await ref.ping()
    await asyncio.sleep(0.05)
    assert seen == [None]
    await node.close()
    assert seen == [None, "ended"]


@pytest.mark.asyncio
async def test_an_actor_that_fails_while_it_starts_is_not_there(caplog):
    caplog.set_level("CRITICAL")

    class Hasty(Echo):
        async def on_start(self):
            self.ctx.spawn(self.explode(), name="explode")
            await asyncio.sleep(0.1)

        async def explode(self):
            raise EngineError("too early")

    node = await Node.attach(name="host")
    with pytest.raises(EngineError, match="too early"):
        await node.start(Hasty(), "hasty")
    assert node.peers("hasty") == ()
    assert isinstance(node.failed.result(), EngineError)
    await node.close()


@pytest.mark.asyncio
async def test_closing_lets_a_failed_actor_finish_its_end(caplog):
    caplog.set_level("CRITICAL")
    ends = []

    class Careful(Echo):
        async def on_stop(self, why):
            await asyncio.sleep(0.3)
            ends.append(why)

    node = await Node.attach(name="host")
    ref = await node.start(Careful(), "careful")
    await ref.fail("fatal")
    error = await node.failed
    await node.close(grace_s=0.1)
    assert isinstance(error, EngineError)
    assert ends == ["it failed: exploded in the background"]


@pytest.mark.asyncio
async def test_an_actor_may_call_itself_back_only_reentrantly():
    class Selfish(Echo):
        async def sleep(self, seconds):
            return float(await self.ctx.ref(EchoContract, "self").ping() > 0)

    node = await Node.attach(name="host")
    ref = await node.start(Selfish(), "self")
    assert await ref.sleep(1) == 1.0
    await node.close()
