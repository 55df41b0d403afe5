"""An actor that works on large arrays, for tests."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt

from myxa.core.actor import Actor, MailboxPolicy
from myxa.core.handlers import call, cast

F64 = npt.NDArray[np.float64]


class KeeperContract(Actor):
    @call(deadline=20)
    async def total(self, data: F64) -> float:
        raise NotImplementedError

    @call(deadline=20)
    async def keep(self, data: F64) -> float:
        raise NotImplementedError

    @call(deadline=20, reentrant=True)
    async def kept(self) -> list[float]:
        raise NotImplementedError

    @call(deadline=20)
    async def runs(self) -> int:
        raise NotImplementedError

    @cast(deadline=20)
    async def add(self, data: F64) -> None:
        raise NotImplementedError


class Keeper(KeeperContract):
    """See above."""

    mailbox = MailboxPolicy(size=4096)

    def __init__(self) -> None:
        self.arrays: list[npt.NDArray[Any]] = []
        self.num_runs = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def total(self, data: F64) -> float:
        self.num_runs += 1
        assert data.flags.writeable
        data += 1  # its own
        return float(data.sum())

    async def keep(self, data: F64) -> float:
        self.arrays.append(data)
        return float(data.sum())

    async def kept(self) -> list[float]:
        return [float(array.sum()) for array in self.arrays]

    async def runs(self) -> int:
        return self.num_runs

    async def add(self, data: F64) -> None:
        await self.gate.wait()
        self.num_runs += 1
