"""Ray's actor call, in its own environment: `python ray_actor.py STYLE TEMP_DIR`.

Styles: "get" (plain actor, `ray.get` of a list), "await" (async actor, each call awaited).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import ray  # pyright: ignore[reportMissingImports]  # only in the peers' environment
from meter import PAYLOAD, async_client, blocking_client, descendants


class Echo:
    """Plain actor."""

    def echo(self, report: dict) -> dict:
        return report


class AsyncEcho:
    """Async actor."""

    async def echo(self, report: dict) -> dict:
        return report


def pids() -> list[int]:
    return descendants(os.getpid())


def by_get() -> None:
    actor = ray.remote(Echo).remote()

    def once() -> None:
        ray.get(actor.echo.remote(PAYLOAD))

    def flood(depth: int, seconds: float) -> int:
        num_calls = 0
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            ray.get([actor.echo.remote(PAYLOAD) for _ in range(depth)])
            num_calls += depth
        return num_calls

    once()
    blocking_client(once, flood, pids)


def by_await() -> None:
    actor = ray.remote(AsyncEcho).options(max_concurrency=2000).remote()

    async def once() -> None:
        await actor.echo.remote(PAYLOAD)

    async def main() -> None:
        await once()
        await async_client(once, pids)

    asyncio.run(main())


if __name__ == "__main__":
    style, temp_dir = sys.argv[1:]
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, _temp_dir=temp_dir, log_to_driver=False,
        configure_logging=False, object_store_memory=100 << 20,
    )  # fmt: skip
    try:
        by_get() if style == "get" else by_await()
    finally:
        ray.shutdown()
