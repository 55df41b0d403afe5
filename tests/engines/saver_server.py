"""A stub that speaks SGLang's generation and its two memory routes, and ends where SGLang 0.5.17 ends: released while
anything runs, a tag released twice, a tag resumed that was not released, generated without weights or cache.

Token i after a context of n tokens is a function of n + i: a continuation that lost or doubled a token shows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

ALL = ("kv_cache", "weights", "cuda_graph")
USAGE = {"weight": 1.5, "kvcache": 4.0, "graph": {"decode": 0.5, "prefill": 0.25}}


def token(position: int) -> int:
    return 3 + position * 7 % 200


class SaverServer:
    """One server; `calls` is what it was asked, in order."""

    def __init__(self, *, saves: bool = True, every_s: float = 0.005, lingers_s: float = 0.0) -> None:
        """`lingers_s`: an aborted request's batch is still there so long after its stream ended."""
        self.saves = saves
        self.every_s = every_s
        self.lingers_s = lingers_s
        self.calls: list[tuple[str, Any]] = []
        self.off: set[str] = set()
        self.running: dict[str, asyncio.Event] = {}
        self.num_lingering = 0
        self.num_health = 0
        self.died = ""
        self.answers_late: float = 0.0
        self.fails_next = ""
        """Path that answers 500 once."""
        self.version = "3"

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        return app

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.died:
            return web.Response(status=503, text=self.died)
        path = request.path
        if path == "/health":
            self.num_health += 1
            self._need_everything("a health check generates")
            return web.Response()
        if path in ("/server_info", "/model_info"):
            return web.json_response(
                {"context_length": 512, "weight_version": self.version, "enable_memory_saver": self.saves}
                | {"internal_states": [{"memory_usage": USAGE}]}
            )
        body = await request.json()
        if path == "/generate":
            return await self._generate(request, body)
        self.calls.append((path, body.get("tags", body)))
        if self.fails_next == path:
            self.fails_next = ""
            return web.Response(status=500, text="Internal Server Error")
        await asyncio.sleep(self.answers_late)
        return self._control(path, body)

    def _control(self, path: str, body: dict[str, Any]) -> web.Response:
        if path == "/abort_request":
            for stop in self.running.values():
                stop.set()
        elif path == "/flush_cache":
            is_idle = not self.running and not self.num_lingering
            return web.Response(status=200 if is_idle else 400, text="flushed" if is_idle else "pending requests")
        elif path == "/release_memory_occupation":
            if self.running or self.num_lingering:
                return self._die("release_memory_occupation should be called only when server is idle")
            if self.off & set(body["tags"]):
                return self._die(f"torch_memory_saver: pause of {body['tags']}, paused are {self.off}")
            self.off |= set(body["tags"])
        elif path == "/resume_memory_occupation":
            if not set(body["tags"]) <= self.off:
                return self._die(f"KeyError: {set(body['tags']) - self.off}")
            self.off -= set(body["tags"])
        return web.json_response(None)

    def _die(self, why: str) -> web.Response:
        self.died = why
        return web.Response(status=500, text=why)

    def _need_everything(self, what: str) -> None:
        if self.off:
            self._die(f"{what} with {self.off} released: illegal memory access")

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self._need_everything("a request")
        stop = self.running[body["rid"]] = asyncio.Event()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first, limit = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        try:
            for number in range(limit):
                await asyncio.sleep(self.every_s)
                is_last = number + 1 == limit or stop.is_set()
                self._need_everything("a token")
                kind = {"type": "abort", "message": "Aborted"} if stop.is_set() else {"type": "length"}
                new = token(first + number)
                meta = {
                    "completion_tokens": number + 1,
                    "output_token_logprobs": [[-0.5, new, None]],
                    "weight_version": self.version,
                    "finish_reason": kind if is_last else None,
                }
                chunk = json.dumps({"output_ids": [new], "meta_info": meta})
                await response.write(f"data: {chunk}\n\n".encode())
                if is_last:
                    break
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.num_lingering += 1
            del self.running[body["rid"]]
            asyncio.get_running_loop().call_later(self.lingers_s, self._gone)
        return response

    def _gone(self) -> None:
        self.num_lingering -= 1

    def asked(self, *paths: str) -> list[tuple[str, Any]]:
        """The calls to these routes."""
        return [call for call in self.calls if call[0] in paths]


@asynccontextmanager
async def saver_server(**habits: Any) -> AsyncGenerator[tuple[SaverServer, str]]:
    """A running stub and its address."""
    stub = SaverServer(**habits)
    runner = web.AppRunner(stub.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield stub, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
