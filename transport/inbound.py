"""A call that came in, as its actor sees it: decodes the request, encodes the answer, paces a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec

from ..core.errors import BadRequest, MyxaError, UserCodeError
from ..core.handlers import HandlerSpec
from ..core.ids import PeerKey
from .codec import Codecs
from .payload import UndecodableError, leases
from .session.serving import Arrival, Serving
from .tensors.handles import has_handles
from .tensors.porter import Packed, Porter


class Delivery(msgspec.Struct, eq=False):
    """Implements `cell.Inbound` over one `Arrival`."""

    spec: HandlerSpec
    chain: tuple[str, ...]
    deadline_at: float | None
    trace: bytes
    caller: PeerKey
    arrival: Arrival
    codecs: Codecs
    callee: str
    serving: Serving
    porter: Porter | None = None
    """Fetches large arrays of the request, brings those of the answer; None: all travel whole."""
    is_abandoned: bool = False
    room: asyncio.Event | None = None
    """Of a stream: its consumer asked for more."""

    def begin(self) -> msgspec.Struct | Awaitable[msgspec.Struct]:
        arrival = self.arrival
        self.serving.begin(arrival)
        envelope = arrival.envelope
        if envelope.frames and self.porter is not None and has_handles(envelope.body):
            return self._fetched(self.porter)
        try:
            return self.codecs.request.decode(envelope.body, envelope.frames)
        except UndecodableError as error:
            raise self._bad(error) from error

    async def _fetched(self, porter: Porter) -> msgspec.Struct:
        arrival = self.arrival
        envelope, may_lease = arrival.envelope, leases(self.spec.request)
        try:
            body, frames = await porter.unpack(arrival.peer, envelope.body, envelope.frames, may_lease=may_lease)
        except UndecodableError as error:
            raise self._bad(error) from error
        try:
            return self.codecs.request.decode(body, tuple(frames))
        except UndecodableError as error:
            raise self._bad(error) from error

    def _bad(self, error: UndecodableError) -> BadRequest:
        return BadRequest(f"{self.callee}.{self.spec.name}: {error}", remedy="see the handler's types")

    def reply(self, value: Any) -> Awaitable[None] | None:
        arrival = self.arrival
        try:
            body, frames = self.codecs.reply.encode(value)
        except MyxaError as error:
            raise self._cannot_travel(error) from error
        # The answer to a put is remembered for those who repeat it, and must hold its arrays itself.
        if frames and self._is_large(frames) and not (arrival.envelope.key or arrival.is_cast or arrival.is_answered):
            return self._reply_by_handles(body, frames)
        self.serving.reply(arrival, body, frames)
        return None

    async def _reply_by_handles(self, body: bytes, frames: tuple[memoryview, ...]) -> None:
        packed = await self._packed(body, frames)
        try:
            self.serving.reply(self.arrival, packed.body, packed.frames)
            packed.sent()
        finally:
            packed.end()

    def _is_large(self, frames: tuple[memoryview, ...]) -> bool:
        return bool(frames) and self.porter is not None and self.porter.is_wanted(frames)

    async def _packed(self, body: bytes, frames: tuple[memoryview, ...]) -> Packed:
        porter, arrival = self.porter, self.arrival
        if porter is None:
            return Packed(body, frames)
        return await porter.pack(arrival.peer, None, body, frames, is_lent=False, left_s=self.serving.left_s(arrival))

    def fail(self, error: BaseException) -> None:
        self.serving.fail(self.arrival, error)

    async def send_items(self, items: AsyncIterator[Any]) -> None:
        arrival = self.arrival
        room = self.room = asyncio.Event()
        arrival.allowed = max(arrival.allowed, self.spec.declaration.window)
        try:
            async for value in items:
                while arrival.num_items >= arrival.allowed:
                    room.clear()
                    await room.wait()
                await self._send_item(value)
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()
        self.serving.end(arrival)

    async def _send_item(self, value: Any) -> None:
        try:
            body, frames = self.codecs.reply.encode(value)
        except MyxaError as error:
            raise self._cannot_travel(error) from error
        if not self._is_large(frames):
            self.serving.item(self.arrival, body, frames)
            return
        packed = await self._packed(body, frames)
        try:
            self.serving.item(self.arrival, packed.body, packed.frames)
            packed.sent()
        finally:
            packed.end()

    def demanded(self) -> None:
        """The consumer asked for more."""
        if self.room is not None:
            self.room.set()

    def _cannot_travel(self, error: MyxaError) -> UserCodeError:
        return UserCodeError(f"{self.callee}.{self.spec.name} returned what cannot travel: {error}")
