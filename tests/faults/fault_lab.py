"""What the labs of the fault matrix share: opening and closing, all rows at the same time, what is left over afterwards."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.faults.depot import effects
from tests.faults.fault_table import SLACK_S, Fault
from tests.faults.operations import Result

from myxa.transport.node import JobKey, Node

Rows = dict[str, dict[str, Result] | BaseException]


@dataclass
class LabReport:
    """What the caller's node still holds, and what ran on the other side."""

    left: int
    effects: dict[tuple[str, str], int]
    reconnected: dict[str, int]
    """Row -> connections made by the caller, where a proxy counts them."""


class FaultLab(ABC):
    """A caller, and for each row of a table a callee that it happens to."""

    near: Node
    """The caller's."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.folder = Path(tempfile.mkdtemp(prefix="p-"))
        self.key = JobKey.generate()
        self.nodes: list[Node] = []
        self.host: Node

    async def _open(self) -> None:
        self.host = await Node.attach(name="launcher/0", key=self.key, tcp="127.0.0.1:0")
        self.nodes.append(self.host)

    async def _close(self) -> None:
        for node in reversed(self.nodes):
            await node.close(grace_s=0.5)
        shutil.rmtree(self.folder)

    @abstractmethod
    async def run(self, name: str, fault: Fault) -> dict[str, Result]:
        """Every operation of the row, at the same time."""

    def num_lines(self, name: str) -> int:
        return 0

    @classmethod
    async def run_all(cls, faults: dict[str, Fault]) -> tuple[Rows, LabReport]:
        """All rows at the same time: results of each, or what went wrong with it; and what was left over."""
        lab = cls(list(faults))
        try:
            await lab._open()
            found = await asyncio.gather(*(lab.run(*row) for row in faults.items()), return_exceptions=True)
            for _ in range(100):
                if len(lab.near._session.calls) == 1:
                    break  # the mirror's subscription to the registry is the one call that lasts
                await asyncio.sleep(0.05)
            ran = Counter[tuple[str, str]]()
            for stock in lab.folder.glob("*.stock"):
                ran |= effects(stock)
            report = LabReport(len(lab.near._session.calls), ran, {name: lab.num_lines(name) for name in faults})
        finally:
            await lab._close()
        return dict(zip(faults, found, strict=True)), report


NOTED = ("call",)
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


def told(results: Mapping[str, dict[str, Result] | BaseException]) -> str:
    """Everything that happened, for whoever reads a failure."""
    lines: list[str] = []
    for name, found in results.items():
        rows = found.items() if isinstance(found, dict) else [("", found)]
        lines += [f"{name:22} {kind:11} {result!s:.160}" for kind, result in rows]
    return "\n".join(lines)
