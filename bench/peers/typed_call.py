"""The whole thing: a typed actor call between two processes (five fields there, validated, five fields back).

python typed_call.py server RENDEZVOUS_FILE | python typed_call.py client RENDEZVOUS_FILE SERVER_PID
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import uvloop
from meter import PAYLOAD, as_our_workers, async_client, say

from myxa.core.actor import Actor
from myxa.core.handlers import call
from myxa.transport.node import Node, Rendezvous, keep_freed_memory

LARGE_BYTES = 16 << 20
"""Of one call of the flood beside which small ones are measured."""


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The five fields."""

    number: int
    name: str
    version: int
    reward: float
    done: bool


class EchoContract(Actor):
    """What is called."""

    @call(deadline=30)
    async def echo(self, report: Report) -> Report:
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def take(self, data: npt.NDArray[np.uint8]) -> int:
        raise NotImplementedError


class Echo(EchoContract):
    """Answers with what it was given."""

    mailbox_size = 4096

    async def echo(self, report: Report) -> Report:
        return report

    async def take(self, data: npt.NDArray[np.uint8]) -> int:
        return data.nbytes


async def server(rendezvous: str, name: str) -> None:
    path = Path(rendezvous)
    node = await Node.attach(name=name, rdzv=Rendezvous.load(path) if path.exists() else None)
    await node.start(Echo(), f"{name}/echo")
    if not path.exists():
        node.rendezvous.save(path)
    say("ready")
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.read)
    await node.close()


async def client(rendezvous: str, server_pid: int) -> None:
    node = await Node.attach(name="client", rdzv=Rendezvous.load(Path(rendezvous)))
    await node.wait_for("server/echo", timeout_s=10)
    ref = node.ref(EchoContract, "server/echo")
    report = msgspec.convert(PAYLOAD, Report)

    async def once() -> None:
        await ref.echo(report)

    await once()
    large = np.ones(LARGE_BYTES, np.uint8)
    await async_client(once, lambda: [os.getpid(), server_pid], lambda: ref.take(large))
    await node.close()


if __name__ == "__main__":
    as_our_workers()
    keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if sys.argv[1] == "server":
            runner.run(server(sys.argv[2], sys.argv[3]))
        else:
            runner.run(client(sys.argv[2], int(sys.argv[3])))
