"""The proxy does what it says: a fault matrix whose faults do not happen would always be green."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.faults.tcp_proxy import Proxy, Way
from tests.harness.waiting import until

pytestmark = [pytest.mark.timeout(30)]


class Both:
    """A proxy before a server that echoes what it reads until EOF, and then says "bye"."""

    def __init__(self, proxy: Proxy, ends: list[str]) -> None:
        self.proxy = proxy
        self.ends = ends
        """How connections ended for the server."""

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.wait_for(asyncio.open_connection(*self.proxy.address), 5)

    async def ended(self, how: str) -> None:
        await until(lambda: how in self.ends)


@asynccontextmanager
async def proxied() -> AsyncIterator[Both]:
    ends: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            ends.append("eof")
            writer.write(b"bye")
            await writer.drain()
        except OSError as error:
            ends.append(type(error).__name__)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy = Proxy((host, port), Way(), Way())
    try:
        yield Both(proxy, ends)
    finally:
        await proxy.close()
        server.close()
        await server.wait_closed()


async def read(reader: asyncio.StreamReader, size: int, limit_s: float = 5.0) -> bytes:
    async with asyncio.timeout(limit_s):
        return await reader.readexactly(size)


async def test_bytes_pass_in_slices_late_and_slowly():
    async with proxied() as both:
        both.proxy.there.slice_bytes = 7
        reader, writer = await both.open()
        data = bytes(range(256)) * 20
        writer.write(data)
        assert await read(reader, len(data)) == data
        both.proxy.there.slice_bytes, both.proxy.there.latency_s = 0, 0.2
        began = time.monotonic()
        for _ in range(10):
            writer.write(b"x" * 1000)
            await asyncio.sleep(0.01)
        await read(reader, 10_000)
        assert 0.2 <= time.monotonic() - began < 1.5, "a delay is no throttle"
        both.proxy.there.latency_s, both.proxy.back.bytes_per_s = 0.0, 400_000
        began = time.monotonic()
        writer.write(bytes(200_000))
        await read(reader, 200_000)
        assert time.monotonic() - began > 0.3
        writer.close()


async def test_a_black_hole_keeps_what_it_swallowed_and_answers_nobody():
    async with proxied() as both:
        reader, writer = await both.open()
        both.proxy.there.stall()
        both.proxy.hide()
        writer.write(b"hello")
        with pytest.raises(TimeoutError):
            await read(reader, 5, 0.2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.open_connection(*both.proxy.address), 0.3)
        both.proxy.there.heal()
        both.proxy.show()
        assert await read(reader, 5) == b"hello"
        late_reader, late = await both.open()
        late.write(b"late")
        assert await read(late_reader, 4) == b"late"
        both.proxy.there.is_discarding = True
        writer.write(b"lost")
        await asyncio.sleep(0.1)
        both.proxy.there.heal()
        writer.write(b"kept")
        assert await read(reader, 4) == b"kept", "what was discarded never comes"
        late.close()
        writer.close()
