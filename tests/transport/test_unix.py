"""The Unix socket of one host, half by half: what is cut up arrives whole and in order, and what comes in between."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from tests.harness.waiting import until
from tests.transport.raw_unix import RawUnix
from tests.transport.unix_parts import (
    GREETING,
    Events,
    Listener,
    Sink,
    envelopes,
    inbox_at,
    number_of,
    outbox_to,
    parcel,
)

from myxa.transport import unix as unix_inbox
from myxa.transport.outbox import TurnBudget
from myxa.transport.session.frames import LIMITS, Envelope, Kind, batch, chunk_header, encode, sole
from myxa.transport.session.session import MAX_VIOLATIONS
from myxa.transport.unix import MAX_MESSAGE, framed

pytestmark = [pytest.mark.timeout(60)]


# -- what comes in


@pytest.mark.parametrize("largest_piece", [1, 7, 3000, 1 << 20])
async def test_however_it_is_cut_up_all_arrives_whole_and_in_order(tmp_path, seed, largest_piece):
    rng = random.Random(seed)
    sink = Sink()
    inbox = inbox_at(tmp_path / "s", sink)
    sizes = (0, 1, 20, 100) if largest_piece < 100 else (0, 1, 100, 5000, 70_000, 300_000, 1_000_000)
    bodies = [rng.randbytes(rng.choice(sizes)) for _ in range(60)]
    datas = [bytes(encode(Envelope(kind=Kind.CALL, corr=i, body=body))) for i, body in enumerate(bodies)]
    stream, at = b"", 0
    while at < len(datas):
        count = rng.choice((1, 1, 1, 2, 9))
        some = datas[at : at + count] if sum(map(len, datas[at : at + count])) < 1 << 20 else datas[at : at + 1]
        stream += framed(sole(some[0]) if len(some) == 1 else batch(some))
        at += len(some)
    client = RawUnix(inbox.endpoint)

    async def send() -> None:
        loop, rest = asyncio.get_running_loop(), memoryview(stream)
        client.socket.setblocking(False)
        while rest:
            size = rng.randint(1, largest_piece)
            await loop.sock_sendall(client.socket, rest[:size])
            rest = rest[size:]
            await asyncio.sleep(0)

    await send()
    await until(lambda: len(sink.came) == len(datas))
    assert sink.came == datas
    assert len(set(sink.sources)) == 1
    assert sink.wrong == []
    client.close()
    await until(lambda: not inbox._connections)
    inbox.close()


async def test_chunks_come_together_and_what_makes_no_sense_inside_a_message_ends_no_connection(tmp_path):
    sink = Sink()
    inbox = inbox_at(tmp_path / "s", sink)
    client = RawUnix(inbox.endpoint)
    data = bytes(encode(Envelope(kind=Kind.CALL, body=os.urandom(5000))))
    client.send(chunk_header(0, 0, len(data)) + data[:3000])
    client.send(b"")
    client.send(b"B")
    client.send(b"nonsense of a moderate length")
    client.send(struct.pack("<cBHI", b"B", 1, 1, 9) + b"too short")
    client.send(struct.pack("<cBHI", b"B", 1, 1, 9) + b"too short for")
    client.send(chunk_header(1, 3000, len(data)) + data[3000:])
    await until(lambda: len(sink.came) == 2)
    assert sink.came == [b"too short", data]
    assert len(sink.wrong) == 4
    inbox.close()
    client.close()


async def test_a_length_of_no_sense_ends_the_connection_and_many_of_them_ban_the_process(tmp_path):
    sink, counters = Sink(), Counter[str]()
    inbox = inbox_at(tmp_path / "s", sink, counters)
    for number in range(MAX_VIOLATIONS + 1):
        client = RawUnix(inbox.endpoint)
        client.send_raw(struct.pack("<Q", MAX_MESSAGE + 1 + number) + b"GET / HTTP/1.1")
        await until(lambda number=number: counters["handshake_wrong"] == number + 1)
        assert client.is_ended()
        client.close()
    assert len(sink.wrong) == MAX_VIOLATIONS + 1
    refused = RawUnix(inbox.endpoint)
    await until(lambda: counters["pid_banned"] == 1)
    assert refused.is_ended()
    assert sink.came == []
    refused.close()
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(bytes.fromhex(sys.argv[2]))"
    command = [sys.executable, "-c", code, str(tmp_path / "s"), framed(sole(GREETING)).hex()]
    await asyncio.to_thread(subprocess.run, command, timeout=30, check=True)  # another process is let in
    await until(lambda: sink.came == [bytes(GREETING)])
    inbox.close()


async def test_who_says_nothing_is_shown_out(tmp_path, monkeypatch):
    monkeypatch.setattr(unix_inbox, "HELLO_LIMIT_S", 0.2)
    sink, counters = Sink(), Counter[str]()
    inbox = inbox_at(tmp_path / "s", sink, counters)
    silent, half, good = (RawUnix(inbox.endpoint) for _ in range(3))
    half.send_raw(framed(sole(GREETING))[:-8])
    good.send(sole(GREETING))
    await until(lambda: counters["handshake_unfinished"] == 2)
    await asyncio.sleep(0.1)
    good.send(sole(GREETING))
    await until(lambda: len(sink.came) == 2)
    assert silent.is_ended()
    assert half.is_ended()
    inbox.close()
    for client in (silent, half, good):
        client.close()


async def test_a_turn_of_the_loop_takes_no_longer_than_it_may_however_many_send(tmp_path):
    sink = Sink()
    turn = TurnBudget(0.002)
    inbox = inbox_at(tmp_path / "s", sink, turn=turn)
    clients = [RawUnix(inbox.endpoint) for _ in range(8)]
    for client in clients:
        for _ in range(20):
            client.send(batch([GREETING] * 5))
    sink.on_received = lambda: spin(0.0002)
    most = before = 0
    while len(sink.came) < 800:
        await asyncio.sleep(0)
        most = max(most, len(sink.came) - before)
        before = len(sink.came)
    # Ten fit into a turn; without a common budget each of the eight would take ten.
    assert most <= 25
    assert len(set(sink.sources)) == 8
    inbox.close()
    for client in clients:
        client.close()


def spin(seconds: float) -> None:
    until_s = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until_s:
        pass


# -- who may come in

OTHERS = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
made = socket.socket(socket.AF_UNIX)
if sys.argv[2] == "connect":
    made.connect(sys.argv[1])
    made.settimeout(20)
    print("ended" if made.recv(1) == b"" else "spoken to")
else:
    os.umask(0)
    made.bind(sys.argv[1])
    made.listen(8)
    print("listening", flush=True)
    made.settimeout(20)
    client = made.accept()[0]
    print("told nothing" if client.recv(1) == b"" else "spoken to", flush=True)
"""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


