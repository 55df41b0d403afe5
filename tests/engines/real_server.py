"""A stock SGLang server as a process of this test run: its command, its start, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from tests.engines.contract import CONTEXT, MAX_RUNNING

STANDINS = Path(__file__).parent / "sglang_cpu" / "standins"
START_S = 300.0
END_S = 10.0
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STANDINS), "OMP_NUM_THREADS": "1"}
CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.05", "--max-total-tokens",
    "32768",
)  # fmt: skip
GPU_FLAGS = ("--attention-backend", "triton", "--mem-fraction-static", "0.1")
COMMON_FLAGS = (
    "--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-cuda-graph", "--skip-server-warmup",
    "--weight-version", "0", "--log-level", "warning",
)  # fmt: skip


class ServerDidNotStartError(Exception):
    """With the end of its log."""


@dataclass(frozen=True)
class RealServer:
    """One that answers."""

    url: str
    command: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it and its children at once, as a crash would."""
        end_group(self.process, signal.SIGKILL)


def command_of(python: str, model: Path, port: int, device: str, dtype: str, extra: Sequence[str]) -> list[str]:
    return [
        python, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", dtype, *(CPU_FLAGS if device == "cpu" else GPU_FLAGS), *COMMON_FLAGS,
        *(() if "--context-length" in extra else ("--context-length", str(CONTEXT))),
        *(() if "--max-running-requests" in extra else ("--max-running-requests", str(MAX_RUNNING))), *extra,
    ]  # fmt: skip


def environment_of(device: str) -> Mapping[str, str]:
    """CPU: the stand-ins come first on the path; GPU: as the caller has it."""
    return os.environ | CPU_ENVIRONMENT if device == "cpu" else os.environ


@asynccontextmanager
async def real_server(
    python: str, model: Path, log: Path, *, device: str = "cpu", dtype: str = "float32", extra: Sequence[str] = ()
) -> AsyncIterator[RealServer]:
    """A server that answers; nothing of it is left at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = command_of(python, model, port, device, dtype, extra)
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: ASYNC220 -- quick; a new session, so that the whole group can be ended
            command, stdout=out, stderr=subprocess.STDOUT, env=dict(environment_of(device)), start_new_session=True
        )
    server = RealServer(f"http://127.0.0.1:{port}", tuple(command), log, process)
    try:
        await until_healthy(server)
        yield server
    finally:
        end_group(process, signal.SIGTERM)
        with_patience = asyncio.get_running_loop().time() + END_S
        while process.poll() is None and asyncio.get_running_loop().time() < with_patience:
            await asyncio.sleep(0.1)
        end_group(process, signal.SIGKILL)
        process.wait()


async def until_healthy(server: RealServer) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        for _ in range(int(START_S)):
            if server.process.poll() is not None:
                break
            try:
                async with session.get(server.url + "/health") as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(1.0)
    tail = server.log.read_text(errors="replace")[-3000:]
    raise ServerDidNotStartError(f"{' '.join(server.command)}\nended with {server.process.poll()}:\n{tail}")


def end_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(
            process.pid, number
        )  # its leader is our own child, not yet waited for, so the number is still its own
    except ProcessLookupError:
        pass
