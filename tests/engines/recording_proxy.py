"""Stands between a client and a real server and writes down what they say to each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from tests.engines.recording import Writer
from tests.harness.fake_sglang import serving

EVENT_END = b"\n\n"


class Proxy:
    """Forwards everything at once; streams event by event."""

    def __init__(self, upstream: str, session: aiohttp.ClientSession) -> None:
        self._upstream = upstream
        self._session = session
        self.writer: Writer | None = None
        """Where things are written down; None: nowhere."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        writer = self.writer
        number = 0
        if writer is not None and request.method != "GET":
            number = writer.arrived(request.method, request.path, body)
        how = "left"
        try:
            async with self._session.request(
                request.method, self._upstream + request.path, data=body, headers=headers
            ) as answer:
                if request.method == "GET":
                    return await self._question(request, answer, writer)
                response = await self._forward(request, answer, number, writer)
            how = "whole"
            return response
        except aiohttp.ClientError:
            how = "broke"
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            if writer is not None and number:
                writer.ended(number, how)

    async def _question(
        self, request: web.Request, answer: aiohttp.ClientResponse, writer: Writer | None
    ) -> web.StreamResponse:
        data = await answer.read()
        kind = answer.headers.get("Content-Type", "")
        if writer is not None:
            writer.asked(request.path, answer.status, kind, data)
        return web.Response(body=data, status=answer.status, headers={"Content-Type": kind} if kind else {})

    async def _forward(
        self, request: web.Request, answer: aiohttp.ClientResponse, number: int, writer: Writer | None
    ) -> web.StreamResponse:
        kind = answer.headers.get("Content-Type", "")
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind} if kind else {})
        if writer is not None:
            writer.began(number, answer.status, kind)
        await response.prepare(request)
        rest = b""
        async for data in answer.content.iter_any():
            *events, rest = (rest + data).split(EVENT_END)
            for event in events:
                if writer is not None:
                    writer.said(number, event + EVENT_END)
                await response.write(event + EVENT_END)
        if rest:
            if writer is not None:
                writer.said(number, rest)
            await response.write(rest)
        await response.write_eof()
        return response


@asynccontextmanager
async def proxy(upstream: str) -> AsyncIterator[tuple[str, Proxy]]:
    """Its address, and the proxy."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        made = Proxy(upstream, session)
        async with serving(made.handle) as url:
            yield url, made
        await asyncio.sleep(0)
