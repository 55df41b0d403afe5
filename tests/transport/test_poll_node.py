"""A node turned by hand: what one poll does, when its descriptor is readable, what is refused."""

from __future__ import annotations

import asyncio
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from myxa.core.actor import MailboxPolicy
from myxa.core.errors import CallError, ConfigError, DeadlineExceeded, EngineError, LaunchError, NotSent, WouldDeadlock
from myxa.core.refs import with_deadline
from myxa.transport.poll_node import PollNode
from myxa.transport.sync_node import NodeThread

sys.path.insert(0, str(Path(__file__).parent))
from tests.transport.cast_of_actors import Echo, EchoContract

pytestmark = pytest.mark.timeout(60)


class Roomy(Echo):
    mailbox = MailboxPolicy(size=4096)

    async def note(self, text: str) -> None:
        self.log.append(text)


@pytest.fixture
def node() -> Iterator[PollNode]:
    with PollNode(name="scheduler") as made:
        yield made


@pytest.fixture
def guest(node: PollNode) -> Iterator[NodeThread]:
    """Somebody elsewhere, who can only join while the node is polled."""
    made: list[NodeThread] = []
    thread = threading.Thread(target=lambda: made.append(NodeThread(name="guest", rdzv=node.rendezvous)))
    thread.start()
    poll_until(node, lambda: not thread.is_alive())
    yield made[0]
    closing = threading.Thread(target=made[0].close)
    closing.start()
    poll_until(node, lambda: not closing.is_alive())


def poll_until(node: PollNode, is_met: Callable[[], bool], max_messages: int = 256) -> list[int]:
    taken: list[int] = []
    give_up_at = time.monotonic() + 20
    while not is_met():
        assert time.monotonic() < give_up_at, "polled for 20 s"
        taken.append(node.poll(max_messages, timeout_s=0.01))
    return taken


def test_a_host_that_polls_serves_calls(node: PollNode, guest: NodeThread):
    node.start(Echo(), "echo")
    ref = guest.ref(EchoContract, "echo")
    futures = [guest.submit(ref.ping) for _ in range(15)]
    poll_until(node, lambda: all(future.done() for future in futures))
    assert len({future.result() for future in futures}) == 1
    idle = [node.poll() for _ in range(100)]
    assert sum(idle) < 20, "an idle node takes in next to nothing"


def test_a_poll_takes_no_more_messages_than_it_may(node: PollNode, guest: NodeThread):
    echo = Roomy()
    node.start(echo, "echo")
    ref = guest.ref(EchoContract, "echo")

    async def burst() -> None:
        await asyncio.gather(*(ref.note(str(n)) for n in range(300)))

    sent = threading.Thread(target=guest.run, args=(burst, 10))
    sent.start()
    taken = poll_until(node, lambda: len(echo.log) == 300, max_messages=7)
    sent.join()
    assert echo.log == [str(n) for n in range(300)]
    assert max(taken) <= 7
    assert sum(taken) >= 300


def test_a_poll_waits_only_if_it_is_told_to(node: PollNode):
    started = time.monotonic()
    for _ in range(100):
        node.poll()
    assert time.monotonic() - started < 5
    started = time.monotonic()
    node.poll(timeout_s=0.3)
    assert time.monotonic() - started >= 0.29
    for arguments in ((0, 0.0), (1, -1.0)):
        with pytest.raises(ValueError, match="leave nothing to do"):
            node.poll(*arguments)


def test_calls_of_the_host_itself(node: PollNode):
    node.start(Echo(), "own")
    ref = node.ref(EchoContract, "own")
    assert node.call(ref.ping) > 0
    with pytest.raises(EngineError):
        node.call(ref.fail, "engine")
    with pytest.raises(DeadlineExceeded):
        node.call(with_deadline(ref, 0.2).sleep, 30)
    assert [item.name for item in node.items(ref.count, 0, 12)] == [str(n) for n in range(12)]
    future = node.submit(ref.ping)
    with pytest.raises(CallError, match="has not ended -- poll"):
        future.result()
    poll_until(node, future.done)
    assert future.result() > 0
    failing = node.submit(ref.fail, "engine")
    poll_until(node, failing.done)
    assert isinstance(failing.exception(), EngineError)
    sleeping = node.submit(ref.sleep, 30)
    poll_until(node, lambda: node.peers("own") == ("own",) and node.poll() == 0)
    assert sleeping.cancel()
    poll_until(node, lambda: "cancelled" in node.call(ref.seen))


