"""SGLang 0.5.17's `/start_profile` and `/stop_profile`: torch's profiler on this process, as the only rank.

Fields, answers and file names are SGLang's, as seen of a real one. It refuses to stop what does not run, by 500 without
a reason, which only its log tells; to a second start it says yes and goes on with the first. Other fields than these are
let pass; profiles by number of steps end here by time only.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from aiohttp import web
from torch.profiler import ProfilerActivity

_log = logging.getLogger("profiler")
STARTED = "Start profiling.\n"
REFUSED = "Internal Server Error"


class ProfileReq(msgspec.Struct, kw_only=True):
    """What is used of it."""

    output_dir: str | None = None
    num_steps: int | None = None
    activities: list[str] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_id: str | None = None


class ServerProfiler:
    """Of one server."""

    def __init__(self) -> None:
        self._running: Any = None
        self._path = Path()

    async def start(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read() or b"{}", type=ProfileReq)
        if self._running is not None:
            return web.Response(text=STARTED)
        folder = Path(asked.output_dir or os.environ.get("SGLANG_TORCH_PROFILER_DIR", "/tmp"))
        self._path = folder / f"{asked.profile_id}-TP-0.trace.json.gz"
        kineto: Any = torch._C
        config = kineto._profiler._ExperimentalConfig(profile_all_threads=True)
        self._running = torch.profiler.profile(
            activities=[ProfilerActivity.CPU],
            with_stack=asked.with_stack is not False,
            record_shapes=asked.record_shapes is not False,
            experimental_config=config,
        )
        self._running.start()
        return web.Response(text=STARTED)

    async def stop(self, request: web.Request) -> web.Response:
        if self._running is None:
            _log.error("Profiling is not in progress. Call /start_profile first.")
            return web.Response(text=REFUSED, status=500)
        running, self._running = self._running, None
        running.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self._path))
        return web.Response(text="Stop profiling. This will take some time.\n")
