"""A process that hosts a registry with a journal, until it is killed; or dies by itself between a grant and its answer."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from myxa.transport.node import JobKey, Node
from myxa.transport.registry import journal as registry_journal


def die_after(num_grants: int) -> None:
    """As a power cut: the grant is on the disk, the answer never leaves."""
    settle = registry_journal.RegistryJournal.settle
    left = [num_grants]

    async def settle_and_die(self: registry_journal.RegistryJournal) -> None:
        await settle(self)
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)

    registry_journal.RegistryJournal.settle = settle_and_die


async def main(journal: str, rdzv: str, key: str, sockets: str, num_grants: str = "") -> int:
    if num_grants:
        die_after(int(num_grants))
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
