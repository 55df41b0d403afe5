"""`python -m sglang.launch_server`: the embedded engine behind SGLang's name and command line, for tests of launching.

Put `stand_in/` on PYTHONPATH. It parses ServerArgs flags, reads the config file and serves SGLang's routes on the port
it is told, as the real one does; only weights and kernels are ours.

STAND_IN_FAULT says what goes wrong: "crash" (while loading), "child" (leaves a process of its own behind that knows
nothing of its parent's end), "port:FILE" (the port is taken, as long as FILE exists; FILE is removed).
STAND_IN_ACCESS_LOG=1: every answered request is noted, as by the real one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from aiohttp import web
from sglang.srt.profiler import ServerProfiler
from sglang.srt.server_args import prepare_server_args

from myxa.actors.engines import http_server
from myxa.actors.engines.embedded.engine import EmbeddedOptions
from myxa.actors.engines.http_server import EngineServer, serve


class SilentWhilePaused(EngineServer):
    """The real one answers `/health` by generating a token, so it does not while it is paused. It profiles itself."""

    def app(self) -> web.Application:
        app = super().app()
        profiler = ServerProfiler()
        app.router.add_post("/start_profile", profiler.start)
        app.router.add_post("/stop_profile", profiler.stop)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        while self._is_paused:
            await asyncio.sleep(0.05)
        return await super()._health(request)


http_server.EngineServer = SilentWhilePaused


def misbehave(fault: str, port: int) -> None:
    kind, _, detail = fault.partition(":")
    if kind == "crash":
        print("loading the model")
        sys.exit("RuntimeError: CUDA out of memory (stand-in)")
    if kind == "child":
        helper = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(helper)
        print(f"helper {child.pid}", flush=True)
    if kind == "port" and Path(detail).exists():
        Path(detail).unlink()
        sys.exit(f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): address already in use")


async def run(argv: list[str]) -> None:
    args = prepare_server_args(argv)
    if not (args.skip_tokenizer_init and args.incremental_streaming_output and args.api_key == args.admin_api_key):
        sys.exit("the stand-in wants what myxa always says")
    misbehave(os.environ.get("STAND_IN_FAULT", ""), args.port)
    options = EmbeddedOptions(
        max_running=args.max_running_requests,
        context_length=args.context_length or 0,
        dtype=args.dtype,
        seed=args.random_seed,
        stream_interval=args.stream_interval,
    )
    key = args.admin_api_key
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    told: logging.Logger | None = None
    if os.environ.get("STAND_IN_ACCESS_LOG"):
        logging.basicConfig(level=logging.INFO)
        told = logging.getLogger("access")
    async with serve(
        args.model_path, args.host, args.port, options=options, is_incremental=True, key=key, access_log=told
    ) as served:
        print(f"the server is fired up on {served.url}", flush=True)
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1:]))
