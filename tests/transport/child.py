"""A process of its own for tests: joins the registry and hosts one actor until it is killed or told to stop."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from myxa.transport.node import JobKey, Node, Rendezvous


async def main(rdzv: str, key: str, name: str, what: str = "echo") -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    import cast_of_actors

    rank = 1 if key else 0
    node = await Node.attach(
        name=name, rdzv=Rendezvous.load(Path(rdzv)), key=JobKey.load(Path(key)) if key else None, node_rank=rank
    )
    await node.start(cast_of_actors.CAST[what](), name)
    error = await node.failed
    await node.close(grace_s=0.5)
    print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    return 7


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
