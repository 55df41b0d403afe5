"""All actors of a run on one loop of this process, for what a run does that needs no processes of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from tests.harness.inproc import InprocNetwork

from myxa.actors.contracts import BufferContract, CoordinatorContract
from myxa.core.config import load_config
from myxa.core.errors import MyxaError
from myxa.core.messages import BufferStats
from myxa.launch.program import build_actor
from myxa.launch.run_dir import RunDir
from myxa.launch.supervisor.placement import place
from myxa.transport.node import Node


async def inside(
    file: Path | str, *overrides: str, until: Callable[[BufferStats, RunDir], bool] = lambda stats, run_dir: False
) -> tuple[object, Path]:
    """Until one fails (its error), the run ends (its status) or `until` (the buffer's counts); and the run directory."""
    config = load_config(file, overrides)
    run_dir = RunDir.create(config.run.dir, config.run.name, datetime.now())
    node = await Node.attach(name="inside", network=InprocNetwork())
    try:
        for spec in place(config, 1):
            await node.start(build_actor(spec, config, run_dir.path), name=spec.name)
        coordinator, buffer = node.ref(CoordinatorContract, "coordinator"), node.ref(BufferContract, "buffer")
        async with asyncio.timeout(60):
            while not node.failed.done():
                status = await coordinator.status()
                if status.phase in ("finished", "failed"):
                    return status, run_dir.path
                if until(stats := await buffer.stats(), run_dir):
                    return stats, run_dir.path
                await asyncio.sleep(0.05)
    except MyxaError as error:
        return node.failed.result() if node.failed.done() else error, run_dir.path
    finally:
        await node.close(grace_s=20)  # time for reward processes to be reaped, on a machine that does much else
    return node.failed.result(), run_dir.path
