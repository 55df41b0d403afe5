"""A process of its own for tests: hosts the buffer over a ledger file, or an actor that takes groups, until killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conftest import NumberedRows, make_buffer

from myxa.actors.contracts import BufferContract
from myxa.core.actor import Actor
from myxa.core.messages import DrawRequest
from myxa.transport.node import Node, Rendezvous


class Taker(Actor):
    """A rollout actor that takes two groups and never gives an answer."""

    async def on_start(self) -> None:
        self.ctx.spawn(self.take(), name="take")

    async def take(self) -> None:
        await self.ctx.wait_for("buffer", timeout_s=20)
        request = DrawRequest(rollout=self.ctx.name, epoch=self.ctx.epoch, version=0, max_groups=2, wait_s=5.0)
        await self.ctx.ref(BufferContract, "buffer").draw(request)


async def main(rdzv: str, sockets: str, name: str, ledger: str) -> None:
    node = await Node.attach(name=f"{name}-node", rdzv=Rendezvous.load(Path(rdzv)), run_dir=sockets)
    actor = make_buffer(Path(ledger), rows=NumberedRows(1000)) if name == "buffer" else Taker()
    await node.start(actor, name)
    raise await node.failed


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
