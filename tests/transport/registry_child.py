"""A process that hosts a registry with a journal, until it is killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from myxa.transport.node import JobKey, Node


async def main(journal: str, rdzv: str, key: str, sockets: str) -> int:
    tcp = "127.0.0.1:0" if key else ""
    job_key = JobKey.load(Path(key)) if key else None
    node = await Node.attach(name="launcher/0", run_dir=sockets, key=job_key, tcp=tcp, journal=journal)
    if not Path(rdzv).exists():  # those who come later get the first one's record and must find their way
        node.rendezvous.save(Path(rdzv))
    print(f"epoch {node.epoch}", flush=True)
    await node.failed
    await node.close(grace_s=0.5)
    return 7


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
