"""A program that hosts a rollout actor of a run, for tests that kill it: `python host_program.py RUN_DIR`."""

from __future__ import annotations

import asyncio
import sys

from myxa.launch.embed import rollout_in


async def main() -> None:
    async with rollout_in(sys.argv[1]) as rollout:
        while (await rollout.status()).phase == "joining":
            await asyncio.sleep(0.05)
        print(f"{rollout.name} serves", flush=True)
        await rollout.ended()


asyncio.run(main())
