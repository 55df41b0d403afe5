"""The node that is attacked, in a process of its own: hosts the registry and an echo, over ipc and tcp.

Prints its rendezvous record and the job's key as one line of JSON; ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
from pathlib import Path

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fuzz import audit, stubs

from myxa.actors.contracts import BufferContract
from myxa.core.actor import Actor
from myxa.core.handlers import call
from myxa.transport.descriptors import raise_limit
from myxa.transport.node import JobKey, Node


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Of the victim."""

    counters: dict[str, int]
    executed: int
    misfits: int
    deeds: list[str]
    objects: int
    rss_mib: float
    fds: int
    failed: str


class Witness(Actor):
    """Answers good calls, and says how the process is."""

    def __init__(self, node: Node, deeds: list[str]) -> None:
        self._node = node
        self._deeds = deeds

    @call(deadline=20, reentrant=True)
    async def ping(self, number: int) -> int:
        return number + 1

    @call(deadline=20, reentrant=True)
    async def state(self) -> State:
        gc.collect()
        process = psutil.Process()
        return State(
            counters=self._node.counters(), executed=stubs.executed.total(), misfits=len(stubs.misfits),
            deeds=self._deeds[:20], objects=len(gc.get_objects()), rss_mib=process.memory_info().rss / 2**20,
            fds=process.num_fds(), failed=str(self._node.failed.result()) if self._node.failed.done() else "",
        )  # fmt: skip


async def main() -> None:
    raise_limit()
    logging.disable(logging.WARNING)  # every refusal is logged; thousands are no news here
    key = JobKey.generate()
    node = await Node.attach(name="launcher/0", tcp="127.0.0.1:0", key=key)
    try:
        with audit.watched() as deeds:
            await node.start(stubs.stub_of(BufferContract)(), name="buffer")
            await node.start(stubs.stub_of(stubs.MixedContract)(), name="mixed")
            await node.start(Witness(node, deeds), name="witness")
            await asyncio.to_thread(int)  # what it imports is no attacker's deed
            deeds.clear()  # of starting
            record = msgspec.to_builtins(node.rendezvous)
            print(json.dumps({"rdzv": record, "key": key.text, "pid": os.getpid()}), flush=True)
            await asyncio.to_thread(sys.stdin.read)
    finally:
        await node.close(grace_s=1.0)


if __name__ == "__main__":
    asyncio.run(main())
