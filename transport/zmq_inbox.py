"""The receiving half: one ROUTER that is only read, pumped by the loop's own reader.

`zmq.asyncio` was considered and measured: 4 times the latency and 20 times the CPU. The rules of the pump: the file
descriptor is only a hint and edge-like, so look once after registering it; take messages until there are none, at most
`BUDGET` per turn of the loop; never send on a socket that is polled; never wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from .frames import Assembly, Chunk, Malformed, split
from .wire import Lane, Sink
from .zmq_sockets import Socket

BUDGET = 256
BULK_BUDGET = 8
"""Of 1 MiB chunks: about a millisecond."""

_log = logging.getLogger("myxa.transport")


class Pump:
    """Calls `take` for a socket until it says that there is nothing more, whenever there may be something."""

    def __init__(self, socket: Socket, take: Callable[[], bool], budget: int) -> None:
        self._socket = socket
        self._take = take
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_stopped = False
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)  # arm: without this look the first message may never be signalled

    def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self._loop.remove_reader(self._fd)

    def _drain(self) -> None:
        for _ in range(self._budget):
            if self._is_stopped or not self._take():
                return
        self._loop.call_soon(self._drain)


class Inbox:
    """One bound endpoint of one lane."""

    def __init__(self, socket: Socket, lane: Lane) -> None:
        self._socket = socket
        self._lane = lane
        self._sink: Sink | None = None
        self._assemblies: dict[bytes, Assembly] = {}
        self._pump: Pump | None = None

    def start(self, sink: Sink) -> None:
        """Report to `sink` from now on."""
        self._sink = sink
        if self._pump is None:
            self._pump = Pump(self._socket, self._take, BULK_BUDGET if self._lane is Lane.BULK else BUDGET)

    def forget(self, source: bytes) -> None:
        self._assemblies.pop(source, None)

    def close(self) -> None:
        if self._pump is not None:
            self._pump.stop()
        self._socket.close(linger=0)

    def _take(self) -> bool:
        socket, sink = self._socket, self._sink
        try:
            source = socket.recv(zmq.NOBLOCK)
            frame = socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        if sink is None:
            return True
        try:
            if frame.more:
                self._skip_rest()
                sink.malformed(source, self._lane, "several frames")
            else:
                self._split(sink, source, frame.buffer)
        except Exception as error:  # noqa: BLE001  # a bug in the session must be heard of and not stop the pump
            _log.exception("the session failed on a message")
            sink.crashed(error)
        return True

    def _skip_rest(self) -> None:
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(zmq.NOBLOCK, copy=False)

    def _split(self, sink: Sink, source: bytes, data: memoryview) -> None:
        parts = split(data)
        if isinstance(parts, Chunk):
            self._assemble(sink, source, parts)
        elif isinstance(parts, Malformed):
            sink.malformed(source, self._lane, parts.reason)
        else:
            for envelope in parts:
                sink.received(source, self._lane, envelope)

    def _assemble(self, sink: Sink, source: bytes, chunk: Chunk) -> None:
        whole = self._assemblies.setdefault(source, Assembly()).add(chunk)
        if isinstance(whole, Malformed):
            sink.malformed(source, self._lane, whole.reason)
        elif whole is not None:
            sink.received(source, self._lane, memoryview(whole))
