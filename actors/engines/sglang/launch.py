"""A stock SGLang server as a child of the rollout actor: `<python> -m sglang.launch_server`, from start to end.

`LaunchedSglang` is a client (`engine.py`) that chooses port, key and environment of its own server. The server
listens on loopback, asks for a key that was made for it, and dies with the actor, however that ends. When it has ended,
or was silent for a minute, `until_lost` raises, and the actor is restarted with a new server.

`ServerProcess` is any server with its own process group and log, below a subreaper (`actors/subreaper.py`), which ends
the server when this process is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
import psutil

from ....core.config.servers import GroupKind, ServerShape
from ....core.device_memory import TagReport
from ....core.errors import ConfigError, EngineError, LaunchError, MyxaError, raised_as
from ....core.process import past_proxies
from ....core.protocols import EngineInfo
from ....core.refs import all_or_first_error, unwrapped_group
from ....transport.address import LOOPBACK, hold_port
from ...subreaper import SERVER
from .engine import SglangEngine, SglangOptions
from .server_args import MODULE, NO_NEEDS, SglangNeeds, check_sizes, command_line, guesses_by, tools_path
from .weight_routes import Routes, folder_routes

GRACE_S = 2.0
"""Between SIGINT and SIGKILL: a server has nothing to lose, and its actor has five seconds to end."""
CLOSE_S = 8.0
"""For the subreaper to end all that the server started, and then itself; it is killed after that."""
LOG_MODE = 0o600
"""Servers write their arguments into their log, keys included."""
LOADING: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Load weight begin"), "loads the weights"),
    (re.compile(r"Capture .*graph begin", re.IGNORECASE), "compiles kernels and captures CUDA graphs"),
    (re.compile(r"Application startup complete"), "warms up"),
)
"""What a line of SGLang's log says that it does now."""
CAPTURED = re.compile(r"Capturing batches.*?(\d+)/(\d+) \[")
LOOK_S = 1.0
"""Between two looks at the log of a server that loads."""
REFUSED_ARGUMENTS = "exit status 2"
"""How a program ends whose argument parser refuses its command line."""
TAIL_LINES = 12
TAIL_BYTES = 8192


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What to start; `name` is whom errors name. The log is appended to, and made readable for this user only."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    key: str = "sglang"
    """Of the run file: what its arguments are by."""


class ServerProcess:
    """A running server. Built by `start_server`."""

    def __init__(self, command: ServerCommand, process: Process, log_start: int) -> None:
        """`process`: the server's subreaper, also the leader of its group. `log_start`: where in its log its own words
        begin."""
        self._command, self._log_start = command, log_start
        self._process = process
        self.pid = process.pid

    async def until_ended(self) -> str:
        """Wait for its end; returns how it ended: "exit status 3", "signal SIGKILL"."""
        status = await self._process.wait()
        if status >= 0:
            return f"exit status {status}"
        if status == -signal.SIGKILL:  # perhaps the subreaper's own end, which leaves what the server has started
            self._signal(signal.SIGKILL)
        return f"signal {signal.Signals(-status).name}"

    async def tell_loading(self, tell: Callable[[str], None]) -> None:
        """Say what it does while it loads, by its log, until cancelled."""
        text, last_doing = "", ""
        with self._command.log_path.open("rb") as log:
            log.seek(self._log_start)
            while True:
                text += log.read().decode(errors="replace")
                doing = next((stage for pattern, stage in reversed(LOADING) if pattern.search(text)), "imports SGLang")
                counts = CAPTURED.findall(text)
                if counts and doing == LOADING[1][1]:
                    doing += f": {counts[-1][0]} of {counts[-1][1]}"
                if doing != last_doing:
                    last_doing = doing
                    tell(doing)
                await asyncio.sleep(LOOK_S)

    def last_lines(self) -> str:
        """The end of its log, indented; empty when it wrote nothing."""
        try:
            with self._command.log_path.open("rb") as log:
                log.seek(max(os.fstat(log.fileno()).st_size - TAIL_BYTES, 0))
                text = log.read().decode(errors="replace")
        except OSError as err:
            return f"\n    (its log cannot be read: {err.strerror})"
        lines = [line for line in text.splitlines() if line.strip()]
        return "".join(f"\n    {line[:500]}" for line in lines[-TAIL_LINES:])

    def death(self, end: str, doing: str) -> MyxaError:
        """What to raise when it ended on its own."""
        text = (
            f"{self._command.name}: its server (pid {self.pid}) ended {doing} with {end}; the last lines of its log:"
            f"{self.last_lines()}"
        )
        if end == REFUSED_ARGUMENTS:
            return ConfigError(text, remedy=f"mend [{self._command.key}]")
        return EngineError(text, remedy=f"see {self._command.log_path}")

    async def close(self) -> None:
        """SIGINT, then SIGKILL for all that it started. Never raises; a second call does nothing."""
        for number, limit_s in ((signal.SIGINT, GRACE_S), (signal.SIGTERM, CLOSE_S)):
            if self._process.returncode is None:
                self._process.send_signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self.until_ended()
                    return
        self._signal(signal.SIGKILL)
        await self.until_ended()

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


