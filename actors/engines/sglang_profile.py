"""SGLang's own profiler, by HTTP: torch's, in every rank of the server (`ProfileReq` of SGLang 0.5.17).

    /start_profile -> so many seconds -> /stop_profile, which answers once every rank has written its trace

Nothing is generated while a trace is written (of 2 s of a tiny model on a CPU: 9 to 11 s), so no profile lasts longer
than MAX_S. Should nobody be left to stop it, the server does so by itself after `num_steps` forward passes. A server
that is being profiled already says yes and goes on with the first one, and whoever stops it first gets it: then the
other is refused. One that cannot make the folder it is told ends with all its requests: only one that was launched
here, on this file system, is told one, and it is there already; others write where they do by themselves.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...core.errors import EngineError
from ...core.protocols import EngineTrace
from .sglang_http import SglangHttp

MAX_S = 3.0
STEPS_PER_S = 1000
"""More forward passes than any server makes in a second."""
START_S = 20.0
WRITE_S = 50.0
"""How long the ranks may take to write. A server that is silent for longer counts as lost anyhow."""
OWN_FOLDER = "on the server's host: $SGLANG_TORCH_PROFILER_DIR of the server, or /tmp"


class SglangProfiler:
    """Of one server."""

    def __init__(self, http: SglangHttp, *, name: str, folder: str = "") -> None:
        """`name` begins the names of the files. `folder`: where the server is to write, on a file system that it shares
        with this process; empty: where it does by itself."""
        self._http = http
        self._name = name.replace("/", ".")
        self._folder = Path(folder) if folder else None
        self._is_recording = False

    async def record(self, duration_s: float) -> EngineTrace:
        """Raises EngineError when the server refuses, does not answer, or writes nothing."""
        if self._is_recording:
            raise EngineError(f"{self._http.place}: is being profiled already", remedy="wait until that has ended")
        self._is_recording = True
        try:
            return await self._record(min(duration_s, MAX_S))
        finally:
            self._is_recording = False

    async def _record(self, duration_s: float) -> EngineTrace:
        label = f"{self._name}.{time.strftime('%Y%m%d-%H%M%S')}.{secrets.token_hex(3)}"
        where: dict[str, str] = {}
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            where["output_dir"] = str(self._folder)
        body = {
            "activities": ["CPU", "GPU"],
            "num_steps": max(1, round(duration_s * STEPS_PER_S)),
            "with_stack": False,  # Python's stacks of every operator make traces many times as large
            "record_shapes": False,
            "profile_id": label,
            **where,
        }
        try:
            await self._post("/start_profile", body, START_S)
            await asyncio.sleep(duration_s)
        except asyncio.CancelledError:  # also in the middle of the first call, which the server may have heard
            with suppress(EngineError):
                await self._post("/stop_profile", {}, START_S)
            raise
        await self._post("/stop_profile", {}, WRITE_S)
        if self._folder is None:
            return EngineTrace(engine=self._http.url, place=OWN_FOLDER, files=(f"{label}-TP-*.trace.json.gz",))
        files = tuple(sorted(path.name for path in self._folder.glob(f"*{label}*")))
        if not files:
            raise EngineError(
                f"{self._http.place}: was profiled, and wrote no trace into {self._folder}",
                remedy="somebody else may be profiling it; see the server's log",
            )
        return EngineTrace(engine=self._http.url, place=str(self._folder), files=files)

    async def _post(self, path: str, body: Mapping[str, object], within_s: float) -> None:
        try:
            await self._http.post(path, body, within_s=within_s)
        except EngineError as err:
            raise EngineError(err.message, remedy=f"{err.remedy}; --no-engine leaves the server out") from err
