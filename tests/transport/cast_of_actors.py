"""Actors that the transport's tests call."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from myxa.core.actor import Actor, PeerEvent
from myxa.core.errors import EngineError
from myxa.core.handlers import call

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    values: F32
    extra: dict[str, Any] = {}


class Echo(Actor):
    """Answers, and keeps a list of what happened to it."""

    mailbox_size = 16

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stock: dict[str, int] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    @call(deadline=10)
    async def echo(self, item: Item, times: int = 1) -> tuple[Item, ...]:
        return (item,) * times

    @call(deadline=10, reentrant=True)
    async def size(self, data: npt.NDArray[np.uint8]) -> int:
        return int(data.size)

    @call(deadline=30)
    async def mirror(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return data

    @call(deadline=10, reentrant=True)
    async def ping(self) -> int:
        return os.getpid()

    @call(deadline=10)
    async def fail(self, how: str) -> None:
        if how == "engine":
            raise EngineError("the engine is made of glass", remedy="do not drop it")
        if how == "fatal":
            self.ctx.spawn(explode(), name="explode")
            return
        raise ZeroDivisionError(how)

    @call(deadline=10)
    async def sleep(self, seconds: float) -> float | None:
        left = self.ctx.deadline()
        self.log.append("asleep")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        self.log.append("awake")
        return left

    @call(deadline=10, reentrant=True)
    async def seen(self) -> list[str]:
        return list(self.log)

    @call(deadline=10)
    async def note(self, text: str) -> None:
        await self.gate.wait()
        self.log.append(text)

    @call(deadline=10, cancellable=False)
    async def put(self, item: Item, attempt: int) -> int:
        await self.gate.wait()
        self.log.append(f"put {item.name}")
        if attempt < 0:
            raise EngineError("no")
        self.stock[item.name] = self.stock.get(item.name, 0) + 1
        return self.stock[item.name]

    @call(deadline=10, reentrant=True)
    async def epoch(self) -> int:
        return self.ctx.epoch


async def explode() -> None:
    await asyncio.sleep(0.01)
    raise EngineError("exploded in the background")


class Relay(Actor):
    """Calls others while it is being called."""

    @call(deadline=10)
    async def through(self, target: str, seconds: float) -> float | None:
        return await self.ctx.ref(Echo, target).sleep(seconds)


class Blocker(Actor):
    """Holds its own event loop up, with or without saying so before."""

    @call(deadline=60)
    async def block(self, how: str, seconds: float, busy_s: float) -> int:
        with self.ctx.busy(busy_s, f"blocks by {how}") if busy_s else contextlib.nullcontext():
            if how == "sleeping":
                time.sleep(seconds)  # noqa: ASYNC251 - that is the point
            else:  # through PyDLL the interpreter lock is held meanwhile
                ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return os.getpid()


class Keeper(Actor):
    """Works on large arrays."""

    mailbox_size = 4096

    def __init__(self) -> None:
        self.arrays: list[F64] = []
        self.num_runs = 0

    @call(deadline=20)
    async def keep(self, data: F64) -> float:
        self.arrays.append(data)
        return float(data.sum())

    @call(deadline=20, reentrant=True)
    async def kept(self) -> list[float]:
        return [float(array.sum()) for array in self.arrays]

    @call(deadline=20)
    async def runs(self) -> int:
        return self.num_runs

    @call(deadline=20)
    async def add(self, data: F64) -> None:
        self.num_runs += 1


class Watcher(Actor):
    """Writes down who comes and goes."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.told: list[PeerEvent] = []

    async def on_start(self) -> None:
        self.ctx.watch(self.prefix)

    async def on_peer(self, event: PeerEvent) -> None:
        self.told.append(event)


CAST: dict[str, type[Actor]] = {"echo": Echo, "relay": Relay, "blocker": Blocker, "keeper": Keeper}
