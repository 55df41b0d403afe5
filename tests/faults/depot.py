"""The actor that the fault matrix calls. It writes down what was executed, in a file that outlives its process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from myxa.core.actor import Actor
from myxa.core.errors import LedgerError
from myxa.core.handlers import call
from myxa.transport.node import JobKey, Node

U8 = npt.NDArray[np.uint8]


class Crate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    content: U8


class DepotContract(Actor):
    @call(deadline=10, reentrant=True)
    async def work(self, token: str, seconds: float) -> str:
        raise NotImplementedError

    @call(deadline=10, cancellable=False)
    async def store(self, crate: Crate, seconds: float) -> int:
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def weigh(self, token: str, data: U8, seconds: float) -> int:
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def whoami(self) -> tuple[int, int]:
        """Process id and epoch."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def hurt(self, how: str, amount: float) -> None:
        raise NotImplementedError


class Depot(DepotContract):
    """`stock`: file with one line per effect, written before the answer; read again by the next incarnation. Beside it
    lies `<stock>.crates` with what was put."""

    mailbox_size = 256

    def __init__(self, stock: Path) -> None:
        self._stock = stock
        self._lines = -1
        self._kept: set[str] = set()
        self._hoard: list[int] = []

    async def on_start(self) -> None:
        self._kept = {token for kind, token in read_stock(self._stock) if kind == "put"}
        self._lines = os.open(self._stock, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def on_stop(self, why: str) -> None:
        os.close(self._lines)

    def _write(self, kind: str, token: str) -> None:
        os.write(self._lines, f"{kind} {token}\n".encode())

    def _keep(self, crate: Crate) -> None:
        path = crates_of(self._stock)
        try:
            with path.open("ab", buffering=0) as file:
                file.write(crate.content.data)
        except OSError as error:
            raise LedgerError(f"{path} cannot be written: {error}", remedy="is the disk full?") from error
        self._write("put", crate.name)  # first on disk, then acknowledged
        self._kept.add(crate.name)

    async def work(self, token: str, seconds: float) -> str:
        self._write("call", token)
        await asyncio.sleep(seconds)
        return token

    async def store(self, crate: Crate, seconds: float) -> int:
        if crate.name not in self._kept:
            await asyncio.sleep(seconds)
            self._keep(crate)
        return crate.content.size

    async def weigh(self, token: str, data: U8, seconds: float) -> int:
        self._write("bulk", token)
        await asyncio.sleep(seconds)
        return int(data.size)

    async def whoami(self) -> tuple[int, int]:
        return os.getpid(), self.ctx.epoch

    async def hurt(self, how: str, amount: float) -> None:
        if how == "exit":
            os._exit(int(amount))
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "hold the interpreter lock":
            ctypes.PyDLL(None).usleep(int(amount * 1e6))  # PyDLL: without letting go of it
        elif how == "eat descriptors":
            self._hoard += eat_descriptors()
        elif how == "give descriptors back":
            for descriptor in self._hoard:
                os.close(descriptor)
            self._hoard.clear()


def eat_descriptors() -> list[int]:
    """Open files until there is not one descriptor left."""
    eaten: list[int] = []
    while True:
        try:
            eaten.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return eaten


def crates_of(stock: Path) -> Path:
    return stock.with_name(stock.name + ".crates")


def read_stock(path: Path) -> list[tuple[str, str]]:
    """(kind, token) of every effect, whole lines only."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [(line.split()[0], line.split()[1]) for line in lines]


def effects(path: Path) -> Counter[tuple[str, str]]:
    return Counter(read_stock(path))


@asynccontextmanager
async def pair(folder: Path, *, tcp: bool = False) -> AsyncIterator[tuple[Node, Node]]:
    """Two nodes of this process over real sockets, besides the registry's; the second hosts a depot."""
    key = JobKey.generate() if tcp else None
    host = await Node.attach(name="launcher/0", key=key, tcp="127.0.0.1:0" if tcp else "")
    near = await Node.attach(name="near", rdzv=host.rendezvous, key=key, node_rank=0)
    far = await Node.attach(name="far", rdzv=host.rendezvous, key=key, node_rank=1 if tcp else 0)
    try:
        await far.start(Depot(folder / "stock"), "depot")
        await near.wait_for("depot", timeout_s=20)
        yield near, far
    finally:
        for node in (far, near, host):
            await node.close(grace_s=0.3)
