"""A model folder served over HTTP: the embedded engine, SGLang's routes and a socket, from start to end.

`myxa engine serve DIR` and the tests stand on this; it installs no signal handlers and prints nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from ...core.errors import ConfigError, EngineError
from ..http_guard import is_loopback
from ..models.chat_template import PlainText
from ..models.tokenizer import load_tokenizer, read_tokenizer
from .embedded.engine import EmbeddedEngine, EmbeddedOptions
from .engine_routes import EngineServer

HEAD_S = 10.0
"""Within which a connection must have sent the head of its first request."""
SHUTDOWN_S = 2.0
"""Grace for open connections when the server ends."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server that listens."""

    engine: EmbeddedEngine
    host: str
    port: int

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}:{self.port}"


@asynccontextmanager
async def serve(
    folder: str | Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    options: EmbeddedOptions | None = None,
    is_incremental: bool = False,
    key: str = "",
    access_log: logging.Logger | None = None,
) -> AsyncGenerator[Served, None]:
    """Serve a model folder inside the block; port 0 takes any free one. `key`: see `EngineServer`. `access_log` is told
    of every request once it is answered.

    Raises ModelError for a bad folder, EngineError when the engine cannot start or the port is taken, ConfigError for
    an address that other machines reach where there is no key.
    """
    if not key and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: other machines reach this address, and no key is asked for",
            remedy="name the variable that holds a key: --key-env NAME; or listen on 127.0.0.1",
        )
    engine = EmbeddedEngine(folder, options)
    runner: web.AppRunner | None = None
    ending: asyncio.Task[None] | None = None
    try:
        info = await engine.start()
        server = EngineServer(
            engine,
            load_tokenizer(folder, PlainText()),
            Path(folder),
            is_incremental=is_incremental,
            key=key,
            host=host,
            max_chars=info.context_length * _longest_token(folder),
        )
        # A client that goes away cancels its handler, which frees its rows.
        runner = web.AppRunner(
            server.app(), access_log=access_log, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
        )
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as err:
            raise EngineError(f"cannot listen on {host}:{port}: {err}", remedy="choose another port") from err
        ending = asyncio.get_running_loop().create_task(_end_silent(runner, server))
        yield Served(engine=engine, host=host, port=int(runner.addresses[0][1]))
    finally:
        if ending is not None:
            ending.cancel()
        await engine.close()
        if runner is not None:
            await runner.cleanup()


async def _end_silent(runner: web.AppRunner, server: EngineServer) -> None:
    """End connections that have not sent a whole head in time: each holds a file descriptor."""
    clock = asyncio.get_running_loop().time
    since: dict[Any, float] = {}
    while True:
        await asyncio.sleep(HEAD_S / 4)
        connections = [] if runner.server is None else runner.server.connections
        server.known.intersection_update(connections)
        since = {one: since.get(one, clock()) for one in connections if one not in server.known}
        for one, begun in since.items():
            if clock() - begun > HEAD_S:
                one.force_close()


def _longest_token(folder: str | Path) -> int:
    """Characters of the vocabulary's longest token."""
    vocabulary = read_tokenizer(folder).get_vocab(with_added_tokens=True)
    return max(map(len, vocabulary), default=1)


async def serve_engine(
    folder: str | Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    options: EmbeddedOptions | None = None,
    key: str = "",
    on_ready: Callable[[Served], None] | None = None,
) -> None:
    """Serve until cancelled; `on_ready` is told the address once requests are served. Errors are those of `serve`."""
    async with serve(folder, host, port, options=options, key=key) as served:
        if on_ready is not None:
            on_ready(served)
        await asyncio.Event().wait()
