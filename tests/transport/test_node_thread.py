"""A node in a thread: calls of many host threads, their ends, and what is refused."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.waiting import wait_until
from tests.transport.cast_of_actors import Echo, EchoContract, Item

from myxa.core.errors import (
    BadRequest,
    CallError,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    GatherError,
    LaunchError,
    NoSuchActor,
    NotSent,
    WouldDeadlock,
)
from myxa.core.refs import with_deadline
from myxa.transport import sync_node
from myxa.transport.node import Node
from myxa.transport.sync_node import NodeThread

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def host() -> Iterator[NodeThread]:
    with NodeThread(name="host", loop_factory=asyncio.SelectorEventLoop) as node:
        yield node


@pytest.fixture
def guest(host: NodeThread) -> Iterator[NodeThread]:
    with NodeThread(name="guest", rdzv=host.rendezvous) as node:
        yield node


def test_many_threads_call_at_once_and_each_gets_its_own_answers(host: NodeThread, guest: NodeThread):
    host.start(Echo(), "echo")
    ref = guest.ref(EchoContract, "echo")

    def work(number: int) -> None:
        for n in range(30):
            size = 100 * number + n
            assert guest.call(ref.size, np.zeros(size, np.uint8)) == size

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result(timeout=40)


def test_every_kind_of_handler(host: NodeThread, guest: NodeThread):
    echo = Echo()
    host.start(echo, "echo")
    guest.wait_for("echo", timeout_s=5)
    ref = guest.ref(EchoContract, "echo")
    item = Item(name="a", values=np.ones(3, np.float32))
    assert [i.name for i in guest.call(ref.echo, item, times=2)] == ["a", "a"]
    assert guest.call(ref.put, item, 1) == 1
    assert guest.call(ref.note, "hello") is None
    assert guest.call(ref.seen)[-1] == "hello"
    assert guest.run(lambda: guest.group(EchoContract, "echo").all(EchoContract.ping), 5).keys() == {"echo"}
    assert guest.peers("") == ("echo", "registry")
    host.stop("echo")
    with pytest.raises(NoSuchActor):
        host.stop("echo")


def test_errors_are_those_of_every_call(host: NodeThread, guest: NodeThread):
    host.start(Echo(), "echo")
    ref = guest.ref(EchoContract, "echo")
    with pytest.raises(EngineError, match="made of glass"):
        guest.call(ref.fail, "engine")
    with pytest.raises(DeadlineExceeded, match="echo.sleep") as caught:
        guest.call(with_deadline(ref, 0.2).sleep, 30)
    assert caught.value.callee == "echo"
    with pytest.raises(BadRequest):
        guest.call(ref.ping, 1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(LaunchError, match="is no method of a reference"):
        guest.call(asyncio.sleep, 1)
    with pytest.raises(TimeoutError, match="mine"):
        guest.run(raising, 5)
    with pytest.raises(ConfigError, match="is no actor"):
        host.start(object(), "thing")
    with pytest.raises(GatherError):
        guest.run(lambda: guest.group(EchoContract, ["echo"]).all(EchoContract.fail, "engine"), 5)


async def raising() -> None:
    raise TimeoutError("mine")


def test_a_handler_that_blocks_the_thread_holds_up_no_host(host: NodeThread, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sync_node, "SLACK_S", 0.2)
    lasts = threading.Event()

    class Blocking(Echo):
        async def ping(self) -> int:
            lasts.wait(20)
            return 1

    host.start(Blocking(), "echo")
    ref = host.ref(EchoContract, "echo")
    with pytest.raises(DeadlineExceeded, match=r"host: no answer within 0\.5 s; its thread is at .*threading\.py:\d+"):
        host.call(with_deadline(ref, 0.3).ping)
    lasts.set()
    assert host.call(ref.ping) == 1


def test_a_call_from_the_nodes_own_thread_is_refused(host: NodeThread):
    class Confused(Echo):
        async def ping(self) -> int:
            return host.call(host.ref(EchoContract, "echo").ping)

        async def epoch(self) -> int:
            host.close()
            return 1

    host.start(Confused(), "echo")
    ref = host.ref(EchoContract, "echo")
    with pytest.raises(WouldDeadlock, match="would wait for itself"):
        host.call(ref.ping)
    with pytest.raises(WouldDeadlock, match="cannot wait for its own end"):
        host.call(ref.epoch)


def test_cancelling_a_future_cancels_the_handler(host: NodeThread, guest: NodeThread):
    echo = Echo()
    host.start(echo, "echo")
    future = guest.submit(guest.ref(EchoContract, "echo").sleep, 30)
    wait_until(lambda: echo.log == ["asleep"])
    assert future.cancel()
    wait_until(lambda: echo.log == ["asleep", "cancelled"])


def test_closing_ends_the_calls_of_other_threads(host: NodeThread):
    host.start(Echo(), "echo")
    guest = NodeThread(name="guest", rdzv=host.rendezvous)
    ref = guest.ref(EchoContract, "echo")
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            guest.call(ref.sleep, 8)
        except CallError as error:
            ended.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    closers = [threading.Thread(target=guest.close, args=(0.1,)) for _ in range(2)]
    for thread in closers:
        thread.start()
    for thread in threads + closers:
        thread.join(20)
    assert len(ended) == 2
    guest.close()
    with pytest.raises(NotSent, match="guest is closed"):
        guest.call(ref.ping)
    with pytest.raises(NotSent):
        guest.submit(ref.ping)


def test_what_attaching_raises_comes_to_the_host_and_no_thread_is_left(host: NodeThread):
    before = threading.active_count()
    with pytest.raises(ConfigError, match="cannot name"):
        NodeThread(name="No Name")
    with pytest.raises(LaunchError, match="no such socket directory"):
        NodeThread(name="guest", rdzv=type(host.rendezvous)(endpoints=host.rendezvous.endpoints, socket_dir="/no"))
    assert threading.active_count() == before


def test_a_failed_actor_is_seen_from_outside(host: NodeThread, caplog: pytest.LogCaptureFixture):
    caplog.set_level("CRITICAL")
    host.start(Echo(), "echo")
    assert host.failure is None
    host.call(host.ref(EchoContract, "echo").fail, "fatal")
    wait_until(lambda: host.failure is not None)
    assert isinstance(host.failure, EngineError)


async def test_a_node_closes_where_no_thread_can_be_started_any_more(monkeypatch: pytest.MonkeyPatch):
    """As Python 3.12 behaves while it ends."""
    node = await Node.attach(name="host")

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError(f"can't create new thread at interpreter shutdown: {self.name}")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    await node.close()