async def start_server(server_command: ServerCommand) -> ServerProcess:
    """Start it, below a subreaper. Raises LaunchError when there can be no log."""
    with raised_as(LaunchError, f"{server_command.name}: {server_command.log_path} cannot be made", OSError):
        server_command.log_path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(server_command.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, LOG_MODE)
    subreaper = ("-m", "myxa.actors.subreaper", str(os.getpid()), "0", SERVER)
    command = (sys.executable, *subreaper, *server_command.command)
    log_start = os.fstat(log).st_size
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=log, stderr=log, env=dict(server_command.env), start_new_session=True
        )
    finally:
        os.close(log)
    return ServerProcess(server_command, process, log_start)


CAUSE_S = 0.5
"""How long a server that does not answer has for being seen to have ended."""
DEFAULTS: Mapping[str, Any] = {"stream_interval": 32}
"""Set by myxa, may be set otherwise in `[sglang]`. Fewer, longer chunks: tokens are not read by people."""
NOT_FOR_SERVERS = frozenset({
    "MYXA_WORKER_SPEC", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "SGLANG_RETURN_ORIGINAL_LOGPROB",  # log-probs would be those at temperature 1
})  # fmt: skip
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_log = logging.getLogger("myxa.sglang")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangLaunch:
    """How the server is started."""

    python: str
    """Interpreter that has SGLang."""
    model_path: str
    table: Mapping[str, Any]
    """`[sglang]`."""
    env: Mapping[str, str]
    """The actor's own environment."""
    log_path: Path
    dtype: str
    seed: int
    num_devices: int
    """GPUs of this actor; they are those of CUDA_VISIBLE_DEVICES. 0: CPU."""
    max_running: int
    context_length: int = 0
    """0: the model's own."""
    kind: GroupKind = "regular"
    key: str = "sglang"
    """Of the run file: where `table` is."""
    first_device: int = 0
    """Number of its first GPU among those of CUDA_VISIBLE_DEVICES: servers that send each other their cache see each
    other's."""
    expects: tuple[TagReport, ...] | None = None
    """What it is going to hold, if its memory is to be taken back between steps; None: its memory is its own."""


class LaunchedSglang(SglangEngine):
    """A server and its client."""

    def __init__(self, launch: SglangLaunch, options: SglangOptions, routes: Routes = folder_routes) -> None:
        super().__init__("", options, routes, saves_memory=launch.expects is not None)
        self._launch = launch
        self._env = server_env(launch.env, launch.python, has_gpus=bool(launch.num_devices))
        if launch.kind != "regular":
            self._env = {**PAIR_ENV, **self._env}
        if launch.expects is not None:
            self._env = saver_env(self._env)
        self._server: ServerProcess | None = None
        self.on_loading: Callable[[str], None] = lambda doing: None
        """Told what the server does while it loads."""
        self._http.explain = self._death_or

    async def _connect(self) -> EngineInfo:
        """Start the server and wait until it serves. Raises ConfigError for arguments that the installed SGLang does
        not take, EngineError when it ends or does not answer in time, both with the last lines of its log."""
        launch = self._launch
        key = secrets.token_hex(32)  # it becomes a word of a command line, where one that begins with "-" is none
        with (
            tempfile.TemporaryDirectory(prefix="myxa-sglang-") as folder,
            hold_port() as held,
            hold_port() as second,
        ):
            port, place = int(held.getsockname()[1]), Path(folder)
            self.bootstrap_port = int(second.getsockname()[1]) if launch.kind == "prefill" else 0
            self._http.aim(f"http://{LOOPBACK}:{port}", key)
            arguments = command_line(server_values(launch, port, self._options.needs, self.bootstrap_port))
            keys = place / "keys.yaml"  # of a folder of this user alone: on the command line everybody could read them
            keys.write_bytes(orjson.dumps({"api-key": key, "admin-api-key": key}))  # JSON is YAML, which SGLang reads
            command = (launch.python, "-m", MODULE, *arguments, "--config", str(keys))
            env = hide_megatron(self._env, place)
            server = await start_server(ServerCommand(self._options.name, command, env, launch.log_path, launch.key))
            self._server = server
            _log.info("%s: its server is pid %d, log %s: %s", self._options.name, server.pid, launch.log_path, command)
            async with unwrapped_group() as group:
                watch = group.create_task(self._fail_when_ended(server, "while it was loading"))
                loading = group.create_task(server.tell_loading(self.on_loading))
                try:
                    info = await super()._connect()
                except EngineError as err:
                    raise EngineError(
                        f"{err.message}; the last lines of its log:{server.last_lines()}",
                        remedy=f"see {launch.log_path}; raise engine.start_s if it only needs longer",
                    ) from err
                watch.cancel()
                loading.cancel()
        return info

    async def _fail_when_ended(self, server: ServerProcess, doing: str) -> None:
        raise server.death(await server.until_ended(), doing)

    async def _death_or(self, error: EngineError) -> MyxaError:
        """Why the server does not answer: when it has ended, with the last lines of its log."""
        server = self._server
        if server is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CAUSE_S):
                    return server.death(await server.until_ended(), "while it served")
        return error

    async def until_lost(self) -> None:
        """Waits; raises EngineError as soon as the server ended, or was silent for too long."""
        server = self._server
        assert server is not None
        await all_or_first_error([self._fail_when_ended(server, "while it served"), super().until_lost()])

    async def close(self) -> None:
        """End the server and everything it started. Never raises."""
        server, self._server = self._server, None
        # At the same time: the client's last calls go to a server that may not answer, and which is ended anyway.
        await asyncio.gather(super().close(), *(process.close() for process in (server,) if process is not None))

    def memory_tags(self) -> tuple[TagReport, ...]:
        return super().memory_tags() if self._server is not None else self._launch.expects or ()

    def memory_pids(self) -> tuple[int, ...]:
        if self._server is not None:
            with suppress(psutil.Error):
                return tuple(process.pid for process in psutil.Process(self._server.pid).children(recursive=True))
        return ()


