"""Control from other hosts: the same requests and answers as on the Unix sockets, one a message, by admitted keys.

Knows the desk and the endpoint's messages. What a key may do is decided for each request anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

from ...core.config import RunConfig
from ...core.errors import ConfigError, LaunchError, MyxaError, NotPermitted, Overloaded
from ...core.knobs import Operator
from ...transport.security import JobKey
from ...transport.zeromq.control_endpoint import Asked, ControlEndpoint
from .allow_list import AllowList
from .desk import Desk, Entrance, Order
from .wire import MAX_QUOTED_CHARS, Request, decode_request, encode, told

MAX_IN_HAND = 64
"""Requests of one key, streams too."""
BEAT_S = 5.0
"""How often a stream without news looks whether its caller is still there."""
_log = logging.getLogger("myxa.control")


class TcpServer:
    """Serves the endpoint of `control.tcp`. `open`, then `close`."""

    def __init__(self, desk: Desk, config: RunConfig) -> None:
        """Raises ConfigError and LaunchError for key files that cannot be used."""
        control = config.control
        self._desk = desk
        self._host, _, port = control.tcp.rpartition(":")
        self._port = int(port)
        try:
            self._key = JobKey.load(Path(control.key_file))
        except LaunchError as error:
            raise ConfigError(f"control.key_file: {error.message}", remedy="`myxa control keygen FILE`") from error
        self._allowed = AllowList(Path(control.allow_file))
        self._endpoint = ControlEndpoint(self._key, self._allowed, self._heard)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_in_hand: Counter[str] = Counter()

    @property
    def public(self) -> str:
        """The endpoint's public key, which callers must know."""
        return self._key.public

    def open(self) -> str:
        """Listen; the "host:port" that it became. Raises LaunchError."""
        return self._endpoint.open(self._host, self._port)

    async def close(self) -> None:
        """Nobody is served any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._desk.counters.update(self._endpoint.counters)
        self._endpoint.close()

    def _heard(self, asked: Asked) -> None:
        if self._num_in_hand[asked.key] >= MAX_IN_HAND:
            busy = Overloaded(f"{MAX_IN_HAND} requests are in hand", remedy="wait for the answers of earlier ones")
            self._endpoint.tell(asked.peer, _refusal(None, busy))
            return
        task = asyncio.get_running_loop().create_task(self._serve(asked))
        self._tasks.add(task)
        self._num_in_hand[asked.key] += 1
        task.add_done_callback(partial(self._served, asked.key))

    def _served(self, key: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._num_in_hand[key] -= 1
        if not self._num_in_hand[key]:
            del self._num_in_hand[key]

    async def _serve(self, asked: Asked) -> None:
        try:
            request = decode_request(asked.body)
        except ConfigError as error:
            self._desk.counters["malformed"] += 1
            self._endpoint.tell(asked.peer, _refusal(None, error))
            return
        order = await self._order(request, asked)
        if isinstance(order, bytes):
            self._endpoint.tell(asked.peer, order)
        elif order.verb.stream is not None:
            await self._stream(order, request, asked.peer)
        else:
            self._endpoint.tell(asked.peer, await self._answer(order, request))

    async def _order(self, request: Request, asked: Asked) -> Order | bytes:
        """What to do, or the refusal."""
        admission = self._allowed.admission(asked.key)
        if admission is None:
            gone = NotPermitted("that key is not on the list any more", remedy="ask whoever runs this")
            return _refusal(request.id, gone)
        who = Operator(user=admission.name[:MAX_QUOTED_CHARS], host=asked.address, via="tcp")
        entrance = Entrance(f"key {asked.key}", may_operate=admission.access == "operate")
        try:
            return self._desk.understand(request.verb, request.args, who, entrance)
        except MyxaError as error:
            await self._desk.refuse(request.verb, who, entrance, error)
            return _refusal(request.id, error)

    async def _answer(self, order: Order, request: Request) -> bytes:
        try:
            return encode({"id": request.id, "ok": True, "result": await self._desk.answer(order)})
        except Exception as error:  # noqa: BLE001 - the desk logged it; the caller must hear of it, whatever it is
            return _refusal(request.id, error)

    async def _stream(self, order: Order, request: Request, peer: bytes) -> None:
        """Until it ends, or the caller is gone or does not read."""
        try:
            async with self._desk.items(order) as items:
                async for answer in _with_beats(items, request.id):
                    if not self._endpoint.tell(peer, answer):
                        self._desk.counters["stream_left"] += 1
                        return
            self._endpoint.tell(peer, encode({"id": request.id, "ok": True, "end": True}))
        except Exception as error:  # noqa: BLE001 - as above
            if not isinstance(error, MyxaError):
                _log.exception("%s failed", order.verb.name)
            self._endpoint.tell(peer, _refusal(request.id, error))


async def _with_beats(items: AsyncGenerator[Any], number: int | str | None) -> AsyncGenerator[bytes]:
    """The items as answers, and a beat when there was none for a while."""
    pending: asyncio.Task[Any] | None = None
    try:
        while True:
            pending = pending or asyncio.get_running_loop().create_task(_next(items))
            await asyncio.wait({pending}, timeout=BEAT_S)
            if not pending.done():
                yield encode({"id": number, "ok": True, "beat": True})
                continue
            item, pending = pending.result(), None
            if item is _NO_MORE:
                return
            yield encode({"id": number, "ok": True, "item": item})
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)


_NO_MORE = object()


async def _next(items: AsyncGenerator[Any]) -> Any:
    return await anext(items, _NO_MORE)


def _refusal(number: int | str | None, error: BaseException) -> bytes:
    return encode({"id": number, "ok": False, "error": told(error)})
