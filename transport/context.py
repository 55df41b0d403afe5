"""An actor's view of its surroundings. Knows its cell and its node's services, no session and no socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from ..core.actor import PeerEvent, make_ref
from ..core.actor_group import ActorGroup, GroupCaller
from ..core.clock import Clock
from ..core.scope import remaining_s
from ..core.tensors import TensorStore
from .cell import ActorCell
from .monitors import Monitors

A = TypeVar("A")
T = TypeVar("T")


class Services(Protocol):
    """What a node does for its actors."""

    @property
    def clock(self) -> Clock: ...

    @property
    def caller(self) -> GroupCaller: ...

    @property
    def tensors(self) -> TensorStore: ...

    @property
    def monitors(self) -> Monitors: ...

    def peers(self, prefix: str) -> tuple[str, ...]: ...

    def watch(self, cell: ActorCell, prefix: str) -> None: ...

    async def wait_for(self, *names: str, timeout_s: float) -> None: ...

    def busy(self, name: str, limit_s: float, why: str) -> AbstractContextManager[None]: ...


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

    @property
    def tensors(self) -> TensorStore:
        return self._services.tensors

    def ref(self, contract: type[A], name: str) -> A:
        return make_ref(self._services.caller, contract, name)

    def group(self, contract: type[A], members: str | Sequence[str]) -> ActorGroup[A]:
        return ActorGroup(self._services.caller, contract, members, self._services.peers)

    def monitor(self, name: str) -> AsyncGenerator[PeerEvent, None]:
        return self._services.monitors.of(name)

    def link(self, name: str) -> None:
        self.spawn(self._services.monitors.until_down(name, self.name), name=f"link to {name}")

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

    def busy(self, limit_s: float, why: str) -> AbstractContextManager[None]:
        return self._services.busy(self._cell.name, limit_s, why)
