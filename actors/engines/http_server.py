"""SGLang's HTTP routes (0.5.17 to 0.5.23) on an embedded engine, and a model folder served over HTTP from start to end.

Any client of SGLang can drive it. Unlike SGLang it swaps weights between two steps, so an update needs no pause; the
order pause(in_place) -> update -> continue works on both. Bodies are bounded; bad input is answered with 4xx and
`{"error": {"message", "type", "code"}}`. With a key, every route but health needs it: SGLang's `--api-key` and
`--admin-api-key` with the same value. `myxa engine serve DIR` and the tests use `serve`; it installs no signal handlers
and prints nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ...core.errors import ConfigError, EngineError, ModelError, MyxaError, RequestRefused
from ...core.messages import SamplingParams
from ...core.protocols import Delta, GenerateRequest, PauseMode
from ...core.samples import F32, I32
from ..http_guard import Head, HttpAccess, is_loopback
from ..models.chat_template import PlainText
from ..models.tokenizer import FolderTokenizer, load_tokenizer, read_tokenizer
from .embedded.engine import EmbeddedEngine, EmbeddedOptions
from .http_bodies import Call, Reply, json_response, parse_generate, read_all, read_body, version_of
from .http_weight_groups import WeightGroupRoutes
from .sglang.wire import DATA, DONE

OPEN = ("/health", "/metrics")
"""Beginnings of paths that never need a key."""
KINDS = {401: "unauthorized", 403: "forbidden", 415: "unsupported_media_type", 421: "misdirected_request"}


def guarded(key: str, host: str) -> Middleware:
    """A middleware that answers a request which may not be served with the reason."""
    door = HttpAccess(key, host=host, open_paths=OPEN)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = door.refusal(Head.of(request.method, request.headers), request.path)
        if refusal is None:
            return await handler(request)
        error = {"message": refusal.text, "type": KINDS[refusal.status], "code": refusal.status}
        return json_response({"error": error}, status=refusal.status)

    return check


_RouteHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 16 << 20
MAX_LIVE = 16384
"""Requests that run or wait; of one call there are `http_bodies.MAX_REQUESTS` at most."""
SMALL_BYTES = 16 << 10
"""Bodies up to this size are read on the loop; encoding a larger one would keep others waiting."""
READERS = 2
NO_IDS: I32 = np.zeros(0, dtype=np.int32)
NO_LOGPROBS: F32 = np.zeros(0, dtype=np.float32)
_log = logging.getLogger("myxa.embedded")
HEALTH_S = 20.0
"""Within which `/health_generate` must see a token."""


class PauseBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/pause_generation`."""

    mode: PauseMode = "abort"


class ContinueBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/continue_generation`; its only field is about a cache of GPUs."""


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/abort_request`. As in SGLang an unknown `rid` aborts nothing; a known one is a prefix too."""

    rid: str = ""
    abort_all: bool = False


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/update_weights_from_disk`; fields about caches and file formats are accepted and mean nothing here."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False


class VersionBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/update_weight_version`."""

    new_version: str
    abort_all_requests: bool = True


