"""The fakes of an SGLang server.

`FakeSglang` speaks SGLang's routes in this process, or alone in a process of its own, and does what a test says. It
computes nothing: token i after a context of n tokens is a function of n + i, so a continuation that lost or doubled a
token shows. Its memory routes end the server where SGLang 0.5.17 ends: released while anything runs, a tag released
twice, a tag resumed that was not released, generation without weights or cache.

`STAND_IN` is a folder for PYTHONPATH: it makes `python -m sglang.launch_server` a server with SGLang's name, flags and
routes. It has the embedded engine inside, for runs whose tokens count, or a `FakeSglang` (`light=True`), which starts
in a fraction of the time.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

STAND_IN = Path(__file__).parent / "stand_in"
FOREVER_S = 600.0
USAGE = {"weight": 1.5, "kvcache": 4.0, "graph": {"decode": 0.5, "prefill": 0.25}}
"""What its memory holds, in GiB."""


def stand_in_environment(fault: str = "", *, light: bool = False, **more: str) -> dict[str, str]:
    """For a process that starts `python -m sglang.launch_server`; faults are described there."""
    path = os.pathsep.join(filter(None, (str(STAND_IN), os.environ.get("PYTHONPATH", ""))))
    is_light = {"STAND_IN_LIGHT": "1"} if light else {}
    return os.environ | {"PYTHONPATH": path, "STAND_IN_FAULT": fault} | is_light | more


@asynccontextmanager
async def serving(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0, log: logging.Logger | None = None
) -> AsyncIterator[str]:
    """The address of a server on this loop whose every request goes to `handle`. A client that leaves cancels it."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{anything:.*}", handle)
    runner = web.AppRunner(app, access_log=log, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class SglangRoutes:
    """SGLang's routes: `/some_route` is the method `_some_route(body)`, which returns JSON, or a whole answer."""

    key = ""
    """Must be sent as bearer, but for `/health`; empty: everybody may do everything."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"{}")
        if early := await self._before(request.path, body):
            return early
        if self.key and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        if request.path == "/generate":
            return await self._generate(request, body)
        answer: Callable[[Any], Any] = getattr(self, f"_{request.path[1:].replace('/', '_')}", self._other)
        found = answer(body)
        found = await found if asyncio.iscoroutine(found) else found
        return found if isinstance(found, web.Response) else web.json_response(found)

    async def _before(self, path: str, body: Any) -> web.Response | None:
        """What is answered whatever is asked."""

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        raise NotImplementedError

    def _other(self, body: Any) -> Any:
        return web.Response(status=404, text="Not Found")


ABORTED = {"type": "abort", "message": "Aborted", "status_code": 500}


def token(position: int) -> int:
    return 3 + position * 7 % 200


def experts_at(
    position: int, num_layers: int, num_dense: int, top_k: int, num_experts: int, server: int
) -> list[list[int]]:
    """Ids [layers, top_k] that server number `server` chose for the token there; zeros in layers without experts."""
    first = [position * 5 + layer * 3 + server * 7 for layer in range(num_layers)]
    routed = [[(one + k) % num_experts for k in range(top_k)] for one in first]
    return [[0] * top_k if layer < num_dense else row for layer, row in enumerate(routed)]


def chunk(ids: list[int], total: int, finish: Any = None, **meta: Any) -> bytes:
    """One event of a stream; `total`: tokens of the answer so far."""
    told = {"id": "r", "completion_tokens": total, "finish_reason": finish, "weight_version": "default"}
    told["output_token_logprobs"] = [[-1.0, i, None] for i in ids]
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": told | meta}).encode() + b"\n\n"


async def fetch_prompt(body: dict[str, Any], stop: asyncio.Event, every_s: float = 0.005) -> tuple[str, str]:
    """The version that read the prompt, and why it cannot be had, as a decode server learns it."""
    url = f"http://{body['bootstrap_host']}:{body['bootstrap_port']}/{body['bootstrap_room']}"
    async with aiohttp.ClientSession() as session:
        while not stop.is_set():
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return await answer.text(), ""
            except aiohttp.ClientError:
                return "", "KVTransferError: the prefill server is gone"
            await asyncio.sleep(every_s)
    return "", "Aborted"


class FakeSglang(SglangRoutes):
    """A server whose every answer the test decides."""

    def __init__(self, **habits: Any) -> None:
        """`habits`: attributes that begin otherwise."""
        self.url = ""
        self.version = "default"
        self.facts: dict[str, Any] = {"context_length": None, "max_running_requests": None}
        self.calls: list[tuple[str, Any]] = []
        """Paths and bodies, in order."""
        self.running: dict[str, asyncio.Event] = {}
        """Requests that generate, and what stops each."""
        self.chunks: list[bytes] | None = None
        """What is answered to every request; None: tokens by their position."""
        self.late: list[bytes] = []
        """What comes after the hold."""
        self.hold = asyncio.Event()
        self.hold.set()
        self.is_cut = False
        """Break the connection after the chunks instead of ending the stream."""
        self.tells_spans = False
        """With every chunk, which version its tokens are of."""
        self.experts: tuple[int, int, int, int, int] | None = None
        """Layers, those at the beginning without experts, top_k, experts, and which of several servers this is: it tells
        the experts of tokens (`experts_at`)."""
        self.every_s = 0.005
        self.lingers_s = 0.0
        """How long the batch of an ended request is still there."""
        self.num_lingering = 0
        self.loading = asyncio.Event()
        self.loading.set()
        """A weight update waits for it."""
        self.update_answer: tuple[int, dict[str, Any]] | None = None
        self.is_stubborn = False
        """Say yes to an update and go on with the old version."""
        self.is_paused = False
        self.is_deaf = False
        """Hear requests and answer none."""
        self.fails_next = ""
        """Path that answers 500 once."""
        self.off: set[str] = set()
        """Tags of memory that are released."""
        self.adapters: dict[str, str] = {}
        """Name -> folder of those that it holds."""
        self.named: list[str] = []
        """The adapters of requests that it knows no end of: they run, or their reader left, or they were aborted."""
        self.absent: tuple[str, ...] = ()
        """Paths that it does not know."""
        self.died = ""
        self.mode = ""
        """"prefill": it hands the first token of each room to whom asks `rooms` for it; "decode": it fetches that."""
        self.prompts: dict[int, tuple[str, asyncio.Event]] = {}
        """Of a prefill server: the version that read the prompt of a room, and whether it was fetched."""
        self.met: list[tuple[str, str]] = []
        """Of a decode server: the version that read a prompt, and its own as it had the cache."""
        for name, value in habits.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def asked(self, *paths: str) -> list[tuple[str, Any]]:
        """The calls to these routes; of the memory routes only the tags."""
        return [(path, body.get("tags", body)) for path, body in self.calls if path in paths]

    def paths(self, since: int = 0) -> list[str]:
        return [path for path, _ in self.calls[since:]]

    async def _before(self, path: str, body: Any) -> web.Response | None:
        self.calls.append((path, body))
        if self.is_deaf:
            await asyncio.sleep(FOREVER_S)
        if self.died:
            return web.Response(status=503, text=self.died)
        if path in self.absent:
            return web.Response(status=404, text="Not Found")
        if self.fails_next == path:
            self.fails_next = ""
            return web.Response(status=500, text="Internal Server Error")
        return None

    def _other(self, body: Any) -> Any:
        return self.facts | {"weight_version": self.version}

    async def _health(self, body: Any) -> Any:
        if self.is_paused:  # as SGLang: it is answered by generating a token
            await asyncio.sleep(FOREVER_S)
        self._need_everything("a health check generates")
        return web.Response()

    def _pause_generation(self, body: Any) -> Any:
        self.is_paused = True

    def _continue_generation(self, body: Any) -> Any:
        self.is_paused = False

    def _abort_request(self, body: Any) -> Any:
        for rid, stop in self.running.items():
            if body.get("abort_all") or rid.startswith(body["rid"]):
                stop.set()

    async def _update_weights_from_disk(self, body: Any) -> Any:
        await self.loading.wait()
        status, answer = self.update_answer or (200, {"success": True})
        if answer.get("success") and not self.is_stubborn:
            self.version = body["weight_version"]
        return web.json_response(answer, status=status)

    def _v1_models(self, body: Any) -> Any:
        return {"data": [{"id": "/models/base"}, *({"id": name} for name in self.adapters)]}

    def _load_lora_adapter(self, body: Any) -> Any:
        name, is_there = body["lora_name"], Path(body["lora_path"], "adapter_config.json").exists()
        if name in self.adapters or not is_there:
            return web.json_response({"success": False, "error_message": f"Failed to load {name}"}, status=400)
        self.adapters[name] = body["lora_path"]
        return {"success": True, "loaded_adapters": self.adapters}

    async def _unload_lora_adapter(self, body: Any) -> Any:
        """As SGLang: it waits for the requests that name it, and meanwhile neither loads nor unloads."""
        if body["lora_name"] not in self.adapters:
            return web.json_response({"success": False, "error_message": "does not exist"}, status=400)
        del self.adapters[body["lora_name"]]
        while body["lora_name"] in self.named:
            await asyncio.sleep(self.every_s)
        return {"success": True}

    def _flush_cache(self, body: Any) -> Any:
        is_idle = not self.running and not self.num_lingering
        return web.Response(status=200 if is_idle else 400, text="flushed" if is_idle else "pending requests")

    def _release_memory_occupation(self, body: Any) -> Any:
        tags = set(body["tags"])
        if self.running or self.num_lingering:
            return self._die("release_memory_occupation should be called only when server is idle")
        if self.off & tags:
            return self._die(f"torch_memory_saver: pause of {tags}, paused are {self.off}")
        self.off |= tags
        return None

    def _resume_memory_occupation(self, body: Any) -> Any:
        tags = set(body["tags"])
        if not tags <= self.off:
            return self._die(f"KeyError: {tags - self.off}")
        self.off -= tags
        return None

    def _die(self, why: str) -> web.Response:
        self.died = why
        return web.Response(status=500, text=why)

    def _need_everything(self, what: str) -> None:
        if self.off:
            self._die(f"{what} with {self.off} released: illegal memory access")

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.mode == "prefill":
            await self._read_prompt(response, body)
            return response
        if self.chunks is None:
            await self._count_up(response, body)
            return response
        for part in self.chunks:
            await response.write(part)
        await self.hold.wait()
        for part in self.late:
            await response.write(part)
        if self.is_cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    async def _read_prompt(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        stop = self.running[body["rid"]] = asyncio.Event()
        room, fetched = body["bootstrap_room"], asyncio.Event()
        try:
            await self._unpaused(stop)
            await self.hold.wait()
            self.prompts[room] = (self.version, fetched)
            while not (fetched.is_set() or stop.is_set()):
                await asyncio.sleep(self.every_s)
            finish = {"type": "length"} if fetched.is_set() else ABORTED
            await response.write(chunk([token(len(body["input_ids"]))], 1, finish, weight_version=self.version))
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.prompts.pop(room, None)
            del self.running[body["rid"]]

    async def rooms(self, request: web.Request) -> web.StreamResponse:
        """What a prefill server answers at its bootstrap port."""
        found = self.prompts.get(int(request.path.strip("/")))
        if found is None:
            return web.Response(status=404)
        found[1].set()
        return web.Response(text=found[0])

    async def _unpaused(self, stop: asyncio.Event) -> None:
        while self.is_paused and not stop.is_set():
            await asyncio.sleep(self.every_s)

    async def _fetch(self, body: dict[str, Any], stop: asyncio.Event) -> str:
        """Have the cache of the prompt; why not, if it cannot be had."""
        await self._unpaused(stop)
        version, why = await fetch_prompt(body, stop, self.every_s)
        if not why:
            self.met.append((version, self.version))
        return why

    async def _count_up(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        self._need_everything("a request")
        if (adapter := body.get("lora_path", "")) and adapter not in self.adapters:
            words = f"Got LoRA adapter that has never been loaded: {adapter}"
            await response.write(b'data: {"error": {"message": "%s", "code": 400}}\n\n' % words.encode())
            return
        self.named.append(adapter)  # of one whose connection is closed for ever
        stop = self.running[body["rid"]] = asyncio.Event()
        first, limit = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        try:
            if self.mode == "decode" and (why := await self._fetch(body, stop)):
                await response.write(chunk([], 0, ABORTED | {"message": why}, weight_version=self.version))
                return
            for number in range(1, limit + 1):
                await asyncio.sleep(self.every_s)
                if self.mode:
                    await self._unpaused(stop)
                self._need_everything("a token")
                kind = {"type": "abort", "message": "Aborted"} if stop.is_set() else {"type": "length"}
                is_last = number == limit or stop.is_set()
                new = [token(first + number - 1)]
                finish = kind if is_last else None
                spans = [{"version": self.version, "start": 0, "end": number}] if self.tells_spans else None
                booked = is_last and not (stop.is_set() and number == 1)  # else it was aborted in the queue
                more = self._routed(body, first + number - 1) if is_last else {}
                more |= {"prompt_tokens": first} if booked else {}
                await response.write(
                    chunk(new, number, finish, weight_version=self.version, weight_versions=spans, **more)
                )
                if is_last:
                    if booked:
                        self.named.remove(adapter)
                    break
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.num_lingering += 1
            del self.running[body["rid"]]
            asyncio.get_running_loop().call_later(self.lingers_s, self._gone)

    def _routed(self, body: dict[str, Any], end: int) -> dict[str, Any]:
        """As SGLang tells them: base64 of int32 [tokens, layers, top_k], of all tokens asked for that were fed in."""
        if self.experts is None or not body.get("return_routed_experts"):
            return {}
        start = body["routed_experts_start_len"]
        assert 0 <= start <= len(body["input_ids"]), "SGLang aborts such a request"
        rows = [experts_at(position, *self.experts) for position in range(start, end)]
        whole = np.asarray(rows, np.int32).reshape(end - start, self.experts[0], self.experts[2])
        return {"routed_experts": base64.b64encode(whole.tobytes()).decode()}

    def _gone(self) -> None:
        self.num_lingering -= 1


@asynccontextmanager
async def fake_sglang(**habits: Any) -> AsyncIterator[FakeSglang]:
    """One that runs on this loop."""
    fake = FakeSglang(**habits)
    async with serving(fake.handle) as fake.url:
        try:
            yield fake
        finally:
            fake.hold.set()
