"""A TCP proxy that misbehaves on command, while bytes flow. toxiproxy was considered: it is a foreign binary, this is a page.

Each direction of a proxy is a `Way`; its attributes are the verbs that last (latency, bandwidth, slicing, blackhole,
discarding, a limit on the data), the methods of `Proxy` are those that strike once (reset, half-close).
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from dataclasses import dataclass, field

READ_BYTES = 32 * 1024
QUEUED_READS = 64  # bytes that are late do not hold up those behind them


@dataclass(slots=True)
class Way:
    """One direction; change it at any time."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: no limit
    slice_bytes: int = 0
    """Pass bytes on in pieces of 1 to this many; 0: as they come."""
    is_discarding: bool = False
    """Read and throw away. What follows makes no sense any more, so reset the connections before this ends."""
    limit_bytes: int = 0  # pass so many bytes of a connection on and then reset it; 0: no limit
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def stall(self) -> None:
        """A black hole: nothing arrives, nothing is refused. What is under way comes when it ends, as with TCP."""
        self.gate.clear()

    def heal(self) -> None:
        """No fault any more."""
        self.latency_s = self.bytes_per_s = 0.0
        self.slice_bytes = self.limit_bytes = 0
        self.is_discarding = False
        self.gate.set()


class Proxy:
    """Listens on a port of its own and connects every client to `target`."""

    def __init__(self, target: tuple[str, int], there: Way, back: Way) -> None:
        self.target = target
        self.there = there
        self.back = back
        self._listener = socket.create_server(("127.0.0.1", 0))  # at once: clients wait until it accepts
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._lines: set[_Line] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = self._spawn(self._accept())
        self._fillers: list[socket.socket] = []
        self.num_lines = 0  # connections accepted so far

    def _spawn(self, work) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self._listener)
            self.num_lines += 1
            self._spawn(self._connect(client))

    async def _connect(self, client: socket.socket) -> None:
        try:
            upstream = await asyncio.open_connection(*self.target)
        except OSError:
            client.close()  # nobody listens there: the client learns it as a broken connection
            return
        near = await asyncio.open_connection(sock=client)
        line = _Line(near, upstream)
        self._lines.add(line)
        try:
            await line.run(self.there, self.back)
        finally:
            self._lines.discard(line)
            line.abort()

    def hide(self) -> None:
        """The kernel answers nobody who connects: its queue is full, so it drops what comes, as a black hole does."""
        self._accepting.cancel()
        self._listener.listen(0)
        for _ in range(3):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(self.address)
            self._fillers.append(filler)

    def show(self) -> None:
        while self._fillers:
            self._fillers.pop().close()
        self._listener.listen(100)
        if self._accepting.cancelled() or self._accepting.cancelling():
            self._accepting = self._spawn(self._accept())

    # -- verbs that strike once

    def reset(self) -> int:
        """RST to both ends of every connection; how many there were."""
        for line in (lines := list(self._lines)):
            line.reset()
        return len(lines)

    def half_close(self, *, towards_target: bool) -> None:
        """FIN in one direction; the other stays open."""
        for line in list(self._lines):
            line.half_close(towards_target=towards_target)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Line:
    """One connection through the proxy."""

    def __init__(self, near: _Stream, far: _Stream) -> None:
        self._near, self._far = near, far
        self._shut: set[asyncio.StreamWriter] = set()

    async def run(self, there: Way, back: Way) -> None:
        """Until both directions have ended, or one broke."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for reader, writer, way in ((self._near[0], self._far[1], there), (self._far[0], self._near[1], back)):
                    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_READS)
                    tasks.create_task(_take(reader, queue, way))
                    tasks.create_task(self._give(queue, writer, way))
        except* OSError:
            pass

    async def _give(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, way: Way) -> None:
        loop = asyncio.get_running_loop()
        num_given = 0
        while True:
            due_at, data = await queue.get()
            await asyncio.sleep(max(0.0, due_at - loop.time()))
            if not data:
                await way.gate.wait()
                self._shut_down(writer)
                return
            while data and writer not in self._shut:
                await way.gate.wait()
                size = random.randint(1, way.slice_bytes) if way.slice_bytes else len(data)
                piece, data = data[:size], data[size:]
                if writer not in self._shut:
                    writer.write(piece)
                    await writer.drain()
                num_given += len(piece)
                if 0 < way.limit_bytes < num_given:
                    self.reset()
                    return
                if way.bytes_per_s:
                    await asyncio.sleep(len(piece) / way.bytes_per_s)

    def reset(self) -> None:
        for _, writer in (self._near, self._far):
            raw = writer.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    def half_close(self, *, towards_target: bool) -> None:
        self._shut_down((self._far if towards_target else self._near)[1])

    def _shut_down(self, writer: asyncio.StreamWriter) -> None:
        if writer not in self._shut and not writer.is_closing():
            self._shut.add(writer)
            writer.write_eof()

    def abort(self) -> None:
        for _, writer in (self._near, self._far):
            writer.transport.abort()


async def _take(reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]], way: Way) -> None:
    loop = asyncio.get_running_loop()
    while data := await reader.read(READ_BYTES):
        if not way.is_discarding:
            await queue.put((loop.time() + way.latency_s, data))
    await queue.put((loop.time() + way.latency_s, b""))
