"""Control from other hosts: the same requests and answers as on the Unix sockets, one a message, by admitted keys.

The allow-list is a file with public keys and what each may do:

    # access  key                                       name
    operate   rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7  ada
    view      Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID  screen in the lab

It is read again when it has changed, and each request is checked against it: a key that was taken out is refused at its
next request.
"""

from __future__ import annotations

import asyncio
import logging
import stat
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...core.config import RunConfig
from ...core.errors import ConfigError, LaunchError, MyxaError, NotPermitted, Overloaded
from ...core.knobs import Operator
from ...transport.control_endpoint import ControlEndpoint, ControlRequest
from ...transport.security import JobKey
from ...transport.session.guard import KeyVerdict
from ...transport.wire import is_public_key
from .dispatcher import Dispatcher, VerbCall, VerbCaller
from .verb import Access
from .wire import MAX_QUOTED_CHARS, Request, decode_request, encode, error_answer

MAX_KEYS = 1000


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """What a key may do, and whose it is."""

    access: Access
    name: str


class AllowList:
    """The file, as it is now. The gatekeeper asks it about keys."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self.on_change: Callable[[], None] | None = None
        self._path = path
        self._stamp = (0, 0)
        self._admitted: dict[str, KeyGrant] = {}
        self._read()

    def verdict(self, key: str, now: float) -> KeyVerdict:
        """For a connection."""
        del now
        return KeyVerdict.ADMIT if self.grant(key) is not None else KeyVerdict.UNKNOWN

    def grant(self, key: str) -> KeyGrant | None:
        """For a request; None: not (any more)."""
        try:
            self._read()
        except ConfigError:
            return None  # a file that is being written, or is broken now, admits no key
        return self._admitted.get(key)

    def _read(self) -> None:
        try:
            facts = self._path.stat()
            stamp = (facts.st_mtime_ns, facts.st_ino)
            if stamp == self._stamp:
                return
            if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(
                    f"control.allow_file: others may write {self._path}", remedy=f"chmod go-w {self._path}"
                )
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"control.allow_file: {self._path} cannot be read: {error}", remedy="name a file"
            ) from None
        self._admitted = parse_allow_list(text, str(self._path))
        self._stamp = stamp


def parse_allow_list(text: str, where: str) -> dict[str, KeyGrant]:
    """Key -> grant. Raises ConfigError naming the line."""
    admitted: dict[str, KeyGrant] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split(maxsplit=2)
        if not words or words[0] == "#":
            continue
        access, key = words[0], words[1] if len(words) > 1 else ""
        if access not in ("operate", "view") or not is_public_key(key):
            raise ConfigError(
                f"{where}:{number}: is no line of an allow-list", remedy='write "operate KEY NAME" or "view KEY NAME"'
            )
        if key in admitted:
            raise ConfigError(f"{where}:{number}: that key is there already", remedy="a key has one line")
        admitted[key] = KeyGrant("operate" if access == "operate" else "view", words[2] if len(words) > 2 else key[:8])
    if len(admitted) > MAX_KEYS:
        raise ConfigError(f"{where}: {len(admitted)} keys", remedy=f"at most {MAX_KEYS}")
    return admitted


MAX_RUNNING = 64
"""Requests of one key, streams too."""
BEAT_S = 5.0
"""How often a stream without news looks whether its caller is still there."""
_log = logging.getLogger("myxa.control")


class TcpServer:
    """Serves the endpoint of `control.tcp`. `open`, then `close`."""

    def __init__(self, dispatcher: Dispatcher, config: RunConfig) -> None:
        """Raises ConfigError and LaunchError for key files that cannot be used."""
        control = config.control
        self._dispatcher = dispatcher
        self._host, _, port = control.tcp.rpartition(":")
        self._port = int(port)
        try:
            self._key = JobKey.load(Path(control.key_file))
        except LaunchError as error:
            raise ConfigError(f"control.key_file: {error.message}", remedy="`myxa control keygen FILE`") from error
        self._allowed = AllowList(Path(control.allow_file))
        self._endpoint = ControlEndpoint(self._key, self._allowed, self._heard)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_running: Counter[str] = Counter()

    @property
    def public(self) -> str:
        """The endpoint's public key, which callers must know."""
        return self._key.public

    def open(self) -> str:
        """Listen; the "host:port" that it became. Raises LaunchError."""
        return self._endpoint.open(self._host, self._port)

    async def close(self) -> None:
        """Stops serving."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._dispatcher.counters.update(self._endpoint.counters)
        self._endpoint.close()

    def _heard(self, asked: ControlRequest) -> None:
        if self._num_running[asked.key] >= MAX_RUNNING:
            busy = Overloaded(f"{MAX_RUNNING} requests are being served", remedy="wait for the answers of earlier ones")
            self._endpoint.tell(asked.peer, _refusal(None, busy))
            return
        task = asyncio.get_running_loop().create_task(self._serve(asked))
        self._tasks.add(task)
        self._num_running[asked.key] += 1
        task.add_done_callback(partial(self._served, asked.key))

    def _served(self, key: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._num_running[key] -= 1
        if not self._num_running[key]:
            del self._num_running[key]

    async def _serve(self, asked: ControlRequest) -> None:
        try:
            request = decode_request(asked.body)
        except ConfigError as error:
            self._dispatcher.counters["malformed"] += 1
            self._endpoint.tell(asked.peer, _refusal(None, error))
            return
        order = await self._order(request, asked)
        if isinstance(order, bytes):
            self._endpoint.tell(asked.peer, order)
        elif order.verb.stream is not None:
            await self._stream(order, request, asked.peer)
        else:
            self._endpoint.tell(asked.peer, await self._answer(order, request))

    async def _order(self, request: Request, asked: ControlRequest) -> VerbCall | bytes:
        """What to do, or the refusal."""
        grant = self._allowed.grant(asked.key)
        if grant is None:
            gone = NotPermitted("that key is not on the list any more", remedy="ask the operator of this run")
            return _refusal(request.id, gone)
        who = Operator(user=grant.name[:MAX_QUOTED_CHARS], host=asked.address, via="tcp")
        caller = VerbCaller(f"key {asked.key}", may_operate=grant.access == "operate")
        try:
            return self._dispatcher.understand(request.verb, request.args, who, caller)
        except MyxaError as error:
            await self._dispatcher.refuse(request.verb, who, caller, error)
            return _refusal(request.id, error)

    async def _answer(self, order: VerbCall, request: Request) -> bytes:
        try:
            return encode({"id": request.id, "ok": True, "result": await self._dispatcher.answer(order)})
        except Exception as error:  # noqa: BLE001 - the dispatcher logged it; the caller must hear of it, whatever it is
            return _refusal(request.id, error)

    async def _stream(self, order: VerbCall, request: Request, peer: bytes) -> None:
        """Until it ends, or the caller is gone or does not read."""
        try:
            async with self._dispatcher.items(order) as items:
                async for answer in _with_beats(items, request.id):
                    if not self._endpoint.tell(peer, answer):
                        self._dispatcher.counters["stream_left"] += 1
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
    return encode({"id": number, "ok": False, "error": error_answer(error)})
