"""The embedded engine behind SGLang's routes; only weights and kernels are ours."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from typing import Any

from aiohttp import web
from tests.harness.engine_server import EngineServer, serve

from myxa.actors.engines.embedded.core import EmbeddedOptions


class SilentWhilePaused(EngineServer):
    """The real one answers `/health` by generating a token, so it does not while it is paused."""

    async def _health(self, body: Any) -> web.Response:
        while self._is_paused:
            await asyncio.sleep(0.05)
        return await super()._health(body)


async def run_computing(args: argparse.Namespace, stopped: asyncio.Event) -> None:
    options = EmbeddedOptions(
        max_running=args.max_running_requests, context_length=args.context_length or 0, dtype=args.dtype,
        seed=args.random_seed, stream_interval=args.stream_interval,
    )  # fmt: skip
    log: logging.Logger | None = None
    if os.environ.get("STAND_IN_ACCESS_LOG"):
        logging.basicConfig(level=logging.INFO)
        log = logging.getLogger("access")
    async with serve(
        args.model_path,
        args.port,
        options=options,
        is_incremental=True,
        key=args.admin_api_key,
        access_log=log,
        kind=SilentWhilePaused,
    ) as served:
        print(f"the server is fired up on {served.url}", flush=True)
        await stopped.wait()
