"""A rollout server for a benchmark: stock SGLang on a GPU, or our embedded engine behind the same routes on a CPU.

It is started by hand here, not by a rollout actor, where two clients are to share it or its start is to overlap with
something else.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from myxa.actors.engines.sglang.launch import hide_megatron

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)
"""Batch sizes that get a CUDA graph: every further one costs start-up time."""
FP8_SERVER = ("--fp8-gemm-backend", "triton")
"""For folders of FP8 in blocks: what SGLang would choose is not on every machine."""
START_S = 200.0
"""The first server on a bare machine also compiles kernels."""


class ServerDiedError(RuntimeError):
    """It ended, or was not well in time; the text holds the end of its log."""


@dataclass(kw_only=True)
class Server:
    """One server process with whatever it starts."""

    folder: Path
    log: Path
    is_sglang: bool
    gpu: int = 0
    visible: str = ""
    """GPUs that it sees, if more than its own, which is the first."""
    dtype: str = "bfloat16"
    mem_fraction: float = 0.3
    max_running: int = 256
    context_length: int = 0
    graph_sizes: tuple[int, ...] = GRAPH_SIZES
    extra: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Begin; `wait` says when it serves."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.env, "OMP_NUM_THREADS": "4" if self.is_sglang else "1"}
        if self.is_sglang:
            environment["CUDA_VISIBLE_DEVICES"] = self.visible or str(self.gpu)
            hiding = self.log.parent / "without_megatron"
            hiding.mkdir(exist_ok=True)
            environment = hide_megatron(environment, hiding)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._sglang(port) if self.is_sglang else self._embedded(port),
                env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _sglang(self, port: int) -> list[str]:
        sizes = [str(size) for size in self.graph_sizes if size <= self.max_running]
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.folder)),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", self.dtype, "--weight-version", "0"),
            *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--mem-fraction-static", str(self.mem_fraction), "--max-running-requests", str(self.max_running)),
            *("--cuda-graph-bs-decode", *sizes, "--cuda-graph-backend-prefill", "disabled", "--log-level", "info"),
        ]
        if self.context_length:
            command += ["--context-length", str(self.context_length)]
        return [*command, *self.extra]

    def _embedded(self, port: int) -> list[str]:
        program = Path(__file__).parents[2] / "tests/harness/engine_server.py"
        return [sys.executable, str(program), str(self.folder), "--port", str(port)]

    def wait(self, limit_s: float = START_S) -> str:
        """Until it is well; its address. Raises ServerDiedError."""
        give_up_at = time.monotonic() + limit_s
        while time.monotonic() < give_up_at:
            if self._process is None or self._process.poll() is not None:
                status = None if self._process is None else self._process.returncode
                raise ServerDiedError(f"the server ended with {status}:\n{self.last_words()}")
            if is_well(self.url):
                return self.url
            time.sleep(0.3)
        raise ServerDiedError(f"the server was not well within {limit_s:g} s:\n{self.last_words()}")

    def last_words(self, size: int = 2500) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_text(encoding="utf-8", errors="replace")[-size:]
        return "(no log)"

    def stop(self) -> None:
        """End it with all it started; never raises."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(self._process.pid).children(recursive=True)
            end([psutil.Process(self._process.pid), *below])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process = None


def is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=25) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def end(processes: list[psutil.Process]) -> None:
    """Ask them to end, then kill; SGLang would sleep for five seconds before it ends."""
    for sign, patience_s in ((signal.SIGTERM, 1.5), (signal.SIGKILL, 5.0)):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(sign)
        _, processes = psutil.wait_procs(processes, timeout=patience_s)


@contextlib.contextmanager
def running(server: Server) -> Generator[Server]:
    """Started; ended afterwards, whatever happens."""
    server.start()
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