def server_values(
    launch: SglangLaunch, port: int, needs: SglangNeeds = NO_NEEDS, bootstrap_port: int = 0
) -> dict[str, Any]:
    """ServerArgs field -> value: what the user said, and what is myxa's. Raises ConfigError for sizes that do not fit
    the actor's GPUs."""
    our_values: dict[str, Any] = {
        "model_path": launch.model_path,
        "host": LOOPBACK,
        "port": port,
        "incremental_streaming_output": True,
        "dtype": launch.dtype,
        "random_seed": launch.seed,
        "max_running_requests": launch.max_running,
        **needs.own_arguments(),
    }
    our_values |= {"enable_memory_saver": True} if launch.expects is not None else {}
    our_values |= {"context_length": launch.context_length} if launch.context_length else {}
    our_values |= {} if launch.num_devices else {"device": "cpu"}
    our_values |= {"base_gpu_id": launch.first_device} if launch.first_device else {}
    our_values |= {"disaggregation_mode": launch.kind} if launch.kind != "regular" else {}
    our_values |= {"disaggregation_bootstrap_port": bootstrap_port} if bootstrap_port else {}
    values = {**DEFAULTS, **launch.table}
    if launch.expects is not None and guesses_by({**values, **our_values}) in ("layers", "model"):
        our_values["enable_draft_weights_cpu_backup"] = True  # no version brings all of them back
    return values | check_sizes(ServerShape(launch.kind, launch.key, values), launch.num_devices) | our_values


def server_env(base: Mapping[str, str], python: str, *, has_gpus: bool) -> dict[str, str]:
    """The server's environment: the actor's own, which holds the role's `env`, less what would mislead it.
    NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE must be what the trainer has: with unequal values the weight group cannot be
    formed. SGLang's memory saver does not go with expandable segments. A server warms up by requests to its own
    address, and ends where a proxy answers them."""
    env = {name: value for name, value in base.items() if name not in NOT_FOR_SERVERS}
    for name in ALLOCATOR:
        if "expandable_segments" in env.get(name, ""):
            del env[name]
    env |= past_proxies(env, LOOPBACK)
    env["PATH"] = tools_path(env, python)
    env.setdefault("NCCL_CUMEM_ENABLE", "0")
    env.setdefault("NCCL_NVLS_ENABLE", "0")
    if not has_gpus:
        env.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    return env


PAIR_ENV: Mapping[str, str] = {
    "SGLANG_HOST_IP": LOOPBACK,
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "3600",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "3600",
}
"""Of prefill and decode servers, unless set otherwise. By itself SGLang offers caches to the network, and gives up
requests that wait for five minutes: for room in a decode server, or through a pause. A server's end is noticed here."""
SAVER_ENV: Mapping[str, str] = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "NCCL_GRAPH_REGISTER": "0"}
"""Without the first, captured graphs keep their memory. Without the second, NCCL may register what captured collectives
of a server over several GPUs work on, and that memory leaves."""


def saver_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server whose memory is to be taken back. torch-memory-saver is preloaded and needs CUDA's
    runtime before Python can say where torch's own lies; if the loader does not find it, nothing is pausable."""
    folders = os.pathsep.join(filter(None, [env.get("LD_LIBRARY_PATH", ""), *_cuda_runtimes()]))
    return {**env, **SAVER_ENV, **({"LD_LIBRARY_PATH": folders} if folders else {})}


def hide_megatron(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment of a server that cannot import megatron-core; `folder` must last until it serves. SGLang's dumper
    looks for megatron.core in whatever environment it is in. Importing that takes 24 s on a fresh host, and turns
    torch-memory-saver, in the whole process, to a mode in which captured graphs are not pausable: the server would end
    while it captures. Where both are installed in one environment this is the way around that patches neither."""
    text = 'raise ImportError("hidden from SGLang: megatron.core switches the mode of torch-memory-saver")\n'
    (folder / "megatron.py").write_text(text, encoding="ascii")
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH", "")]))}


def _cuda_runtimes() -> list[str]:
    """Folders of pip's CUDA runtime in this interpreter's installation."""
    spec = find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    return sorted({str(file.parent) for root in roots for file in root.glob("*/lib/libcudart.so.*")})
