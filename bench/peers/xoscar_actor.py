"""xoscar's actor call, in its own environment: `python xoscar_actor.py`. The actor lives in a pool's other process."""

from __future__ import annotations

import asyncio
import os

import xoscar  # pyright: ignore[reportMissingImports]  # only in the peers' environment
from meter import PAYLOAD, async_client, descendants


class Echo(xoscar.StatelessActor):
    """Answers with what it was given."""

    async def echo(self, report: dict) -> dict:
        return report


async def main() -> None:
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1)
    async with pool:
        address = pool.external_address
        strategy = xoscar.allocate_strategy.ProcessIndex(1)
        actor = await xoscar.create_actor(Echo, address=address, uid="echo", allocate_strategy=strategy)

        async def once() -> None:
            await actor.echo(PAYLOAD)

        await once()
        await async_client(once, lambda: descendants(os.getpid()))


if __name__ == "__main__":
    asyncio.run(main())
