"""A stock SGLang server as a child of the rollout actor: `<python> -m sglang.launch_server`, from start to end.

Knows processes, ports, keys and the environment SGLang wants; generation and weights are the client's (`sglang.py`).
The server listens on loopback, asks for a key that was made for it, and dies with the actor, however that ends. Its
end is noticed at once, that it was stopped (SIGSTOP) after two seconds, silence of one that runs after a minute:
`until_lost` raises, the actor fails and is restarted with a new server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson
import psutil

from ...core.device_memory import MovedBytes, Tag, TagReport
from ...core.errors import ConfigError, EngineError, RequestRefused, WeightsRefused
from ...core.messages import WeightManifest
from ...core.protocols import Delta, EngineInfo, EngineTrace, GenerateRequest, PauseMode
from ...core.weight_channel import WeightProgress
from .server_process import ServerCommand, ServerProcess, start_server
from .sglang import SglangEngine
from .sglang_args import MODULE, ServerSchema, check_sizes, check_table, command_line
from .sglang_memory import SAVER_FIELDS, hide_megatron, saver_env
from .sglang_needs import NO_NEEDS, SglangNeeds
from .sglang_options import SglangOptions
from .sglang_schema import read_schema
from .stopped_process import until_stopped
from .weight_route import Routes, folder_routes

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
PORT_TRIES = 3
PORT_TAKEN = ("address already in use", "errno 98")
"""What a server says in its log when somebody took its port."""
CAUSE_S = 0.5
"""How long a server that does not answer has for being seen to have ended."""
DEFAULTS: Mapping[str, Any] = {"stream_interval": 32}
"""Set by myxa, may be set otherwise in `[sglang]`. Fewer, longer chunks: tokens are not read by people."""
NOT_FOR_SERVERS = frozenset({"MYXA_WORKER_SPEC", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"})
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
    expects: tuple[TagReport, ...] | None = None
    """What it is going to hold, if its memory is to be taken back between steps; None: its memory is its own."""

    @property
    def saves_memory(self) -> bool:
        """Whether it is started so that its memory can be taken back."""
        return self.expects is not None


class LaunchedSglang:
    """An `Engine`: the server and its client."""

    def __init__(self, launch: SglangLaunch, options: SglangOptions, routes: Routes = folder_routes) -> None:
        self._launch = launch
        self._options = options
        self._routes = routes
        self._env = server_env(launch.env, has_gpus=bool(launch.num_devices))
        if launch.saves_memory:
            self._env = saver_env(self._env)
        self._server: ServerProcess | None = None
        self._client: SglangEngine | None = None

    # -- life

    async def start(self) -> EngineInfo:
        """Start the server and wait until it serves.

        Raises ConfigError for arguments that the installed SGLang does not take, EngineError with the last lines of
        its log when it ends or does not answer in time.
        """
        if self._server is not None:
            raise EngineError(f"{self._options.name}: was started before", remedy="build a new one")
        schema = await read_schema(self._options.name, self._launch.python, self._env)
        check_table(self._launch.table, schema)
        for attempt in range(PORT_TRIES):
            try:
                return await self._start_once(schema)
            except _PortTaken as err:
                if attempt == PORT_TRIES - 1:
                    raise
                _log.warning("%s; another port is tried", err.message)
        raise AssertionError("unreachable")

    async def _start_once(self, schema: ServerSchema) -> EngineInfo:
        key = secrets.token_hex(32)  # it becomes a word of a command line, where one that begins with "-" is none
        with tempfile.TemporaryDirectory(prefix="myxa-sglang-") as place, socket.socket() as reserved:
            # Bound and not listening: nobody else is given this port, and the server may still listen on it, since
            # both sockets allow the address to be used again.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind((LOOPBACK, 0))
            port = int(reserved.getsockname()[1])
            try:
                return await self._serve_on(port, schema, key, Path(place))
            except BaseException:
                await self.close()
                raise

    async def _serve_on(self, port: int, schema: ServerSchema, key: str, place: Path) -> EngineInfo:
        """`place`: a folder that lasts until the server serves."""
        launch, name = self._launch, self._options.name
        key_file = _write_keys(key, place)
        words = command_line(server_values(launch, port, schema, self._options.needs), schema)
        command = (launch.python, "-m", MODULE, *words, "--config", str(key_file))
        env = hide_megatron(self._env, place) if launch.saves_memory else self._env
        server = await start_server(ServerCommand(name, command, env, launch.log_path))
        self._server = server
        _log.info("%s: SGLang %s is pid %d, log %s: %s", name, schema.version, server.pid, launch.log_path, command)
        options = replace(self._options, admin_key=key)
        client = SglangEngine(f"http://{LOOPBACK}:{port}", options, self._routes, saves_memory=launch.saves_memory)
        self._client = client
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._fail_when_ended(server, "while it was loading"))
                info = await self._start_client(client, server)
                watch.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return info

    async def _start_client(self, client: SglangEngine, server: ServerProcess) -> EngineInfo:
        try:
            return await client.start()
        except EngineError as err:
            raise EngineError(
                f"{err.message}; the last lines of its log:{server.last_lines()}",
                remedy=f"see {self._launch.log_path}; raise engine.start_s if it only needs longer",
            ) from err

    async def _fail_when_ended(self, server: ServerProcess, doing: str) -> None:
        how = await server.until_ended()
        death = server.death(how, doing)
        if any(word in death.message.lower() for word in PORT_TAKEN):
            raise _PortTaken(death.message, remedy=death.remedy)
        raise death

    async def _fail_when_stopped(self, server: ServerProcess) -> None:
        pid = await until_stopped(server.pid)
        raise EngineError(
            f"{self._options.name}: process {pid} of its server was stopped (SIGSTOP) and does nothing",
            remedy="its work goes on elsewhere; to look at a server that stands, attach a debugger",
        )

    async def until_lost(self) -> None:
        """Waits; raises EngineError as soon as the server ended, when it is stopped, or was silent for too long."""
        server, client = self._server, self._running()
        assert server is not None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fail_when_ended(server, "while it served"))
                group.create_task(self._fail_when_stopped(server))
                group.create_task(client.until_lost())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def close(self) -> None:
        """End the server and everything it started. Never raises."""
        client, self._client = self._client, None
        server, self._server = self._server, None
        # At the same time: the client has something to tell a server that may be deaf, and this one is ended anyway.
        await asyncio.gather(*(one.close() for one in (client, server) if one is not None))

    @property
    def pause_mode(self) -> PauseMode:
        """How running requests meet the next commit."""
        return self._options.pause_mode

    @pause_mode.setter
    def pause_mode(self, mode: PauseMode) -> None:
        self._options = replace(self._options, pause_mode=mode)
        if self._client is not None:
            self._client.pause_mode = mode

    def _running(self) -> SglangEngine:
        if self._client is None:
            raise EngineError(f"{self._options.name}: not started, or closed", remedy="await start() first")
        return self._client

    @property
    def server_pid(self) -> int:
        """Of the server's first process. Raises EngineError before `start`."""
        self._running()
        assert self._server is not None
        return self._server.pid

    # -- what the client does

    async def _ask(self, call: Awaitable[T]) -> T:
        """The client's answer. When the server ended meanwhile, that is the error, with the last lines of its log."""
        try:
            return await call
        except (RequestRefused, WeightsRefused):
            raise
        except EngineError as err:
            server = self._server
            if server is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CAUSE_S):
                        how = await server.until_ended()
                    raise server.death(how, "while it served") from err
            raise

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """See `core.protocols.Engine`."""
        return self._running().generate(request)

    async def abort(self, request_id: str | None = None) -> None:
        """See `core.protocols.Engine`."""
        await self._ask(self._running().abort(request_id))

    async def pause(self, mode: PauseMode) -> None:
        """See `core.protocols.Engine`."""
        await self._ask(self._running().pause(mode))

    async def resume(self) -> None:
        """See `core.protocols.Engine`."""
        await self._ask(self._running().resume())

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        """See `core.protocols.Engine`."""
        await self._ask(self._running().prepare_weights(manifest))

    async def commit_weights(self, version: int) -> None:
        """See `core.protocols.Engine`."""
        await self._ask(self._running().commit_weights(version))

    def weight_progress(self) -> WeightProgress:
        """See `core.protocols.TellsProgress`."""
        return self._running().weight_progress()

    async def info(self) -> EngineInfo:
        """See `core.protocols.Engine`."""
        return await self._ask(self._running().info())

    async def profile(self, duration_s: float) -> tuple[EngineTrace, ...]:
        """See `core.engine_profile.ProfilesItself`."""
        return await self._ask(self._running().profile(duration_s))

    # -- memory

    def memory_tags(self) -> tuple[TagReport, ...]:
        """See `core.protocols.ReleasesMemory`."""
        return self._launch.expects or () if self._client is None else self._client.memory_tags()

    def memory_pids(self) -> tuple[int, ...]:
        """The server and everything that it started."""
        if self._server is None:
            return ()
        with suppress(psutil.Error):
            children = psutil.Process(self._server.pid).children(recursive=True)
            return (self._server.pid, *(child.pid for child in children))
        return ()

    async def park(self, within_s: float) -> None:
        """See `core.protocols.ReleasesMemory`."""
        await self._ask(self._running().park(within_s))

    async def unpark(self) -> None:
        """See `core.protocols.ReleasesMemory`."""
        await self._ask(self._running().unpark())

    async def release_memory(self, tags: Collection[Tag]) -> MovedBytes:
        """See `core.protocols.ReleasesMemory`."""
        return await self._ask(self._running().release_memory(tags))

    async def restore_memory(self, tags: Collection[Tag]) -> MovedBytes:
        """See `core.protocols.ReleasesMemory`."""
        return await self._ask(self._running().restore_memory(tags))


