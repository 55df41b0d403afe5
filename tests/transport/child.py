"""A process of its own for tests: joins the registry and hosts one actor until it is killed or told to stop."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.transport import cast_of_actors

from myxa.transport.node import JobKey, Node, Rendezvous


async def main(rdzv: str, key: str, sockets: str, name: str, what: str = "echo") -> int:
    rank = 1 if key else 0
    job_key = JobKey.load(Path(key)) if key else None
    node = await Node.attach(
        name=name, rdzv=Rendezvous.load(Path(rdzv)), key=job_key, node_rank=rank, run_dir=sockets
    )  # fmt: skip
    await node.start(cast_of_actors.CAST[what](), name)
    await node.failed
    await node.close(grace_s=0.5)
    return 7


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
