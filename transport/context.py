"""An actor's view of its surroundings. Knows its cell and its node's services, no session and no socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from ..core.actor import Caller, make_ref
from ..core.clock import Clock
from ..core.scope import remaining_s
from .cell import ActorCell

A = TypeVar("A")
T = TypeVar("T")


class Services(Protocol):
    """What a node does for its actors."""

    @property
    def clock(self) -> Clock: ...

    @property
    def caller(self) -> Caller: ...

    def peers(self, prefix: str) -> tuple[str, ...]: ...

    def watch(self, cell: ActorCell, prefix: str) -> None: ...

    async def wait_for(self, *names: str, timeout_s: float) -> None: ...


class NodeContext:
    """`ActorContext` of an actor hosted by a node."""

    def __init__(self, services: Services, cell: ActorCell, epoch: int, log: logging.Logger) -> None:
        self._services = services
        self._cell = cell
        self._epoch = epoch
        self._log = log

    @property
    def name(self) -> str:
        return self._cell.name

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def clock(self) -> Clock:
        return self._services.clock

    @property
    def log(self) -> logging.Logger:
        return self._log

    def ref(self, contract: type[A], name: str) -> A:
        return make_ref(self._services.caller, contract, name)

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        return self._cell.spawn(coro, name)

    def fail(self, error: BaseException) -> None:
        self._cell.fail(error)

    def peers(self, prefix: str) -> tuple[str, ...]:
        return self._services.peers(prefix)

    def watch(self, prefix: str) -> None:
        self._services.watch(self._cell, prefix)

    async def wait_for(self, *names: str, timeout_s: float) -> None:
        await self._services.wait_for(*names, timeout_s=timeout_s)

    def deadline(self) -> float | None:
        return remaining_s(None, self._services.clock.monotonic())
