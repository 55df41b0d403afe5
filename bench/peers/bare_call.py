"""The least that a call between asyncio programs over ZeroMQ does in Python: an actor system left out of itself.

A future and a number a call, a packed header, JSON checked against a struct on both sides, an `async def` that is
stepped once. No deadline, epoch, credit, cancelling, ordering, mailbox or error: nothing here could be relied on. The
sockets are those of our transport (a receive-only ROUTER, a send-only DEALER, one file descriptor watched by the loop),
and so is the rule of sending: the first at once, what follows in the same turn together.

    python bare_call.py server FOLDER
    python bare_call.py client FOLDER SERVER_PID
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections.abc import Callable

import msgspec
import uvloop
import zmq
from meter import PAYLOAD, as_our_workers, async_client, say

HEADER = struct.Struct("<2sBBHHIQIIIIIII")
"""Of 48 bytes, as ours: only the call's number is used."""
COUNT = struct.Struct("<I")
FRESH_S = 50e-6
"""Something sent less than that ago: more is coming, so wait for the end of the turn."""


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments and answer of the call."""

    number: int
    name: str
    version: int
    reward: float
    done: bool


ENCODE = msgspec.json.Encoder().encode
DECODE = msgspec.json.Decoder(tuple[Report]).decode


def packed(number: int, body: bytes) -> bytes:
    return HEADER.pack(b"ba", 1, 0, 0, 0, 0, number, 0, 0, 0, 0, 0, len(body), 0) + body


class Pipe:
    """Sockets of one process and what is on its way out."""

    def __init__(self, own: str, other: str, on: Callable[[memoryview], None]) -> None:
        self._loop, self._on = asyncio.get_running_loop(), on
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.ROUTER)
        self._outbox = self._context.socket(zmq.DEALER)
        for socket in (self._inbox, self._outbox):
            socket.set_hwm(0)
        self._inbox.bind(own)
        self._outbox.connect(other)
        self._queue: list[bytes] = []
        self._is_held = False
        self._sent_at = 0.0
        self._loop.add_reader(int(self._inbox.getsockopt(zmq.FD)), self._drain)
        self._loop.call_soon(self._drain)

    def send(self, message: bytes) -> None:
        self._queue.append(message)
        if self._is_held or len(self._queue) > 1:
            return
        now = self._loop.time()
        if now - self._sent_at < FRESH_S:
            self._loop.call_soon(self._flush)
        else:
            self._flush()
        self._sent_at = now

    def _flush(self) -> None:
        queue = self._queue
        if queue:
            lengths = struct.pack(f"<{len(queue)}I", *map(len, queue))
            self._outbox.send(b"".join((COUNT.pack(len(queue)), lengths, *queue)), zmq.NOBLOCK)
            queue.clear()

    def _drain(self) -> None:
        try:
            while True:
                self._inbox.recv(zmq.NOBLOCK)  # whose it is
                data = memoryview(self._inbox.recv(zmq.NOBLOCK))
                self._is_held = True
                (num,) = COUNT.unpack_from(data)
                at = COUNT.size * (num + 1)
                for length in struct.unpack_from(f"<{num}I", data, COUNT.size):
                    self._on(data[at : at + length])
                    at += length
                self._is_held = False
                self._flush()
        except zmq.Again:
            return


async def echo(report: Report) -> Report:
    return report


async def serve(folder: str) -> None:
    def answer(message: memoryview) -> None:
        number = HEADER.unpack_from(message)[6]
        handler = echo(*DECODE(message[HEADER.size :]))
        try:
            handler.send(None)
        except StopIteration as done:
            pipe.send(packed(number, ENCODE((done.value,))))

    pipe = Pipe(f"ipc://{folder}/s", f"ipc://{folder}/c", answer)
    say("ready")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


async def ask(folder: str, server: int) -> None:
    loop = asyncio.get_running_loop()
    pending: dict[int, asyncio.Future[memoryview]] = {}
    report = msgspec.convert(PAYLOAD, Report)
    number = 0

    def arrived(message: memoryview) -> None:
        pending.pop(HEADER.unpack_from(message)[6]).set_result(message[HEADER.size :])

    pipe = Pipe(f"ipc://{folder}/c", f"ipc://{folder}/s", arrived)

    async def once() -> None:
        nonlocal number
        number += 1
        pending[number] = future = loop.create_future()
        pipe.send(packed(number, ENCODE((report,))))
        (answer,) = DECODE(await future)
        assert answer.number == report.number

    await once()
    await async_client(once, lambda: [os.getpid(), server])
    os._exit(0)


as_our_workers()
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(serve(sys.argv[2]) if sys.argv[1] == "server" else ask(sys.argv[2], int(sys.argv[3])))
