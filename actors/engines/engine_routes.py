"""SGLang's HTTP routes (0.5.17 to 0.5.23) on an embedded engine, so that whatever drives SGLang can drive it.

Knows aiohttp, the wire format and one engine; `http_server.py` gives it a socket. Unlike SGLang it swaps weights
between two steps, so an update needs no pause; the order pause(in_place) -> update -> continue works on both. Bodies
are bounded, bad input is answered with 4xx and `{"error": {"message", "type", "code"}}`. There is no authentication:
bind it to loopback, or trust your net.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson
from aiohttp import web

from ...core.errors import EngineError, ModelError, MyxaError, RequestRefused
from ...core.messages import SamplingParams
from ...core.protocols import GenerateRequest, PauseMode
from ..models.tokenizer import FolderTokenizer
from .embedded.engine import EmbeddedEngine
from .generate_body import Call, parse_generate
from .generate_reply import Reply
from .sglang_wire import DATA, DONE

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 64 << 20
HEALTH_S = 20.0
"""Within which `/health_generate` must see a token."""


class PauseBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/pause_generation`."""

    mode: PauseMode = "abort"


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/abort_request`; as in SGLang, `rid` is a prefix."""

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
        self, engine: EmbeddedEngine, tokenizer: FolderTokenizer, folder: Path, *, is_incremental: bool = False
    ) -> None:
        """`is_incremental`: streams carry new tokens only (SGLang's --incremental-streaming-output)."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._folder = folder
        self._is_incremental = is_incremental
        self._is_paused = False
        self._live: dict[str, int] = {}
        """Request id inside the engine -> how many calls use it."""

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
        gets: dict[str, Handler] = {
            "/health": self._health,
            "/health_generate": self._health_generate,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/flush_cache": self._flush_cache,
        }
        posts: dict[str, Handler] = {
            "/generate": self._generate,
            "/flush_cache": self._flush_cache,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._relabel,
        }
        app.router.add_routes([web.get(path, handler) for path, handler in gets.items()])
        app.router.add_routes([web.post(path, handler) for path, handler in posts.items()])
        return app

    # -- generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        call = parse_generate(await request.read(), self._tokenizer.encode)
        version = (await self._engine.info()).version
        if call.is_stream:
            return await self._stream(request, call, version)
        replies = self._replies(call, is_incremental=False)
        await _all([self._fill(r, reply) for r, reply in zip(call.requests, replies, strict=True)])
        answers = [reply.answer(version, _now_s()) for reply in replies]
        return _json(answers if call.is_list else answers[0])

    def _replies(self, call: Call, *, is_incremental: bool) -> list[Reply]:
        tokenizer, skips = self._tokenizer, call.skips_special
        return [
            Reply(
                request,
                rid,
                decode=lambda ids: tokenizer.decode(ids, skip_special=skips),
                now_s=_now_s(),
                wants_logprobs=call.wants_logprobs,
                is_incremental=is_incremental,
            )
            for request, rid in zip(call.requests, call.rids, strict=True)
        ]

    async def _fill(
        self, request: GenerateRequest, reply: Reply, on_news: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        rid = request.request_id
        self._live[rid] = self._live.get(rid, 0) + 1
        try:
            async with aclosing(self._engine.generate(request)) as deltas:
                async for delta in deltas:
                    reply.add(delta)
                    if on_news is not None:
                        await on_news()
        finally:
            self._live[rid] -= 1
            if not self._live[rid]:
                del self._live[rid]

    async def _stream(self, request: web.Request, call: Call, version: int) -> web.StreamResponse:
        """Server-sent events; an error after the first byte is an event too, as in SGLang."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        replies = self._replies(call, is_incremental=self._is_incremental)

        async def one(index: int) -> None:
            async def say() -> None:
                answer = replies[index].answer(version, _now_s())
                await response.write(_event(answer | {"index": index} if call.is_list else answer))

            await self._fill(call.requests[index], replies[index], say)

        with suppress(ConnectionError):  # the client left; its rows are free
            try:
                await _all([one(i) for i in range(len(replies))])
            except MyxaError as err:
                await response.write(_event(_error_object(err)[1]))
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
        return _json(
            {
                "model_path": str(self._folder),
                "tokenizer_path": str(self._folder),
                "is_generation": True,
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
        return _json(
            {
                "kind": info.kind,
                "model_path": str(self._folder),
                "context_length": info.context_length,
                "vocab_size": info.vocab_size,
                "max_running_requests": info.max_running,
                "max_total_num_tokens": info.max_running * info.context_length,
                "incremental_streaming_output": self._is_incremental,
                "internal_states": [state],
            }
        )

    async def _flush_cache(self, request: web.Request) -> web.Response:
        """There is no cache that outlives its request, so it is always flushed."""
        return web.Response(text="Cache flushed.\n")

    # -- control

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _body(request, AbortBody)
        if body.abort_all:
            await self._engine.abort()
        elif body.rid:
            for rid in [r for r in self._live if r.startswith(body.rid)]:
                await self._engine.abort(rid)
        else:
            raise RequestRefused("/abort_request: neither rid nor abort_all", remedy="send one of them")
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        await self._engine.pause((await _body(request, PauseBody)).mode)
        self._is_paused = True
        return _json({"status": "ok", "message": "Generation paused successfully."})

    async def _continue(self, request: web.Request) -> web.Response:
        await self._engine.resume()
        self._is_paused = False
        return _json({"status": "ok", "message": "Generation continued successfully."})

    async def _update(self, request: web.Request) -> web.Response:
        body = await _body(request, UpdateBody)
        info = await self._engine.info()
        version = info.version if body.weight_version is None else _version(body.weight_version)
        if body.abort_all_requests:
            await self._engine.abort()
        try:
            await self._engine.prepare_folder(body.model_path, version)
            await self._engine.commit_weights(version)
        except (ModelError, EngineError) as err:
            return _json({"success": False, "message": str(err), "num_paused_requests": 0}, status=400)
        paused = info.running if self._is_paused else 0
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": paused})

    async def _relabel(self, request: web.Request) -> web.Response:
        body = await _body(request, VersionBody)
        version = _version(body.new_version)
        if body.abort_all_requests:
            await self._engine.abort()
        await self._engine.relabel(version)
        message = f"Weight version updated to {version}"
        return _json({"success": True, "message": message, "new_version": body.new_version})


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


def _version(text: str) -> int:
    try:
        return int(text)
    except ValueError as err:
        raise RequestRefused(f"weight version {text!r} is not a whole number", remedy="use 0, 1, 2, ...") from err


async def _body(request: web.Request, kind: type[T]) -> T:
    raw = await request.read()
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.MsgspecError as err:
        raise RequestRefused(f"{request.path}: {err}", remedy="see SGLang's documentation of this route") from err


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _event(value: object) -> bytes:
    return DATA + b" " + orjson.dumps(value) + b"\n\n"


def _error_object(err: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error: the caller's fault, or the engine is gone."""
    is_callers = isinstance(err, RequestRefused)
    status = 400 if is_callers else 503
    kind = "invalid_request_error" if is_callers else "engine_error"
    return status, {"error": {"message": str(err), "type": kind, "code": status}}


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as err:
        if err.status < 400:
            raise
        error = {"message": f"{request.method} {request.path}: {err.reason}", "type": "http_error", "code": err.status}
        return _json({"error": error}, status=err.status)
    except (MyxaError, TimeoutError) as err:
        status, body = _error_object(err)
        return _json(body, status=status)
