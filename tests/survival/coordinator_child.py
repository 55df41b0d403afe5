"""A coordinator in a process of its own. Arguments: rendezvous file, directory for sockets, run directory."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from myxa.actors.coordinator.coordinator import Coordinator
from myxa.actors.coordinator.options import CoordinatorOptions
from myxa.core.clock import SystemClock
from myxa.transport.node import Node, Rendezvous


async def main(rdzv: str, sockets: str, run_dir: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    folder = Path(run_dir)
    options = CoordinatorOptions(
        name="room", num_steps=0, has_engines=False, audit_path=folder / "audit.jsonl",
        journal_path=folder / "coordinator.journal", launch="room", eval_at_start=False,
    )  # fmt: skip
    node = await Node.attach(name="coordinator-node", rdzv=Rendezvous.load(Path(rdzv)), run_dir=sockets)
    await node.start(Coordinator(options=options, clock=SystemClock()), "coordinator")
    raise await node.failed


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
