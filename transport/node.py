"""One process's part of the actor system (first cut: all actors of the program in one node, no sockets yet)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..core.actor import Actor, PeerEvent, make_ref
from ..core.clock import Clock, SystemClock
from ..core.errors import BadRequest, CallError, DeadlineExceeded, LaunchError, NoSuchActor, RemoteError
from ..core.handlers import HandlerSpec
from ..core.ids import check_name
from ..core.scope import current_scope, remaining_s
from .cell import ActorCell
from .context import NodeContext
from .payload import UndecodableError, decode_value, encode_value

A = TypeVar("A")


class _Local:
    def __init__(self, spec: HandlerSpec, request: msgspec.Struct, deadline_at: float | None) -> None:
        body, frames = encode_value(request)
        self.spec = spec
        self.parts = body, [memoryview(bytearray(f)) for f in frames]
        self.chain = current_scope().chain
        self.trace = b""
        self.deadline_at = deadline_at
        self.is_abandoned = False
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.items: asyncio.Queue[Any] = asyncio.Queue(8)

    def begin(self) -> msgspec.Struct:
        try:
            return decode_value(*self.parts, self.spec.request)
        except UndecodableError as error:
            raise BadRequest(f"{self.spec.name}: {error}") from error

    def reply(self, value: Any) -> None:
        body, frames = encode_value(value)
        if not self.future.done():
            self.future.set_result(decode_value(body, [memoryview(bytearray(f)) for f in frames], self.spec.reply))

    def fail(self, error: BaseException) -> None:
        if self.future.done():
            return
        if not isinstance(error, CallError):
            error = RemoteError(f"{self.spec.name} raised {type(error).__name__}: {error}", remote_type=type(error).__name__)
        self.future.set_exception(error)
        self.future.exception()

    async def send_items(self, items: AsyncIterator[Any]) -> None:
        async for item in items:
            await self.items.put(item)
        if not self.future.done():
            self.future.set_result(None)


class Node:
    """Hosts actors on a running loop."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.epoch = 1
        self.clock = clock
        self.caller = self
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._cells: dict[str, ActorCell] = {}
        self._watchers: list[tuple[ActorCell, str]] = []
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def attach(
        cls,
        *,
        rdzv: Any = None,
        run_dir: Path | str | None = None,
        node_rank: int = 0,
        name: str = "main",
        clock: Clock | None = None,
    ) -> Node:
        return cls(check_name(name), clock or SystemClock())

    async def start(self, actor: Actor, name: str) -> Any:
        log = logging.getLogger(f"myxa.{name}")
        cell = ActorCell(actor, check_name(name), self.epoch, log, self._on_failed)
        actor.ctx = NodeContext(self, cell, self.epoch, log)
        self._cells[name] = cell
        try:
            await cell.start()
        except BaseException:
            del self._cells[name]
            raise
        self._tell(PeerEvent("up", name, self.epoch))
        return make_ref(self, type(actor), name)

    def ref(self, contract: type[A], name: str) -> A:
        return make_ref(self, contract, name)

    async def request(self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None) -> Any:
        now = self.clock.monotonic()
        left = remaining_s(deadline_s, now)
        inbound = _Local(spec, request, None if left is None else now + left)
        cell = self._find(target)
        cell.accept(inbound)
        if spec.declaration.kind == "cast":
            return None
        try:
            return await asyncio.wait_for(inbound.future, left)
        except TimeoutError:
            cell.abandon(inbound)
            raise DeadlineExceeded(f"{target}.{spec.name}: no answer within {left} s") from None
        except asyncio.CancelledError:
            cell.abandon(inbound)
            raise

    async def items(
        self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None
    ) -> AsyncIterator[Any]:
        inbound = _Local(spec, request, None)
        cell = self._find(target)
        cell.accept(inbound)
        try:
            while not (inbound.future.done() and inbound.items.empty()):
                get = asyncio.ensure_future(inbound.items.get())  # noqa: TID251
                await asyncio.wait({get, inbound.future}, return_when=asyncio.FIRST_COMPLETED)
                if get.done():
                    yield get.result()
                else:
                    get.cancel()
            await inbound.future
        finally:
            cell.abandon(inbound)

    def _find(self, target: str) -> ActorCell:
        if target not in self._cells:
            raise NoSuchActor(f"no actor is called {target!r}", remedy=f"known: {', '.join(self._cells)}")
        return self._cells[target]

    def peers(self, prefix: str) -> tuple[str, ...]:
        return tuple(sorted(n for n in self._cells if n.startswith(prefix)))

    def watch(self, cell: ActorCell, prefix: str) -> None:
        self._watchers.append((cell, prefix))

    async def wait_for(self, *names: str, timeout_s: float) -> None:
        async def ready() -> None:
            while not all(n in self._cells for n in names):
                self._changed.clear()
                await self._changed.wait()

        try:
            await asyncio.wait_for(ready(), timeout_s)
        except TimeoutError:
            missing = [n for n in names if n not in self._cells]
            raise LaunchError(f"waited {timeout_s} s for {', '.join(missing)}") from None

    def _tell(self, event: PeerEvent) -> None:
        self._changed.set()
        for cell, prefix in self._watchers:
            if event.name.startswith(prefix) and cell.name != event.name:
                cell.post(event)

    def _on_failed(self, cell: ActorCell, error: BaseException) -> None:
        self._cells.pop(cell.name, None)
        if not self.failed.done():
            self.failed.set_result(error)
        self._tell(PeerEvent("down", cell.name, self.epoch, f"failed: {error}"))
        task = asyncio.get_running_loop().create_task(cell.stop(f"failed: {error}"))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, grace_s: float = 5.0) -> None:
        for cell in reversed(list(self._cells.values())):
            await cell.drain(grace_s)
            await cell.stop("shutdown")
        self._cells.clear()
        if self._tasks:
            await asyncio.wait(self._tasks)
