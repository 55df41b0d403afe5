"""A process of its own for the fault matrix: hosts a depot, or a registry with nothing else, under limits of the kernel."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.faults.depot import Depot

from myxa.core.process import die_with_parent
from myxa.transport.node import JobKey, Node, Rendezvous

LIMITS = {"descriptors": resource.RLIMIT_NOFILE, "file": resource.RLIMIT_FSIZE, "memory": resource.RLIMIT_AS}


async def main(order: dict) -> int:
    key = JobKey.load(Path(order["key"]))
    if not order["rdzv"]:
        node = await Node.attach(name=order["name"], key=key, tcp="127.0.0.1:0", run_dir=order["sockets"])
        node.rendezvous.save(Path(order["found"]))
    else:
        rdzv = Rendezvous.load(Path(order["rdzv"]))
        node = await Node.attach(name=order["name"], rdzv=rdzv, key=key, node_rank=1, run_dir=order["sockets"])
    await node.start(Depot(Path(order["stock"])), order["name"].removesuffix("-node"))
    for name, amount in order["limits"].items():
        limit = amount + address_space_bytes() if name == "memory" else amount
        resource.setrlimit(LIMITS[name], (limit, limit))
    error = await node.failed
    print(f"{order['name']} ends: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    await node.close(grace_s=0.5)
    return 7


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    die_with_parent(os.getppid())
    sys.exit(asyncio.run(main(told)))