def as_another_user(path: Path, deed: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["python3", "-c", OTHERS, str(path), deed], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def open_folder():
    """Where everybody may go: a mistake that must not be enough."""
    folder = Path(tempfile.mkdtemp(prefix="u-", dir="/tmp"))  # the tests' own is closed to others
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@as_root
async def test_another_user_is_not_let_in(open_folder):
    sink, counters = Sink(), Counter[str]()
    inbox = inbox_at(open_folder / "s", sink, counters)
    assert (open_folder / "s").stat().st_mode & 0o777 == 0o600
    (open_folder / "s").chmod(0o666)
    with as_another_user(open_folder / "s", "connect") as stranger:
        await until(lambda: counters["uid_foreign"] == 1, timeout_s=20)
        assert await asyncio.to_thread(stranger.communicate, timeout=20) == ("ended\n", None)
    assert not inbox._connections
    inbox.close()


@as_root
async def test_nothing_is_said_to_another_user(open_folder):
    with as_another_user(open_folder / "s", "listen") as stranger:
        assert stranger.stdout is not None
        assert await asyncio.to_thread(stranger.stdout.readline) == "listening\n"
        events = Events()
        outbox = outbox_to(f"unix://{open_folder}/s", events)
        outbox.send(parcel(1))
        assert await asyncio.to_thread(stranger.stdout.readline) == "told nothing\n"
        outbox.abort()
    assert set(events.why) == {"another user listens there"}
    assert "ready" not in events.said


# -- what goes out


async def test_what_the_kernel_does_not_take_waits_in_order_and_can_be_withdrawn(tmp_path, seed):
    rng = random.Random(seed)
    listener = Listener(tmp_path / "s")
    events = Events()
    outbox = outbox_to(listener.endpoint, events)
    parcels = [parcel(i, rng.choice((0, 100, 10_000, 250_000))) for i in range(400)]
    far = await listener.accept()
    for one in parcels[:200]:
        outbox.send(one)
    await asyncio.sleep(0.05)
    for one in parcels[200:]:
        outbox.send(one)
        await asyncio.sleep(0)
    sent = [one.is_sent for one in parcels]
    num_sent = sum(sent)
    assert 0 < num_sent < 200, "a socket that nobody reads takes its buffer's worth and one message"
    assert sent == [True] * num_sent + [False] * (400 - num_sent)
    withdrawn = set(rng.sample(range(num_sent, 400), 50))
    for number in withdrawn:
        parcels[number].is_withdrawn = True
    came = await envelopes(far, 1 + 400 - 50)
    assert came[0] == bytes(GREETING)
    assert [number_of(data) for data in came[1:]] == [i for i in range(400) if i not in withdrawn]
    assert all(one.is_sent != (i in withdrawn) for i, one in enumerate(parcels))
    outbox.close(1.0)
    assert events.said == ["greeting 0", "ready", "closed"]
    far.close()
    listener.socket.close()


async def test_more_than_a_control_message_goes_in_chunks(tmp_path):
    sink = Sink()
    inbox = inbox_at(tmp_path / "s", sink)
    outbox = outbox_to(inbox.endpoint, Events())
    large = parcel(2, 3 * LIMITS.chunk)
    for one in (parcel(1), large, parcel(3)):
        outbox.send(one)
    await until(lambda: len(sink.came) == 4)
    assert [number_of(data) for data in sink.came[1:]] == [1, 2, 3]
    assert sink.came[2] == large.data
    outbox.close(0.0)
    inbox.close()


async def test_each_connection_begins_with_a_greeting_that_says_what_was_sent_before(tmp_path):
    listener = Listener(tmp_path / "s")
    events = Events()
    outbox = outbox_to(listener.endpoint, events)
    for round_number in range(3):
        far = await asyncio.wait_for(listener.accept(), 10)
        outbox.send(parcel(round_number))
        came = await envelopes(far, 2)
        assert came[0] == bytes(GREETING)
        assert number_of(came[1]) == round_number
        far.close()
    await until(lambda: events.said.count("broken") == 3)
    assert [what for what in events.said if what.startswith("greeting")][:3] == [
        "greeting 0",
        "greeting 1",
        "greeting 2",
    ]
    outbox.abort()
    listener.socket.close()


async def test_one_that_takes_connections_and_drops_them_is_not_stormed(tmp_path):
    listener = Listener(tmp_path / "s")
    outbox = outbox_to(listener.endpoint, Events())
    num_made = 0
    loop = asyncio.get_running_loop()
    until_s = loop.time() + 1.5
    while loop.time() < until_s:
        try:
            far = await asyncio.wait_for(listener.accept(), 0.1)
        except TimeoutError:
            continue
        num_made += 1
        far.close()
    assert 2 <= num_made <= 9
    outbox.abort()
    listener.socket.close()


async def test_nobody_there_is_said_and_counted_from_the_beginning_a_full_house_is_not(tmp_path):
    events = Events()
    outbox = outbox_to(f"unix://{tmp_path}/none", events)
    await until(lambda: len(events.why) >= 3)
    outbox.abort()
    assert set(events.why) == {"no process listens there: its socket file is gone"}
    assert events.since == sorted(events.since)
    assert events.since[-1] > 0.05
    listener = Listener(tmp_path / "full", backlog=0)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    waiting[0].connect(str(listener.path))
    events = Events()
    outbox = outbox_to(listener.endpoint, events)
    await until(lambda: len(events.why) >= 3)
    assert set(events.why) == {"it accepts no connection: as many as may wait for that do"}
    assert max(events.since) < 0.05  # it is stopped or stuck, which is not unreachable
    (await listener.accept()).close()
    await until(lambda: "ready" in events.said)
    outbox.abort()
    for one in (*waiting, listener.socket):
        one.close()


async def test_what_was_sent_before_the_end_is_found_by_one_who_looks_later(tmp_path):
    listener = Listener(tmp_path / "s")
    outbox = outbox_to(listener.endpoint, Events())
    outbox.send(parcel(5))
    outbox.close(1.0)
    await asyncio.sleep(0.05)
    far = await listener.accept()
    assert [number_of(data) for data in await envelopes(far, 2)] == [0, 5]
    far.close()
    listener.socket.close()
