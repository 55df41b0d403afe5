"""A server that says what a real one said, byte for byte, and in the same order of cause and effect.

An answer's bytes are held until every request that had reached the real server before them has arrived here too: what
the real one said after a pause, an abort or an update is not heard before it. Time plays no part.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from tests.engines.recording import Exchange, Places, Recording, key_of
from tests.harness.fake_sglang import serving

PATIENCE_S = 20.0
ABORT = "POST /abort_request"
"""Our client repeats an abort while tokens come, so how often it does is no part of a recording."""


class Replay:
    """One recording, played to one client."""

    def __init__(self, recording: Recording, places: Places) -> None:
        self._recording = recording
        self._places = places
        self._exchanges = recording.exchanges
        self._waiting: dict[str, list[int]] = {}
        for number, exchange in self._exchanges.items():
            self._waiting.setdefault(exchange.key, []).append(number)
        self._last: dict[str, int] = {}
        aborts = [e for e in self._exchanges.values() if e.request == ABORT]
        self._any_abort = aborts[0] if aborts else None
        self._abort_all_at = min((e.position for e in aborts if e.body.get("abort_all")), default=float("inf"))
        self._missing = {n for numbers in self._waiting.values() for n in self._awaited(numbers)}
        """Requests that the real server had and this one has not yet."""
        self._num_controls = 0
        self._news = asyncio.Condition()
        self.complaints: list[str] = []
        """Requests that were never recorded, answers nobody could be given."""

    def _awaited(self, numbers: list[int]) -> list[int]:
        first = self._exchanges[numbers[0]]
        if first.request != ABORT:
            return numbers
        return [] if first.position > self._abort_all_at else numbers[:1]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return self._question(request.path)
        name = f"{request.method} {request.path}"
        body = self._read(await request.read())
        exchange = self._find(key_of(name, body))
        if exchange is None:
            self.complaints.append(f"never recorded: {name} {json.dumps(body)[:300]}")
            return web.Response(status=599, text=self.complaints[-1])
        async with self._news:
            self._num_controls += request.path != "/generate"
            self._missing.discard(exchange.number)
            self._news.notify_all()
        return await self._play(request, exchange)

    def _read(self, raw: bytes) -> Any:
        text = self._places.hide(raw.decode("utf-8", "backslashreplace"))
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _find(self, key: str) -> Exchange | None:
        numbers = self._waiting.get(key)
        if numbers:
            self._last[key] = numbers.pop(0)
        elif key not in self._last or not key.startswith(ABORT):
            return self._any_abort if key.startswith(ABORT) else None
        return self._exchanges[self._last[key]]

    def _question(self, path: str) -> web.Response:
        answers = [one for one in self._recording.questions if one["get"] == path]
        if not answers:
            self.complaints.append(f"never recorded: GET {path}")
            return web.Response(status=599)
        known = [one for one in answers if one["after"] <= self._num_controls] or answers[:1]
        kind = {"Content-Type": known[-1]["type"]} if known[-1]["type"] else {}
        return web.Response(
            status=known[-1]["status"], body=self._places.show(known[-1]["text"]).encode(), headers=kind
        )

    async def _play(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        response = web.StreamResponse()
        for position, event in exchange.answer:
            await self._until(position)
            if "head" in event:
                response = web.StreamResponse(
                    status=event["head"], headers={"Content-Type": event["type"]} if event["type"] else {}
                )
                await response.prepare(request)
            elif "out" in event:
                await response.write(self._places.show(event["out"]).encode())
            elif event["end"] == "broke":
                assert request.transport is not None
                request.transport.abort()
            elif event["end"] == "left":
                await asyncio.sleep(PATIENCE_S)
                self.complaints.append(f"the client stayed, the recorded one left: {exchange.key[:200]}")
        return response

    async def _until(self, position: int) -> None:
        """Every request that arrived before that position has arrived."""

        def is_time() -> bool:
            return not any(self._exchanges[number].position < position for number in self._missing)

        try:
            async with asyncio.timeout(PATIENCE_S), self._news:
                await self._news.wait_for(is_time)
        except TimeoutError:
            late = [self._exchanges[n].key[:200] for n in self._missing if self._exchanges[n].position < position]
            self.complaints.append(f"recorded, and never sent: {late}")
            raise


@asynccontextmanager
async def replaying(recording: Recording, places: Places) -> AsyncIterator[str]:
    """Its address. At the end nothing may be left to complain of."""
    replay = Replay(recording, places)
    try:
        async with serving(replay.handle) as url:
            yield url
    finally:
        if replay.complaints:
            print(*replay.complaints, sep="\n")  # pytest shows it beside whatever failed
    assert not replay.complaints, f"{recording.path.name}: {replay.complaints}; record again with run_sglang.py"
