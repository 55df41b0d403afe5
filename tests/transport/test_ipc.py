"""Within one host: what is cut into messages arrives whole and in order, who is heard when, and who may come in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import uvloop
from tests.harness.waiting import until, wait_until
from tests.harness.waits import waits
from tests.transport.cast_of_actors import Echo, Keeper
from tests.transport.conftest import World
from tests.transport.lane_parts import GREETING, Events, Lab, Sink, envelopes, lab_at, number_of, parcel

from myxa.core.errors import DeadlineExceeded, LaunchError, NotSent
from myxa.core.refs import with_deadline
from myxa.transport import outbox as outbox_module
from myxa.transport.address import check_owner
from myxa.transport.outbox import Outbox
from myxa.transport.session.frames import LIMITS, Envelope, Kind, batch, chunk_header, encode, split
from myxa.transport.session.pending import UNIT_BYTES, WINDOW_UNITS

pytestmark = [pytest.mark.timeout(60)]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with lab_at(tmp_path) as lab:
        yield lab


@pytest.fixture
def kind() -> str:
    return "ipc"


# -- what comes in


def test_a_process_that_is_stopped_takes_the_connections_of_many_peers(tmp_path: Path):
    """Whether it hangs or has ended, its peers know apart by that."""
    code = f"""
import signal
from myxa.transport.wire import Lane
from myxa.transport.zeromq import make_context, make_inbox
socket = make_inbox(make_context(), Lane.CONTROL, None)
socket.bind("ipc://{tmp_path}/s")
print("listens", flush=True)
signal.pause()
"""
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    with (
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process,
        contextlib.ExitStack() as peers,
    ):
        peers.callback(process.kill)
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "its stop")
        for _ in range(min(most, 400)):
            peer = peers.enter_context(socket.socket(socket.AF_UNIX))
            peer.setblocking(False)
            peer.connect(f"{tmp_path}/s")  # raises if there is no room


@pytest.mark.asyncio
async def test_soles_batches_and_chunks_arrive_whole_and_in_order(lab: Lab, seed: int):
    rng, sink = random.Random(seed), Sink()
    lab.inbox(sink)
    bodies = [rng.randbytes(rng.choice((0, 1, 100, 5000, 70_000))) for _ in range(60)]
    datas = [bytes(encode(Envelope(kind=Kind.CALL, corr=i, body=body))) for i, body in enumerate(bodies)]
    client, position = lab.client(), 0
    while position < len(datas):
        some = datas[position : position + rng.choice((1, 1, 2, 5))]
        if len(some) == 1 and len(some[0]) > 1000:
            half = len(some[0]) // 2
            client.send(chunk_header(0, len(some[0])) + some[0][:half])
            client.send(chunk_header(half, len(some[0])) + some[0][half:])
        else:
            client.send(batch(some))
        position += len(some)
    await until(lambda: len(sink.came) == len(datas))
    assert sink.came == datas
    assert (len(set(sink.sources)), sink.wrong) == (1, [])


@pytest.mark.asyncio
async def test_what_makes_no_sense_is_reported_and_ends_no_connection(lab: Lab):
    sink = Sink()
    lab.inbox(sink)
    client = lab.client()
    wrong = (b"", b"B", b"nonsense", struct.pack("<cBHI", b"B", 1, 1, 9) + b"too short for")
    for data in wrong:
        client.send(data)
    client.send_multipart([batch([GREETING]), batch([GREETING])])
    client.send(batch([GREETING]))
    await until(lambda: len(sink.came) == 2)
    assert len(sink.wrong) == len(wrong) + 1


@pytest.mark.asyncio
@pytest.mark.parametrize("is_batch", [False, True])
async def test_a_turn_of_the_loop_is_bounded_however_many_send_and_each_is_heard(lab: Lab, is_batch: bool):
    sink = Sink()
    lab.inbox(sink)
    clients = [lab.client() for _ in range(8)]
    for client in clients:
        for _ in range(20 if is_batch else 100):
            client.send(batch([GREETING] * (5 if is_batch else 1)))

    def spend() -> None:
        until_s = time.monotonic() + 0.0002
        while time.monotonic() < until_s:
            pass

    sink.on_received = spend
    most = before = 0
    while len(sink.came) < 800:
        await asyncio.sleep(0)
        most = max(most, len(sink.came) - before)
        before = len(sink.came)
    assert most <= 4 * 10, "in a turn of each of the two sockets some five fit, and no more than a message beyond"
    assert len(set(sink.sources)) == 8


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_interrupt_in_the_middle_loses_nothing(lab: Lab, make_loop: type[asyncio.AbstractEventLoop]):
    sink = Sink()

    def once() -> None:
        sink.on_received = lambda: None
        raise KeyboardInterrupt

    async def send() -> None:
        lab.inbox(sink)
        client = lab.client()
        sink.on_received = once
        for number in range(5):
            client.send(batch([parcel(number).data]))
        client.send(batch([parcel(number).data for number in range(5, 9)]))
        await asyncio.sleep(5)

    loop = make_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(send())
    loop.run_until_complete(until(lambda: len(sink.came) == 9))
    assert [number_of(data) for data in sink.came] == list(range(9))
    lab.close()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


# -- what goes out


@pytest.mark.asyncio
async def test_each_connection_begins_with_a_greeting(lab: Lab):
    events = Events()
    outbox = lab.outbox(events)
    waiting = [parcel(number) for number in range(4)]
    for item in waiting:
        outbox.send(item)
    waiting[1].is_withdrawn = True
    for round_number in range(3):
        listener = lab.listener()
        came = await envelopes(listener, 4 if round_number == 0 else 2)
        assert came[0] == bytes(GREETING)
        assert [number_of(data) for data in came[1:]] == ([0, 2, 3] if round_number == 0 else [10 + round_number])
        listener.close(linger=0)
        await until(lambda count=round_number + 1: events.said.count("broken") == count)
        outbox.send(parcel(11 + round_number))
    assert not waiting[1].is_sent


@pytest.mark.asyncio
async def test_more_than_a_control_message_goes_in_chunks(lab: Lab):
    sink = Sink()
    lab.inbox(sink)
    outbox = lab.outbox(Events())
    large = parcel(2, 3 * LIMITS.chunk)
    for item in (parcel(1), large, parcel(3)):
        outbox.send(item)
    await until(lambda: len(sink.came) == 4)
    assert [number_of(data) for data in sink.came[1:]] == [1, 2, 3]
    assert sink.came[2] == large.data


@pytest.mark.asyncio
async def test_what_was_sent_needs_no_further_turn_of_the_loop_and_survives_the_close(lab: Lab):
    listener = lab.listener()
    events = Events()
    outbox = lab.outbox(events)
    await until(lambda: "ready" in events.said)
    parcels = [parcel(number, LIMITS.chunk - 100) for number in range(1, 7)]
    for item in parcels:
        outbox.send(item)
    outbox.depart()
    assert all(item.is_sent for item in parcels)
    outbox.close(5.0)
    assert [number_of(data) for data in await envelopes(listener, 7)] == list(range(7))


@pytest.mark.asyncio
async def test_nobody_there_is_said_after_a_while(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox_module, "TIMEOUTS", waits(wire={"unreachable_s": 0.3}))
    events = Events()
    lab.outbox(events)
    began = time.monotonic()
    await until(lambda: events.why)
    assert time.monotonic() - began > 0.25
    assert "ready" not in events.said


@pytest.mark.asyncio
async def test_under_load_messages_travel_together_and_alone_they_leave_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    sizes: list[int] = []
    put = Outbox._put

    def counted(self: Outbox, message: bytes | memoryview) -> bool:
        parts = split(memoryview(message))
        sizes.append(len(parts) if isinstance(parts, list) else 0)
        return put(self, message)

    near, _ = await world.pair(Keeper())
    ref = near.ref(Keeper, "callee")
    await ref.kept()
    monkeypatch.setattr(Outbox, "_put", counted)
    for _ in range(20):
        await ref.kept()
    assert max(sizes) <= 2  # nothing waits for company (a heartbeat may happen to be there)
    sizes.clear()
    await asyncio.gather(*(ref.kept() for _ in range(1000)))
    assert sum(sizes) >= 2000
    assert len(sizes) < 500  # a message of ZeroMQ each would be 2000


# -- who may come in

CONNECTS = """
import os, sys, zmq
os.setgid(65534); os.setuid(65534)
client = zmq.Context().socket(zmq.DEALER)
client.linger = 500
client.connect(sys.argv[1])
client.send(bytes.fromhex(sys.argv[2]))
client.close()
client.context.term()
"""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Where everybody may go: a mistake that must not be enough."""
    folder = Path(tempfile.mkdtemp(prefix="u-", dir="/tmp"))  # the tests' own is closed to others
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@as_root
@pytest.mark.asyncio
async def test_another_user_is_not_let_in(open_folder: Path):
    sink = Sink()
    with lab_at(open_folder) as lab:
        lab.inbox(sink)
        (open_folder / "s").chmod(0o666)
        command = [sys.executable, "-c", CONNECTS, lab.endpoint, batch([GREETING]).hex()]
        done = await asyncio.to_thread(subprocess.run, command, timeout=30, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lab.client().send(batch([parcel(1).data]))
        await until(lambda: sink.came)
    assert [number_of(data) for data in sink.came] == [1]


@as_root
def test_nothing_is_said_to_another_user(open_folder: Path):
    path = open_folder / "s"
    check_owner(f"ipc://{path}")  # a missing listener is found by connecting
    path.touch()
    check_owner(f"ipc://{path}")
    os.chown(path, 65534, 65534)
    with pytest.raises(LaunchError, match="another user"):
        check_owner(f"ipc://{path}")


# -- processes


@pytest.mark.asyncio
@pytest.mark.parametrize(("size", "number"), [(7000, 3000), (200_000, 240)], ids=["control", "bulk"])
async def test_what_is_said_to_a_stopped_process_is_bounded_and_the_rest_of_it_did_not_run(
    world: World, size: int, number: int
):
    near, other = await world.join("near"), await world.join("other")
    child = await world.child("keeper", "keeper")
    for node in (near, other):
        await node.wait_for("keeper", timeout_s=20)
    ref, data = near.ref(Keeper, "keeper"), np.ones(size)
    cost = -(-data.nbytes // UNIT_BYTES)
    await ref.add(data)  # all is connected
    while await ref.runs() < 1:  # a large one comes another way than the questions
        await asyncio.sleep(0.01)
    before, peak = psutil.Process().memory_info().rss, 0
    os.kill(child.pid, signal.SIGSTOP)
    try:
        stranger = asyncio.ensure_future(with_deadline(other.ref(Keeper, "keeper"), 30).runs())
        calls = asyncio.gather(*(with_deadline(ref, 1.5).add(data) for _ in range(number)), return_exceptions=True)
        while not calls.done():
            peak = max(peak, psutil.Process().memory_info().rss)
            await asyncio.sleep(0.02)
        ends = await calls
        assert not stranger.done()
    finally:
        os.kill(child.pid, signal.SIGCONT)
    num_sent = sum(isinstance(end, DeadlineExceeded) for end in ends)
    unsent = [end for end in ends if not isinstance(end, DeadlineExceeded)]
    assert all(isinstance(end, NotSent) and "waiting for credit" in str(end) for end in unsent)
    assert 0.7 * WINDOW_UNITS < num_sent * cost <= WINDOW_UNITS
    # What is under way may be there twice: copied out of the caller's array, and in ZeroMQ's own queue.
    assert peak - before <= 2 * num_sent * data.nbytes + (48 << 20) < number * data.nbytes
    assert await stranger >= 1, "its connection was made while nobody accepted it"
    for _ in range(WINDOW_UNITS // cost + 10):  # the credit comes back
        await with_deadline(ref, 30).add(data)
    assert 2 <= await ref.runs() <= 1 + num_sent + WINDOW_UNITS // cost + 10


@pytest.mark.asyncio
async def test_without_its_files_a_process_keeps_its_friends_and_is_soon_found_again(world: World):
    near, far = await world.pair(Echo())
    ref = near.ref(Echo, "callee")
    await ref.ping()
    for endpoint in far._transport.endpoints.ipc:
        Path(endpoint.removeprefix("ipc://")).unlink()
    for _ in range(20):
        assert await ref.ping() == os.getpid()
    late = await world.join("late")
    await late.wait_for("callee", timeout_s=10)
    assert await with_deadline(late.ref(Echo, "callee"), 20).ping() == os.getpid()
