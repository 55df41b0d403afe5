"""What users of pyzmq fall into (docs/reliability.md lists it all): one regression test for each that needs its own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
import zmq
from tests.faults.depot import Depot, DepotContract, pair
from tests.faults.growth import check_flat, check_work, held
from tests.harness.waiting import until

from myxa.core.errors import CallError
from myxa.core.refs import with_deadline
from myxa.transport import outbox
from myxa.transport import zeromq as zmq_sockets
from myxa.transport.node import JobKey, Node
from myxa.transport.wire import Lane

ROOT = Path(__file__).parents[2]
SOURCES = [path for floor in ("core", "transport", "actors", "launch") for path in sorted((ROOT / floor).rglob("*.py"))]

pytestmark = pytest.mark.timeout(60)


ways = pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])


def wires_of(node: Node) -> Any:
    """The transport, to break it from inside."""
    return node._transport


def test_what_we_never_use_is_not_used():
    """zmq.asyncio, pickled messages, PUB/SUB and REQ, chosen routing ids, draft sockets, proxies of other people."""
    never = re.compile(
        r"zmq\.asyncio|\w_pyobj|zmq\.(PUB|SUB|XPUB|XSUB|REQ|SERVER|CLIENT|RADIO|DISH|ROUTING_ID|IDENTITY)\b"
        r"|ROUTER_HANDOVER|multiprocessing\.shared_memory|MessageTracker|track=True"
    )
    found = []
    for path in SOURCES:
        code = re.sub(r'"""(?s:.*?)"""|#.*', "", path.read_text())
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in never.finditer(code)]
    assert found == []
    assert len(SOURCES) > 80


def test_every_socket_is_made_with_our_options():
    """No lingering, no high-water mark, a largest message; heartbeats on the control lane of tcp, with a short TTL."""
    context = zmq_sockets.make_context()
    try:
        assert context.get(zmq.MAX_SOCKETS) > 1023
        for lane, key in itertools.product(Lane, (None, JobKey.generate())):
            for make in (zmq_sockets.make_inbox, zmq_sockets.make_outbox):
                server = (key.public,) if key and make is zmq_sockets.make_outbox else ()
                socket: Any = make(context, lane, key, *server)
                assert socket.linger == 0
                assert (socket.sndhwm, socket.rcvhwm) == (0, 0)
                assert 0 < socket.maxmsgsize <= zmq_sockets.max_message(lane)
                assert bool(socket.getsockopt(zmq.HEARTBEAT_IVL)) == (lane is Lane.CONTROL and key is not None)
                assert socket.getsockopt(zmq.HEARTBEAT_TTL) < 6553 * 1000
                assert socket.type == (zmq.ROUTER if make is zmq_sockets.make_inbox else zmq.DEALER)
                if socket.type == zmq.DEALER:
                    assert socket.getsockopt(zmq.IMMEDIATE) == 1
                    assert socket.getsockopt(zmq.RECONNECT_IVL) == -1
                socket.close(linger=0)
    finally:
        context.term()


async def test_nothing_is_sent_on_a_router_that_receives(tmp_path, monkeypatch):
    """A ROUTER drops silently what it cannot route, and sending on a polled socket eats wake-ups."""
    sent: set[tuple[int, bool]] = set()

    def watched(original):
        def send(self, *args, **kwargs):
            endpoint = self.get_string(zmq.LAST_ENDPOINT) if not self.closed else ""
            sent.add((self.type, endpoint.startswith("inproc://zeromq.zap")))
            return original(self, *args, **kwargs)

        return send

    monkeypatch.setattr(zmq.Socket, "send", watched(zmq.Socket.send))
    monkeypatch.setattr(outbox, "_send", watched(outbox._send))
    async with pair(tmp_path, tcp=True) as (near, _):
        for _ in range(20):
            await near.ref(DepotContract, "depot").whoami()
    assert {kind for kind, is_zap in sent if not is_zap} == {int(zmq.DEALER)}


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])  # uvloop takes a number only
def test_wake_ups_are_not_missed_under_bursts_and_pauses(tmp_path, make_loop):
    """An edge-triggered descriptor that is looked at wrongly hangs: within thousands of bursts, nearly surely."""
    rng = random.Random(5)

    async def main() -> None:
        async with pair(tmp_path) as (near, _):
            depot = with_deadline(near.ref(DepotContract, "depot"), 5)
            for _ in range(300):
                await asyncio.gather(*(depot.whoami() for _ in range(rng.choice((1, 1, 2, 5, 30)))))
                await asyncio.sleep(rng.choice((0, 0, 0, 0.0005, 0.003)))

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


async def test_cancelling_at_any_moment_costs_nobody_elses_message(tmp_path):
    """`wait_for(socket.recv())` may drop a message when it is cancelled at the wrong moment; here nobody waits there."""
    rng = random.Random(6)
    async with pair(tmp_path) as (near, _):
        depot = with_deadline(near.ref(DepotContract, "depot"), 5)

        async def hasty() -> None:
            try:
                await asyncio.wait_for(depot.whoami(), rng.random() * 0.002)
            except (TimeoutError, CallError):
                pass

        async def steady() -> None:
            for i in range(100):
                assert await depot.work(str(i), 0.0) == str(i)

        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(steady()) for _ in range(4)]
            while not all(task.done() for task in others):
                await hasty()
        await until(lambda: len(near._session.calls) == 1, "the end of all calls but the mirror's")


async def test_a_burst_of_answers_leaves_room_for_other_tasks(tmp_path):
    """Futures that are done already starve whoever does not wait for them."""
    async with pair(tmp_path) as (near, _):
        depot = near.ref(DepotContract, "depot")
        await depot.whoami()
        num_answers, between_turns = 0, [0]

        async def ask() -> None:
            nonlocal num_answers
            await depot.whoami()
            num_answers += 1

        async def other_work() -> None:
            while True:
                between_turns.append(num_answers)
                await asyncio.sleep(0)

        task = asyncio.get_running_loop().create_task(other_work())
        await asyncio.gather(*(ask() for _ in range(3000)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert max(after - before for before, after in itertools.pairwise(between_turns)) < 500


async def test_large_messages_leave_no_memory_behind(tmp_path):
    """copy=False on both sides makes the resident memory swing with the garbage collector."""
    async with pair(tmp_path, tcp=True) as (near, _):
        depot = with_deadline(near.ref(DepotContract, "depot"), 20)
        data = np.zeros(8 << 20, np.uint8)
        for _ in range(4):
            await depot.weigh("t", data, 0.0)
        before = held()
        for _ in range(16):
            await depot.weigh("t", data, 0.0)
        check_flat(before, held(), mebibytes=48.0)


@ways
async def test_monitors_and_connections_that_break_leave_no_descriptor(tmp_path, tcp, caplog):
    """`get_monitor_socket` without `disable_monitor` leaks a descriptor, or hangs the end."""
    caplog.set_level(logging.CRITICAL, "myxa")
    async with pair(tmp_path, tcp=tcp) as (near, far):
        depot = with_deadline(near.ref(DepotContract, "depot"), 10)
        await depot.whoami()

        async def break_and_mend(number: int) -> None:
            for _ in range(number):
                for outbox in wires_of(near)._peers[far._key].outboxes:
                    if outbox is not None:
                        outbox._on_broken("cut by the test")
                await depot.whoami()
                await asyncio.sleep(0.03)  # one that ends sooner is a failed attempt, which takes longer each time

        await check_work(break_and_mend, 3, 30, 0.0)


async def test_closing_beside_a_dead_peer_does_not_hang(tmp_path):
    """LINGER is -1 by default and `term` then waits for a peer that will never read."""
    async with pair(tmp_path) as (near, far):
        depot = near.ref(DepotContract, "depot")
        await depot.whoami()
        for _, inbox in wires_of(far)._inboxes:  # it is there and reads no more
            inbox.stop()
        calls = [*(depot.work("t", 60.0) for _ in range(200)), depot.weigh("t", np.zeros(4 << 20, np.uint8), 0.0)]
        pending = [asyncio.ensure_future(one) for one in calls]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await near.close(grace_s=0.0)
        assert time.monotonic() - began < 10
        assert all(isinstance(end, CallError) for end in await asyncio.gather(*pending, return_exceptions=True))


async def test_what_was_queued_for_a_dead_process_never_reaches_its_next_incarnation(tmp_path, caplog):
    """libzmq's own queues outlive a connection and are delivered to whoever listens there next."""
    caplog.set_level(logging.CRITICAL, "myxa")
    async with pair(tmp_path) as (near, far):
        depot = near.ref(DepotContract, "depot")
        await depot.whoami()
        for _, inbox in wires_of(far)._inboxes:
            inbox.stop()  # it reads no more, as if it were stopped
        calls = [asyncio.get_running_loop().create_task(depot.work(f"old-{i}", 0.0)) for i in range(50)]
        await asyncio.sleep(0.1)
        reborn = await Node.attach(name="far", rdzv=near.rendezvous)
        await reborn.start(Depot(tmp_path / "second"), "depot")
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, CallError) for end in ends)
        await near.wait_for("depot", timeout_s=20)
        assert await with_deadline(depot, 10).work("new", 0.0) == "new"
        assert (tmp_path / "second").read_text() == "call new\n"
        await reborn.close(grace_s=0.0)


def test_reading_monitors_keeps_nothing():
    """pyzmq's `recv_monitor_message` makes an enumeration member of each number that an event comes with."""
    context = zmq_sockets.make_context()
    ends = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ends[0].bind("inproc://monitor")
    ends[1].connect("inproc://monitor")
    known = len(zmq.Event.__members__), len(zmq.Event._value2member_map_)
    for value in range(1000, 1500):
        ends[0].send_multipart([struct.pack("=hi", int(zmq.EVENT_DISCONNECTED), value), b"tcp://127.0.0.1:1"])
        assert ends[1].poll(5000)
        event = zmq_sockets.read_event(ends[1])
        assert event == (zmq.EVENT_DISCONNECTED, value, "tcp://127.0.0.1:1")
    assert (len(zmq.Event.__members__), len(zmq.Event._value2member_map_)) == known
    for end in ends:
        end.close(linger=0)
    context.term()
