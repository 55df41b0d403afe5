"""Root of `fanout.py`: calls the first N servers at once, again and again; only its own CPU is counted.

python fanout_root.py RENDEZVOUS_FILE NUM_PEERS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import msgspec
import uvloop
from meter import PAYLOAD, WARM_UP_S, Result, as_our_workers, say
from typed_call import EchoContract, Report

from myxa.transport.node import Node, Rendezvous


async def main(rendezvous: str, num_peers: int) -> None:
    node = await Node.attach(name="root", rdzv=Rendezvous.load(Path(rendezvous)))
    names = [f"server/{place}/echo" for place in range(num_peers)]
    await node.wait_for(*names, timeout_s=20)
    refs = [node.ref(EchoContract, name) for name in names]
    report = msgspec.convert(PAYLOAD, Report)

    async def ask(size: int, seconds: float, *, as_group: bool) -> list[int]:
        taken: list[int] = []
        group = node.group(EchoContract, names[:size])
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            before = time.perf_counter_ns()
            if as_group:
                await group.all(EchoContract.echo, report)
            else:
                await asyncio.gather(*(ref.echo(report) for ref in refs[:size]))
            taken.append(time.perf_counter_ns() - before)
        return taken

    say("ready")
    loop = asyncio.get_running_loop()
    while text := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(text)
        size, as_group = command["peers"], bool(command["as_group"])
        await ask(size, WARM_UP_S, as_group=as_group)
        result = Result([os.getpid()])
        taken = await ask(size, command["seconds"], as_group=as_group)
        say(result.line(len(taken), taken))
    await node.close()


if __name__ == "__main__":
    as_our_workers()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], int(sys.argv[2])))
