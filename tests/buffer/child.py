"""A process of its own for tests: hosts the buffer over a ledger file, or an actor that only is there, until killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from conftest import NumberedRows, make_buffer

from myxa.core.actor import Actor
from myxa.transport.node import Node, Rendezvous


async def main(rdzv: str, sockets: str, name: str, ledger: str) -> None:
    node = await Node.attach(name=f"{name}-node", rdzv=Rendezvous.load(Path(rdzv)), run_dir=sockets)
    actor = make_buffer(Path(ledger), rows=NumberedRows(1000)) if name == "buffer" else Actor()
    await node.start(actor, name)
    raise await node.failed


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
