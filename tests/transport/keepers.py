"""An actor that works on large arrays, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import numpy.typing as npt

from myxa.core.actor import Actor
from myxa.core.handlers import call, cast, durable_put, stream
from myxa.core.tensors import LeasedArray

F64 = npt.NDArray[np.float64]


class KeeperContract(Actor):
    @call(deadline=20)
    async def total(self, data: F64) -> float:
        raise NotImplementedError

    @call(deadline=20)
    async def keep(self, data: LeasedArray) -> float:
        raise NotImplementedError

    @call(deadline=20, reentrant=True)
    async def kept(self) -> list[float]:
        raise NotImplementedError

    @call(deadline=20)
    async def runs(self) -> int:
        raise NotImplementedError

    @call(deadline=20)
    async def drop(self) -> None:
        raise NotImplementedError

    @call(deadline=20)
    async def state(self) -> F64:
        raise NotImplementedError

    @call(deadline=20)
    async def look(self) -> LeasedArray:
        raise NotImplementedError

    @cast(deadline=20)
    async def add(self, data: F64) -> None:
        raise NotImplementedError

    @stream(window=2, deadline=20)
    def pieces(self, count: int) -> AsyncIterator[F64]:
        raise NotImplementedError

    @durable_put(key="name", deadline=20)
    async def store(self, name: str, data: F64) -> F64:
        raise NotImplementedError

    @call(deadline=20)
    async def wait(self, data: F64) -> None:
        raise NotImplementedError


class Keeper(KeeperContract):
    """See above."""

    def __init__(self) -> None:
        self.arrays: list[npt.NDArray[Any]] = []
        self.sum = np.zeros(200_000)
        self.num_runs = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def total(self, data: F64) -> float:
        self.num_runs += 1
        assert data.flags.writeable
        data += 1  # its own
        return float(data.sum())

    async def keep(self, data: LeasedArray) -> float:
        assert not data.flags.writeable
        self.arrays.append(data)
        return float(data.sum())

    async def kept(self) -> list[float]:
        return [float(array.sum()) for array in self.arrays]

    async def runs(self) -> int:
        return self.num_runs

    async def drop(self) -> None:
        self.arrays.clear()

    async def state(self) -> F64:
        self.sum += 1
        return self.sum

    async def look(self) -> LeasedArray:
        return self.sum

    async def add(self, data: F64) -> None:
        await self.gate.wait()
        self.num_runs += 1
        self.sum += data[: self.sum.size]

    async def pieces(self, count: int) -> AsyncIterator[F64]:
        for number in range(count):
            self.sum[:] = number
            yield self.sum

    async def store(self, name: str, data: F64) -> F64:
        self.num_runs += 1
        return data * 2

    async def wait(self, data: F64) -> None:
        self.num_runs += 1
        await asyncio.sleep(60)