class _PortTaken(EngineError):
    """Another process listens on the port that was meant for the server."""


def server_values(
    launch: SglangLaunch, port: int, schema: ServerSchema, needs: SglangNeeds = NO_NEEDS
) -> dict[str, Any]:
    """ServerArgs field -> value: what the user said, and what is myxa's.

    Raises ConfigError for sizes that do not fit the actor's GPUs and for a version of SGLang that is too old.
    """
    own: dict[str, Any] = {
        "model_path": launch.model_path,
        "host": LOOPBACK,
        "port": port,
        "skip_tokenizer_init": not needs.tokenizer,
        "incremental_streaming_output": True,
        "dtype": launch.dtype,
        "random_seed": launch.seed,
        "max_running_requests": launch.max_running,
    }
    own |= SAVER_FIELDS if launch.saves_memory else {}
    own |= {"context_length": launch.context_length} if launch.context_length else {}
    own |= {} if launch.num_devices else {"device": "cpu"}
    missing = sorted(set(own) - set(schema.options))
    if missing:
        raise ConfigError(
            f"SGLang {schema.version} in {launch.python} does not take {', '.join(missing)}",
            remedy="install SGLang 0.5.17 or later",
        )
    values = {key: value for key, value in DEFAULTS.items() if key in schema.options} | dict(launch.table)
    return values | check_sizes(values, launch.num_devices) | own


def server_env(base: Mapping[str, str], *, has_gpus: bool) -> dict[str, str]:
    """The server's environment: the actor's own, which holds the role's `env`, less what would mislead it.

    NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE must be what the trainer has: with unequal values the weight group cannot
    be formed. SGLang's memory saver does not go with expandable segments.
    """
    env = {name: value for name, value in base.items() if name not in NOT_FOR_SERVERS}
    for name in ALLOCATOR:
        if "expandable_segments" in env.get(name, ""):
            del env[name]
    env.setdefault("NCCL_CUMEM_ENABLE", "0")
    env.setdefault("NCCL_NVLS_ENABLE", "0")
    if not has_gpus:
        env.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    return env


def _write_keys(key: str, place: Path) -> Path:
    """A file that only this user can read: on the command line everybody could. JSON is YAML, which SGLang reads."""
    path = place / "keys.yaml"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(orjson.dumps({"api-key": key, "admin-api-key": key}))
    return path
