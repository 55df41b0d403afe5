"""Who is heard when over a Unix socket: a busy peer, an interrupt or nonsense takes nothing from the others."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter

import pytest
import uvloop
from tests.harness.waiting import until
from tests.transport.raw_unix import RawUnix
from tests.transport.unix_parts import GREETING, Sink, inbox_at, number_of, parcel

from myxa.transport.outbox import TurnBudget
from myxa.transport.session.frames import batch, sole
from myxa.transport.unix import MAX_MESSAGE, PART_BYTES, UnixInbox, framed

pytestmark = [pytest.mark.timeout(60)]

SLICE_S = 0.0002


def spend() -> None:
    """More than a turn may take: so one message is one turn, on whatever machine."""
    end = time.monotonic() + 2 * SLICE_S
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize("is_batch", [False, True])
async def test_who_says_little_is_heard_beside_those_who_never_stop(tmp_path, is_batch):
    sink = Sink()
    sink.on_received = spend
    inbox = inbox_at(tmp_path / "s", sink, turn=TurnBudget(SLICE_S))
    quiet, *flooders = (RawUnix(inbox.endpoint) for _ in range(4))
    quiet.send(sole(parcel(0).data))
    await until(lambda: len(sink.came) == 1)
    datas = [parcel(1).data] * 200
    for one in flooders:
        one.send_raw(framed(batch(datas)) if is_batch else framed(sole(datas[0])) * 200)
    for number in range(2, 12):
        await until(lambda: len(set(sink.sources)) == 4)
        before = len(sink.came)
        quiet.send(sole(parcel(number).data))
        while number_of(sink.came[-1]) != number:
            await asyncio.sleep(0)
            assert len(sink.came) - before < 15, "each of the four has its turn; the others had several"
    looked_at = sink.sources[:100]
    shares = Counter(looked_at).values()
    assert len(shares) == 4
    assert sorted(shares)[1] > len(looked_at) / 5
    for client in (quiet, *flooders):
        client.close()
    inbox.close()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_interrupt_at_one_connection_leaves_the_others_heard(tmp_path, make_loop):
    sink = Sink()

    def interrupt() -> None:
        sink.on_received = lambda: None
        raise KeyboardInterrupt

    async def begin() -> tuple[UnixInbox, list[RawUnix]]:
        inbox = inbox_at(tmp_path / "s", sink, turn=TurnBudget(SLICE_S))
        sink.on_received = spend
        clients = [RawUnix(inbox.endpoint) for _ in range(3)]
        for client in clients:
            client.send(batch([parcel(number).data for number in range(50)]))
        return inbox, clients

    async def reach_the_interrupt() -> None:
        await until(lambda: len(inbox._waiting) == 3)
        sink.on_received = interrupt
        await asyncio.sleep(5)

    async def go_on() -> None:
        await until(lambda: len(sink.came) == 150)
        for client in clients:
            client.send(sole(parcel(99).data))
        await until(lambda: len(sink.came) == 153)
        assert not inbox._waiting
        inbox.close()

    loop = make_loop()
    inbox, clients = loop.run_until_complete(begin())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(reach_the_interrupt())
    loop.run_until_complete(go_on())
    assert set(Counter(sink.sources).values()) == {51}
    for source in set(sink.sources):
        came = [number_of(data) for data, by in zip(sink.came, sink.sources, strict=True) if by == source]
        assert came == [*range(50), 99]
    for client in clients:
        client.close()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


async def test_nonsense_in_one_piece_is_taken_in_turn_by_turn(tmp_path):
    sink = Sink()
    note = sink.malformed

    def malformed(*what: object) -> None:
        note(*what)  # pyright: ignore[reportArgumentType]
        spend()

    sink.malformed = malformed  # pyright: ignore[reportAttributeAccessIssue]
    inbox = inbox_at(tmp_path / "s", sink, turn=TurnBudget(SLICE_S))
    client = RawUnix(inbox.endpoint)
    client.send_raw(framed(b"") * 200)
    most = before = 0
    async with asyncio.timeout(30):
        while before < 200:
            await asyncio.sleep(0)
            most, before = max(most, len(sink.wrong) - before), len(sink.wrong)
    assert most <= 2
    client.close()
    inbox.close()


async def test_an_error_in_the_session_is_told_and_costs_one_message(tmp_path):
    sink, told = Sink(), list[BaseException]()

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    sink.malformed, sink.crashed = fail, told.append  # pyright: ignore[reportAttributeAccessIssue]
    inbox = inbox_at(tmp_path / "s", sink)
    client = RawUnix(inbox.endpoint)
    client.send_raw(framed(sole(GREETING)) + framed(b"nonsense") + framed(sole(parcel(1).data)))
    await until(lambda: len(sink.came) == 2)
    assert [str(error) for error in told] == ["a bug"]
    client.send_raw(struct.pack("<Q", MAX_MESSAGE + 1))
    await until(lambda: len(told) == 2)
    assert client.is_ended()
    client.close()
    inbox.close()


@pytest.mark.parametrize("is_batch", [False, True])
async def test_nothing_is_taken_from_a_connection_that_was_ended_by_what_it_said(tmp_path, is_batch):
    sink = Sink()
    inbox = inbox_at(tmp_path / "s", sink)
    sink.on_received = lambda: inbox.forget(sink.sources[-1])
    client = RawUnix(inbox.endpoint)
    datas = [parcel(number).data for number in range(5)]
    client.send_raw(framed(batch(datas)) if is_batch else b"".join(framed(sole(data)) for data in datas))
    await until(lambda: not inbox._connections and sink.came)
    assert [number_of(data) for data in sink.came] == [0]
    assert client.is_ended()
    client.close()
    inbox.close()


async def test_out_of_patience_nobody_is_heard_out_of_turn(tmp_path):
    sink, counters = Sink(), Counter[str]()
    sink.on_received = spend
    inbox = inbox_at(tmp_path / "s", sink, counters, TurnBudget(SLICE_S))
    flooder, late = RawUnix(inbox.endpoint), RawUnix(inbox.endpoint)
    flooder.send(batch([parcel(1).data] * 100))
    await until(lambda: len(inbox._connections) == 2 and inbox._waiting)
    late.send(sole(parcel(2).data))
    connection = list(inbox._connections.values())[1]
    while not connection.is_waiting and not connection.has_spoken:
        await asyncio.sleep(0)
    before = len(sink.came)
    if not connection.has_spoken:
        inbox._look_at(connection)
        assert len(sink.came) == before
    await until(lambda: len(sink.came) == 101)
    assert not counters
    for client in (flooder, late):
        client.close()
    inbox.close()


async def test_who_announces_a_large_message_costs_what_it_has_sent(tmp_path):
    sink = Sink()
    inbox = inbox_at(tmp_path / "s", sink)
    client = RawUnix(inbox.endpoint)
    message = framed(sole(parcel(1, 1_000_000).data))
    await until(lambda: inbox._connections)
    (connection,) = inbox._connections.values()
    sent = 0
    for size in (8, 1000, 60_000, 100_000, 300_000):
        client.send_raw(message[sent : sent + size])
        sent += size
        await until(lambda size=sent: connection._part and len(connection._part) - len(connection._room) == size)
        assert connection._part is not None
        assert len(connection._part) <= max(PART_BYTES, 2 * sent)
    assert sink.came == []
    client.send_raw(message[sent:])
    await until(lambda: sink.came)
    assert sink.came == [bytes(parcel(1, 1_000_000).data)]
    client.close()
    inbox.close()
