"""What the labs of the fault matrix share: opening and closing, all rows at the same time, what is left over afterwards."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Self

from tests.faults.depot import effects
from tests.faults.fault_table import SLACK_S, Fault
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
        self.left = 0
        self.effects: dict[tuple[str, str], int] = {}

    async def settle(self, near: Node, stocks: Iterable[Path]) -> None:
        for _ in range(100):
            self.left = len(near._session.calls)
            # The mirror's subscription to the registry is the one call that lasts.
            if self.left == 1:
                break
            await asyncio.sleep(0.05)
        for stock in stocks:
            self.effects |= effects(stock)


NOTED = ("call", "cast")
"""Operations whose handlers write down that they begin."""
BEGIN_S = 5.0


async def begun(stock: Path, tokens: Mapping[str, str], kinds: Collection[str] = NOTED) -> None:
    """Wait until those of these operations (kind -> token) are under way at the callee that say so: on a busy machine a
    fault that strikes after a fixed time may come before them. After `BEGIN_S` the verdict has the word."""
    wanted = {(kind, token) for kind, token in tokens.items() if kind in kinds}
    give_up_at = time.monotonic() + BEGIN_S
    while not wanted <= effects(stock).keys() and time.monotonic() < give_up_at:
        await asyncio.sleep(0.01)


# -- what happened, against what is promised


def check(
    found: dict[str, Result] | BaseException, effects: Mapping[tuple[str, str], int], fault: Fault, name: str, kind: str
) -> None:
    """AssertionError if that cell is not as the table says."""
    if isinstance(found, BaseException):
        raise AssertionError(f"the row {name!r} did not come to its end") from found
    cell, result = fault.cells[kind], found[kind]
    assert result.outcome in cell.outcomes, f"{name}, {kind}: {result}"
    assert result.took_s <= cell.within_s + SLACK_S, f"{name}, {kind}: {result}"
    if kind != "join":
        num = effects.get((kind, result.token), 0)
        assert cell.num_effects[0] <= num <= cell.num_effects[1], f"{name}, {kind}: {result}, took effect {num} times"


def check_all(
    results: Mapping[str, dict[str, Result] | BaseException],
    effects: Mapping[tuple[str, str], int],
    faults: Mapping[str, Fault],
) -> None:
    """AssertionError if any cell of these rows is not as the table says."""
    for name, fault in faults.items():
        for kind in fault.cells:
            check(results[name], effects, fault, name, kind)


def told(results: Mapping[str, dict[str, Result] | BaseException]) -> str:
    """Everything that happened, for whoever reads a failure."""
    lines: list[str] = []
    for name, found in results.items():
        rows = found.items() if isinstance(found, dict) else [("", found)]
        lines += [f"{name:22} {kind:11} {result!s:.160}" for kind, result in rows]
    return "\n".join(lines)
