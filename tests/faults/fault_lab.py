"""What the labs of the fault matrix share: opening and closing, all rows at the same time, what is left over afterwards."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Self

from tests.faults.depot import effects
from tests.faults.fault_table import Fault
from tests.faults.operations import Result

from myxa.transport.node import Node

Rows = dict[str, dict[str, Result] | BaseException]


class FaultLab(ABC):
    """`async with`; then `run(name, fault)`, several at the same time."""

    near: Node
    """The caller's."""

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    async def _close(self) -> None: ...

    @abstractmethod
    async def run(self, name: str, fault: Fault) -> dict[str, Result]:
        """Every operation of the row, at the same time."""

    async def run_rows(self, faults: dict[str, Fault]) -> Rows:
        """Results of every row, or what went wrong with it."""
        found = await asyncio.gather(*(self.run(name, fault) for name, fault in faults.items()), return_exceptions=True)
        return dict(zip(faults, found, strict=True))


class LabReport:
    """What the caller's node still holds, and what ran on the other side."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.effects: dict[tuple[str, str], int] = {}

    async def settle(self, near: Node, stocks: Iterable[Path]) -> None:
        for _ in range(100):
            calls = near._session.calls
            self.left = {"pending calls": len(calls), "parked": len(calls.parked_targets)}
            # The mirror's subscription to the registry is the one call that lasts.
            if self.left == {"pending calls": 1, "parked": 0}:
                break
            await asyncio.sleep(0.05)
        for stock in stocks:
            self.effects |= effects(stock)


NOTED = ("call", "idempotent", "cast")
"""Operations whose handlers write down that they begin."""
BEGIN_S = 5.0


async def begun(stock: Path, tokens: Mapping[str, str], kinds: Collection[str] = NOTED) -> None:
    """Wait until those of these operations (kind -> token) are under way at the callee that say so: on a busy machine a
    fault that strikes after a fixed time may come before them. After `BEGIN_S` the verdict has the word."""
    wanted = {(kind, token) for kind, token in tokens.items() if kind in kinds}
    give_up_at = time.monotonic() + BEGIN_S
    while not wanted <= effects(stock).keys() and time.monotonic() < give_up_at:
        await asyncio.sleep(0.01)
