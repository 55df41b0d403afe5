"""A call that came in, as its actor sees it: decodes the request, encodes the answer, paces a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from ..core.errors import BadRequest, MyxaError, UserCodeError
from ..core.handlers import HandlerSpec
from .payload import UndecodableError, decode_value, encode_value
from .serving import Arrival, Serving


class Delivery:
    """Implements `cell.Inbound` over one `Arrival`."""

    def __init__(self, arrival: Arrival, spec: HandlerSpec, callee: str, serving: Serving) -> None:
        self.spec = spec
        self.callee = callee
        self.chain = arrival.envelope.chain
        self.trace = arrival.envelope.trace
        self.deadline_at = arrival.deadline_at
        self.is_abandoned = False
        self._arrival = arrival
        self._serving = serving
        self._room = asyncio.Event()
        arrival.allowed = max(arrival.allowed, spec.declaration.window)

    def begin(self) -> msgspec.Struct:
        arrival = self._arrival
        self._serving.check_deadline(arrival)
        self._serving.take_up(arrival)
        envelope = arrival.envelope
        try:
            frames = [memoryview(f) for f in envelope.frames]
            return decode_value(envelope.body, frames, self.spec.request)
        except UndecodableError as error:
            raise BadRequest(f"{self.callee}.{self.spec.name}: {error}", remedy="see the handler's types") from error

    def reply(self, value: Any) -> None:
        body, frames = self._encode(value)
        self._serving.reply(self._arrival, body, frames)

    def fail(self, error: BaseException) -> None:
        self._serving.fail(self._arrival, error)

    async def send_items(self, items: AsyncIterator[Any]) -> None:
        arrival = self._arrival
        try:
            async for value in items:
                while arrival.num_items >= arrival.allowed:
                    self._room.clear()
                    await self._room.wait()
                self._serving.item(arrival, *self._encode(value))
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()
        self._serving.end(arrival)

    def demanded(self) -> None:
        """The consumer asked for more."""
        self._room.set()

    def _encode(self, value: Any) -> tuple[bytes, tuple[memoryview, ...]]:
        try:
            body, frames = encode_value(value)
        except MyxaError as error:
            raise UserCodeError(f"{self.callee}.{self.spec.name} returned what cannot travel: {error}") from error
        return body, tuple(frames)