class EngineServer:
    """Routes of one engine."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        tokenizer: FolderTokenizer,
        folder: Path,
        *,
        is_incremental: bool = False,
        key: str = "",
        host: str = "",
        max_chars: int = 1 << 30,
    ) -> None:
        """`max_chars`: of one prompt's text; a longer one cannot fit into the context. `is_incremental`: streams carry
        new tokens only (SGLang's --incremental-streaming-output). `key`: must be sent as bearer; empty: programs
        of this machine may do everything. `host`: that is listened on."""
        self._guard = guarded(key, host)
        self._engine = engine
        self._tokenizer = tokenizer
        self._folder = folder
        self._weights_from = folder
        self._is_incremental = is_incremental
        self._is_paused = False
        self._max_chars = max_chars
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="read prompts")
        self._groups = WeightGroupRoutes(engine)
        self.known: set[Any] = set()
        """Connections that have sent a request."""
        self._live: list[tuple[str, str]] = []
        """Request id inside the engine and the caller's id of its prompt, of everything that runs or waits."""

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._known, self._guard, _errors_as_json])
        gets: dict[str, _RouteHandler] = {
            "/health": self._health,
            "/health_generate": self._health_generate,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/flush_cache": self._flush_cache,
        }
        posts: dict[str, _RouteHandler] = {
            "/generate": self._generate,
            "/flush_cache": self._flush_cache,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._relabel,
        }
        app.router.add_routes([web.get(path, handler) for path, handler in gets.items()])
        app.router.add_routes([web.post(path, handler) for path, handler in {**posts, **self._groups.posts()}.items()])
        app.on_cleanup.append(self._groups.close)
        app.on_cleanup.append(self._close)
        return app

    @web.middleware
    async def _known(self, request: web.Request, handler: _RouteHandler) -> web.StreamResponse:
        self.known.add(request.protocol)
        return await handler(request)

    async def _close(self, _: web.Application) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    # -- generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        call = await self._call(request)
        version = (await self._engine.info()).version
        if call.is_stream:
            return await self._stream(request, call, version)
        replies = self._replies(call, is_incremental=False)
        await _all([self._fill(call, i, reply) for i, reply in enumerate(replies)])
        answers = [reply.answer(version, _now_s()) for reply in replies]
        return json_response(answers if call.is_list else answers[0])

    async def _call(self, request: web.Request) -> Call:
        """The parsed body. Encoding a long text takes seconds, so it is done in a thread."""
        raw = await read_all(request)
        read = partial(parse_generate, raw, self._tokenizer.encode, self._max_chars)
        call = (
            read() if len(raw) <= SMALL_BYTES else await asyncio.get_running_loop().run_in_executor(self._readers, read)
        )
        if len(self._live) + len(call.requests) > MAX_LIVE:
            raise EngineError(
                f"{len(self._live)} requests run or wait, {MAX_LIVE} may", remedy="send this one again later"
            )
        return call

    def _replies(self, call: Call, *, is_incremental: bool) -> list[Reply]:
        tokenizer, skips = self._tokenizer, call.skips_special
        return [
            Reply(
                request,
                request.request_id,
                decode=lambda ids: tokenizer.decode(ids, skip_special=skips),
                now_s=_now_s(),
                wants_logprobs=call.wants_logprobs,
                trims_stop=call.trims_stop,
                is_incremental=is_incremental,
                text_of=self._text_of if call.wants_texts else None,
            )
            for request in call.requests
        ]

    def _text_of(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special=False)

    async def _fill(
        self, call: Call, index: int, reply: Reply, on_news: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        request = call.requests[index]
        me = (request.request_id, call.rids[index])
        self._live.append(me)
        try:
            start = call.score_from[index]
            if start >= 0 and not await self._score(request, start, reply):
                return
            async with aclosing(self._deltas(request)) as deltas:
                async for delta in deltas:
                    reply.add(delta)
                    if on_news is not None:
                        await on_news()
        finally:
            self._live.remove(me)

    async def _score(self, request: GenerateRequest, start: int, reply: Reply) -> bool:
        """The log-probs of the prompt's tokens after number `start`; False if it was aborted."""
        ids = request.input_ids
        found = await self._engine.score(request.request_id, ids, min(start + 1, len(ids)))
        if found.finish == "abort":
            reply.add(found)
            return False
        reply.scored(ids[start:].tolist(), found.logprobs)
        return True

    async def _deltas(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """What the engine says; it takes no request for no tokens, which SGLang answers with none."""
        if request.sampling.max_new_tokens == 0:
            yield Delta(output_ids=NO_IDS, logprobs=NO_LOGPROBS, versions=NO_IDS, finish="length")
            return
        async with aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def _stream(self, request: web.Request, call: Call, version: int) -> web.StreamResponse:
        """Server-sent events; an error after the first byte is an event too, as in SGLang."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        replies = self._replies(call, is_incremental=self._is_incremental)

        async def one(index: int) -> None:
            async def say() -> None:
                answer = replies[index].answer(version, _now_s())
                await response.write(_event(answer | {"index": index} if call.is_list else answer))

            await self._fill(call, index, replies[index], say)

        with suppress(ConnectionError):  # the client left; its rows are free
            try:
                await _all([one(i) for i in range(len(replies))])
            except MyxaError as err:
                _, body = _error_object(err)
                body["error"]["retryable"] = False
                await response.write(_event(body))
            await response.write(DATA + b" " + DONE + b"\n\n")
            await response.write_eof()
        return response

    # -- questions

    async def _health(self, request: web.Request) -> web.Response:
        await self._engine.info()
        return web.Response()

    async def _health_generate(self, request: web.Request) -> web.Response:
        """A token is generated, unless generation is paused on purpose."""
        if not self._is_paused:
            probe = GenerateRequest(
                request_id=f"HEALTH_CHECK_{id(request)}",
                input_ids=np.zeros(1, dtype=np.int32),
                sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            )
            async with asyncio.timeout(HEALTH_S), aclosing(self._engine.generate(probe)) as deltas:
                async for _ in deltas:
                    continue
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        info, config = await self._engine.info(), self._engine.config
        return json_response(
            {
                "model_path": str(self._weights_from),
                "tokenizer_path": str(self._folder),
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": str(info.version),
                "model_type": config.model_type,
                "architectures": config.source.get("architectures"),
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        info = await self._engine.info()
        state = {
            "num_running_reqs": info.running,
            "num_waiting_reqs": info.waiting,
            "weight_version": str(info.version),
            "is_paused": self._is_paused,
        }
        return json_response(
            {
                "kind": info.kind,
                "model_path": str(self._folder),
                "context_length": info.context_length,
                "vocab_size": info.vocab_size,
                "max_running_requests": info.max_running,
                "max_total_num_tokens": info.max_running * info.context_length,
                "incremental_streaming_output": self._is_incremental,
                "enable_deterministic_inference": True,
                "min_p_with_seeds": True,
                "internal_states": [state],
            }
        )

    async def _flush_cache(self, request: web.Request) -> web.Response:
        """There is no cache that outlives its request; with requests about, SGLang refuses."""
        info = await self._engine.info()
        if info.running or info.waiting:
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\n")

    # -- control

    async def _abort(self, request: web.Request) -> web.Response:
        body = await read_body(request, AbortBody)
        if body.abort_all:
            await self._engine.abort()
        elif any(body.rid in me for me in self._live):
            for rid in [rid for rid, _ in self._live if rid.startswith(body.rid)]:
                await self._engine.abort(rid)
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        await self._engine.pause((await read_body(request, PauseBody)).mode)
        self._is_paused = True
        return json_response({"status": "ok", "message": "Generation paused successfully."})

    async def _continue(self, request: web.Request) -> web.Response:
        await read_body(request, ContinueBody)
        await self._engine.resume()
        self._is_paused = False
        return json_response({"status": "ok", "message": "Generation continued successfully."})

    async def _update(self, request: web.Request) -> web.Response:
        body = await read_body(request, UpdateBody)
        info = await self._engine.info()
        version = info.version if body.weight_version is None else version_of(body.weight_version)
        if body.abort_all_requests:
            await self._engine.abort()
        try:
            await self._engine.prepare_folder(body.model_path, version)
            await self._engine.commit_weights(version)
        except (ModelError, EngineError) as err:
            return json_response({"success": False, "message": str(err), "num_paused_requests": 0}, status=400)
        self._weights_from = Path(body.model_path)
        paused = info.running if self._is_paused else 0
        label = "" if body.weight_version is None else f" Weight version updated to {body.weight_version}."
        message = f"Succeeded to update model weights.{label}"
        return json_response({"success": True, "message": message, "num_paused_requests": paused})

    async def _relabel(self, request: web.Request) -> web.Response:
        body = await read_body(request, VersionBody)
        version = version_of(body.new_version)
        if body.abort_all_requests:
            await self._engine.abort()
        if not await self._groups.serve_news(version):
            await self._engine.relabel(version)
        message = f"Weight version updated to {version}"
        return json_response({"success": True, "message": message, "new_version": body.new_version})


async def _all(jobs: list[Coroutine[Any, Any, None]]) -> None:
    """Run side by side; the first failure ends the others (their rows are freed) and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _event(value: object) -> bytes:
    return DATA + b" " + orjson.dumps(value) + b"\n\n"


def _error_object(err: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error: the caller's fault, or the engine is gone."""
    is_callers = isinstance(err, RequestRefused)
    status = 400 if is_callers else 503
    kind = "invalid_request_error" if is_callers else "engine_error"
    return status, {"error": {"message": str(err), "type": kind, "code": status}}


@web.middleware
async def _errors_as_json(request: web.Request, handler: _RouteHandler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as err:
        if err.status < 400:
            raise
        error = {"message": f"{request.method} {request.path}: {err.reason}", "type": "http_error", "code": err.status}
        return json_response({"detail": err.reason, "error": error}, status=err.status)
    except (MyxaError, TimeoutError) as err:
        status, body = _error_object(err)
        return json_response(body, status=status)
    except Exception as err:  # noqa: BLE001 -- the caller learns of it, and the log has the place
        _log.exception("%s %s failed", request.method, request.path)
        error = {"message": f"{request.path}: {type(err).__name__}: {err}", "type": "engine_error", "code": 500}
        return json_response({"error": error}, status=500)


HEAD_S = 10.0
"""Within which a connection must have sent the head of its first request."""
SHUTDOWN_S = 2.0
"""Grace for open connections when the server ends."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
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
) -> AsyncGenerator[ServedEngine, None]:
    """Serve a model folder inside the block; port 0 takes any free one. `key`: see `EngineServer`. `access_log` gets
    every request once it is answered.

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
        yield ServedEngine(engine=engine, host=host, port=int(runner.addresses[0][1]))
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
    on_ready: Callable[[ServedEngine], None] | None = None,
) -> None:
    """Serve until cancelled; `on_ready` gets the address once requests are served. Errors are those of `serve`."""
    async with serve(folder, host, port, options=options, key=key) as served:
        if on_ready is not None:
            on_ready(served)
        await asyncio.Event().wait()