def test_its_descriptor_is_readable_when_there_is_something_to_do(node: PollNode, guest: NodeThread):
    """A host that polls for nothing but its descriptor: calls are answered, deadlines pass, leftovers are done."""
    echo = Roomy()
    node.start(echo, "echo")
    ref = guest.ref(EchoContract, "echo")
    poller = select.poll()
    poller.register(node.fileno(), select.POLLIN)
    num_polls = 0

    def serve(is_met: Callable[[], bool]) -> None:
        nonlocal num_polls
        give_up_at = time.monotonic() + 15
        while not is_met():
            assert time.monotonic() < give_up_at
            if poller.poll(2000):
                num_polls += 1
                node.poll(max_messages=3)

    started = time.monotonic()
    while time.monotonic() - started < 0.5:
        serve(lambda: bool(poller.poll(100)) or time.monotonic() - started > 0.5)
        node.poll()
        num_polls += 1
    assert num_polls < 60, "an idle node is no busy loop"
    answered = guest.submit(ref.ping)
    serve(answered.done)
    late = node.submit(with_deadline(node.ref(EchoContract, "echo"), 0.3).sleep, 30)
    serve(late.done)
    assert isinstance(late.exception(), DeadlineExceeded)

    async def burst() -> None:
        await asyncio.gather(*(ref.note(str(n)) for n in range(40)))

    done = guest.submit(ref.seen)
    serve(done.done)
    thread = threading.Thread(target=guest.run, args=(burst, 10))
    thread.start()
    serve(lambda: sum(text.isdigit() for text in echo.log) == 40)
    thread.join()


def test_a_host_that_stops_polling_for_a_while_says_so(node: PollNode, guest: NodeThread):
    del guest
    with node.busy(30, "compiling"):
        assert 25 < node._node.busy_s <= 30
    assert node._node.busy_s == 0
    with pytest.raises(ConfigError), node.busy(0, "nothing"):
        pass
    node.poll()


def test_it_belongs_to_its_thread(node: PollNode):
    seen: list[BaseException] = []

    def elsewhere() -> None:
        for act in (node.poll, node.fileno, lambda: node.run(nothing, 1), lambda: node.close(0)):
            try:
                act()
            except LaunchError as error:
                seen.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(seen) == 4
    assert "belongs to the thread that opened it" in str(seen[0])
    node.poll()


async def nothing() -> None:
    pass


def test_a_handler_cannot_poll_the_node_that_runs_it(node: PollNode):
    class Confused(Echo):
        async def ping(self) -> int:
            return node.poll()

    node.start(Confused(), "echo")
    with pytest.raises(WouldDeadlock, match="is being polled already"):
        node.call(node.ref(EchoContract, "echo").ping)


def test_one_polled_node_inside_another(node: PollNode):
    """A handler of one node turns another one; both go on."""
    with PollNode(name="inner") as inner:
        inner.start(Echo(), "echo")

        class Outer(Echo):
            async def ping(self) -> int:
                loop = asyncio.get_running_loop()
                task = asyncio.current_task()
                answer = inner.call(inner.ref(EchoContract, "echo").ping)
                assert asyncio.get_running_loop() is loop
                await asyncio.sleep(0)
                assert asyncio.current_task() is task
                return answer

        node.start(Outer(), "outer")
        assert node.call(node.ref(EchoContract, "outer").ping) > 0


def test_an_interrupt_comes_through_and_the_node_goes_on(node: PollNode, guest: NodeThread):
    class Interrupted(Roomy):
        async def ping(self) -> int:
            raise KeyboardInterrupt

    echo = Interrupted()
    node.start(echo, "echo")
    ref = guest.ref(EchoContract, "echo")

    async def burst() -> None:
        await asyncio.gather(*(ref.note(str(n)) for n in range(10)))
        pinging = asyncio.get_running_loop().create_task(with_deadline(ref, 0.5).ping())
        await asyncio.gather(*(ref.note(str(n)) for n in range(10, 50)))
        await asyncio.wait([pinging])
        pinging.exception()

    num_interrupts = 0
    thread = threading.Thread(target=guest.run, args=(burst, 10))
    thread.start()
    while thread.is_alive():
        try:
            node.poll(timeout_s=0.01)
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 1
    poll_until(node, lambda: len(echo.log) == 50)
    assert echo.log == [str(n) for n in range(50)]


def test_a_closed_node_is_closed():
    node = PollNode(name="host")
    ref = node.ref(EchoContract, "registry")
    node.close()
    node.close()
    for act in (node.poll, node.fileno, lambda: node.call(ref.ping), lambda: node.submit(ref.ping)):
        with pytest.raises(NotSent, match="closed"):
            act()


def test_what_attaching_raises_leaves_nothing(node: PollNode):
    before = threading.active_count()
    with pytest.raises(LaunchError, match="no answer from the registry"):
        gone = PollNode(name="gone")
        rdzv = gone.rendezvous
        Path(rdzv.socket_dir).chmod(0o700)
        gone.close()
        Path(rdzv.socket_dir).mkdir(mode=0o700)
        try:
            PollNode(name="late", rdzv=rdzv, timeout_s=0.3)
        finally:
            Path(rdzv.socket_dir).rmdir()
    assert threading.active_count() == before
