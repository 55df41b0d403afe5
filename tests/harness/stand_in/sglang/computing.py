"""The embedded engine behind SGLang's routes; only weights and kernels are ours."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from typing import Any

from aiohttp import web
from tests.harness.engine_server import EngineServer, serve
from tests.harness.fake_sglang import ABORTED, chunk, fetch_prompt

from myxa.actors.engines.embedded.core import EmbeddedOptions


class SilentWhilePaused(EngineServer):
    """The real one answers `/health` by generating a token, so it does not while it is paused."""

    async def _health(self, body: Any) -> web.Response:
        while self._is_paused:
            await asyncio.sleep(0.05)
        return await super()._health(body)


class Decoding(SilentWhilePaused):
    """It generates once a prefill server has read the prompt, which it reads itself again."""

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        _, why = await fetch_prompt(body, asyncio.Event())
        if not why:
            return await super()._generate(request, {k: v for k, v in body.items() if not k.startswith("bootstrap_")})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk([], 0, ABORTED | {"message": why}))
        return response


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
        kind=Decoding if args.disaggregation_mode == "decode" else SilentWhilePaused,
    ) as served:
        print(f"the server is fired up on {served.url}", flush=True)
        await stopped.wait()
