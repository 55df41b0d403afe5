"""What callers and watchers learn when processes end, are replaced, lose their connections, or fail inside."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import Any

import pytest
from tests.harness.waiting import until
from tests.harness.waits import waits
from tests.transport.cast_of_actors import Echo, Watcher

from myxa.core.errors import CallError, EngineError, LaunchError, NoSuchActor, PeerDied, StaleEpoch
from myxa.core.refs import with_deadline
from myxa.transport import outbox as outbox_module
from myxa.transport.address import Rendezvous
from myxa.transport.node import JobKey, Node

pytestmark = [pytest.mark.timeout(60)]


def cell_of(actor: Any) -> Any:
    return actor.ctx.fail.__self__


def key_of(node):
    return node._key


@pytest.fixture
def kind(request):
    return getattr(request, "param", "ipc")


real = pytest.mark.parametrize("kind", ["ipc", "tcp"], indirect=True)
every = pytest.mark.parametrize("kind", ["inproc", "ipc"], indirect=True)


@real
async def test_a_killed_callee_fails_its_calls_as_soon_as_its_exit_is_reported(world):
    near = await world.join("near")
    child = await world.child("far")
    await near.wait_for("far", timeout_s=20)
    ref = near.ref(Echo, "far")
    assert await ref.ping() == child.pid
    pending = asyncio.ensure_future(with_deadline(ref, 30).sleep(30))
    while "asleep" not in await ref.seen():
        await asyncio.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    status = await child.wait()
    began = time.monotonic()
    assert not await near.registry.process_exited("far", 0, status, pid=child.pid + 1)  # somebody else's end
    assert await near.registry.process_exited("far", 0, status, pid=child.pid)
    with pytest.raises(PeerDied, match=r"far\.sleep: its process ended with signal SIGKILL while the call was pending"):
        await pending
    assert time.monotonic() - began < 10  # not its deadline
    with pytest.raises(NoSuchActor, match=r"not there any more.*SIGKILL"):
        await ref.ping()


async def test_a_killed_callee_is_noticed_without_a_report(world, monkeypatch):
    monkeypatch.setattr(outbox_module, "TIMEOUTS", waits(wire={"unreachable_s": 0.5}))
    near = await world.join("near")
    child = await world.child("far")
    await near.wait_for("far", timeout_s=20)
    ref = near.ref(Echo, "far")
    pending = asyncio.ensure_future(with_deadline(ref, 30).sleep(30))
    while "asleep" not in await ref.seen():
        await asyncio.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    await child.wait()
    with pytest.raises(PeerDied, match="no process listens there"):
        await pending
    await until(lambda: not near.peers("far"))  # the registry noticed as well and told everybody


async def test_a_restarted_process_gets_a_new_epoch_and_new_calls(world):
    near = await world.join("near")
    watcher = Watcher("far")
    await near.start(watcher, "watcher")
    first = await world.child("far")
    await near.wait_for("far", timeout_s=20)
    ref = near.ref(Echo, "far")
    assert await ref.epoch() == 1
    first.kill()
    await near.registry.process_exited("far", 1, await first.wait())
    second = await world.child("far")
    await near.wait_for("far", timeout_s=20)
    assert await ref.epoch() == 2
    assert await ref.ping() == second.pid
    assert not await near.registry.process_exited("far", 1, -9)  # old news about an old incarnation
    assert await ref.ping() == second.pid
    await until(lambda: len(watcher.told) == 3)
    assert [(e.kind, e.epoch) for e in watcher.told] == [("up", 1), ("down", 1), ("up", 2)]
    assert "SIGKILL" in watcher.told[1].reason


@every
async def test_a_replaced_incarnation_is_fenced_and_without_effect(world, caplog):
    caplog.set_level(logging.CRITICAL)
    echo = Echo()
    near, old = await world.pair(echo)
    await near.start(Echo(), "near/echo")
    ref = near.ref(Echo, "callee")
    pending = asyncio.ensure_future(ref.sleep(30))
    await until(lambda: echo.log == ["asleep"])
    new = await world.join("far")
    assert (old.epoch, new.epoch) == (1, 2)
    with pytest.raises(PeerDied, match="replaced by epoch 2"):
        await pending
    error = await asyncio.wait_for(asyncio.shield(old.failed), 10)
    assert isinstance(error, StaleEpoch)
    with pytest.raises(CallError):  # nobody listens to the zombie
        await with_deadline(old.ref(Echo, "near/echo"), 0.5).ping()
    await new.start(Echo(), "callee")
    await near.wait_for("callee", timeout_s=20)
    assert await ref.epoch() == 2


@every
async def test_an_actor_that_fails_tells_its_node_and_its_watchers(world, caplog):
    caplog.set_level(logging.CRITICAL)
    near, far = await world.pair(Echo())
    watcher = Watcher("callee")
    await near.start(watcher, "watcher")
    ref = near.ref(Echo, "callee")
    pending = asyncio.ensure_future(ref.sleep(20))
    await asyncio.sleep(0.05)
    waiting = asyncio.ensure_future(ref.note("never read, it waits behind the sleeper"))
    next(iter(far._cells.values())).spawn(explode(), "explode")
    error = await asyncio.wait_for(asyncio.shield(far.failed), 5)
    assert isinstance(error, EngineError)
    for call in (pending, waiting):
        with pytest.raises(CallError):
            await call
    await until(lambda: watcher.told)
    assert watcher.told[0].kind == "down"
    assert "it failed: boom" in watcher.told[0].reason
    with pytest.raises(NoSuchActor, match="boom"):
        await ref.ping()


@every
async def test_calls_go_on_when_the_registry_is_gone(world):
    near, _ = await world.pair(Echo())
    ref = near.ref(Echo, "callee")
    await ref.ping()
    await world.host.close(grace_s=0)
    world.nodes.remove(world.host)
    for _ in range(5):
        assert await ref.ping() > 0
        await asyncio.sleep(0.05)
    with pytest.raises(NoSuchActor):
        await with_deadline(near.ref(Echo, "stranger"), 1.0).ping()


async def explode():
    raise EngineError("boom")


@pytest.mark.parametrize("timeout_s", [0.5, 0])
async def test_no_registry_is_a_clear_error(timeout_s):
    """Also to a process that stood still until its time was over."""
    rdzv = Rendezvous.at("127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(LaunchError, match=rf"no answer from the registry at tcp://127.0.0.1:9 within {timeout_s} s"):
        await Node.attach(name="alone", rdzv=rdzv, key=JobKey.generate(), timeout_s=timeout_s)
    assert time.monotonic() - began < 5


async def test_waiting_names_who_is_missing(world):
    node = await world.join("near")
    await node.start(Echo(), "here")
    with pytest.raises(LaunchError, match=r"waited 0.2 s for rollout/7, trainer/0"):
        await node.wait_for("here", "rollout/7", "trainer/0", timeout_s=0.2)
