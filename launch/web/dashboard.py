"""The dashboard's web server: pages, the run's state, which a page asks for every second, and its verbs. Loopback only.

`/api/verbs/<verb>` passes a request on to the run's control socket and its answer
back: GET to see, POST to change. It asks the run only while a page asks. `DashboardGuard` judges each request
by its headers: host, origin and site as `actors/http_guard.py` does, and a proof that it knows the secret of the URL it
printed. A request that changes the run must carry the secret itself in a header: cookies are shared by all ports of
a host, and the dashboard's cookie only opens what shows. `run_dashboard` serves one inside the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from aiohttp import web

from ...actors.http_client import stream_timeout
from ...actors.http_guard import Head, Refusal, elsewhere, same
from ...core.errors import ConfigError, LaunchError, MyxaError
from ..control.client import ControlNote
from ..control.server import encode, error_answer
from ..control.verbs import HOST as CONTROL_HOST
from ..feed import Feed
from ..views.compare import runs_of
from ..views.page_data import past_table, state_table
from ..views.report import SCRIPTS, STYLES, page_file
from ..views.run_files import SampleQuery, load_run, read_samples

TOKEN_HEADER = "X-Myxa-Token"
SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class PageRequest(Head):
    """What is judged of a request to the dashboard."""

    query_token: str = ""
    cookie: str = ""
    header_token: str = ""


class DashboardGuard:
    """Judges requests by one secret."""

    def __init__(self, token: str = "", *, may_operate: bool = False) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self.may_operate = may_operate
        self.cookie = hashlib.blake2b(b"view", key=self.token.encode()[:64], digest_size=32).hexdigest()
        """Opens the pages that show, and does not reveal the secret."""

    def refusal(self, ask: PageRequest) -> Refusal | None:
        """Why this request is not served; None: it is."""
        if refused := elsewhere(ask, is_visit=ask.method == "GET" and ask.fetch_mode == "navigate"):
            return refused
        unknown = Refusal(401, "open the URL that was printed: it holds the secret")
        if ask.method in ("GET", "HEAD"):
            return None if same(ask.query_token, self.token) or same(ask.cookie, self.cookie) else unknown
        if not self.may_operate:
            return Refusal(403, "this dashboard only shows: start it with --operate to change the run here")
        if ask.method != "POST":
            return Refusal(405, "only POST changes anything")
        return None if same(ask.header_token, self.token) else unknown


HOST = "127.0.0.1"
JSON = {"Content-Type": "application/json"}
LOOK_EVERY_S = 1.0
CHARTS_EVERY_S = 2.0
MAX_ASKS = 8
ASK_S = 60.0
MAX_BODY_BYTES = 64 * 1024
MAX_KEPT_GROUPS = 200
"""Of samples.jsonl, which have no tokens."""
CLOSE_S = 2.0
TYPES: Mapping[str, str] = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
ASSETS = (*STYLES, *SCRIPTS, "icon.svg")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """One dashboard of one run."""

    def __init__(self, feed: Feed, guard: DashboardGuard) -> None:
        self._feed = feed
        self._guard = guard
        self._port = 0
        self._state: bytes = b""
        self._charts: bytes = b""
        self._charts_of = -1
        self._charts_due_s = 0.0
        self._looked_s = float("-inf")
        self._looking = asyncio.Lock()
        # Not the loop's own threads: in the launcher, the verbs that are asked for need those for their answers.
        self._looker = ThreadPoolExecutor(1, thread_name_prefix="dashboard-look")
        self._num_asks = 0

    @property
    def url(self) -> str:
        """To be opened; it holds the secret."""
        return f"http://{HOST}:{self._port}/?token={self._guard.token}"

    @contextlib.asynccontextmanager
    async def serving(self, port: int) -> AsyncGenerator[str]:
        """Serve until the block ends; gives the URL. Raises ConfigError if the port is taken."""
        app = web.Application(middlewares=[self._headers, self._guarded], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/assets/{name}", self._asset),
                web.get("/api/state", self._now),
                web.get("/api/samples", self._samples),
                web.get("/api/runs", self._runs),
                web.get("/api/run", self._run),
                web.get("/api/verbs/{verb}", self._verb),
                web.post("/api/verbs/{verb}", self._verb),
            ]
        )
        runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_S, handler_cancellation=True
        )
        await runner.setup()
        try:
            link = _listening(port)
            self._port = link.getsockname()[1]
            await web.SockSite(runner, link).start()
            yield self.url
        finally:
            self._feed.close()
            await runner.cleanup()
            self._looker.shutdown(wait=False, cancel_futures=True)

    def _take_look(self) -> None:
        view = self._feed.look()
        past = self._feed.past
        self._state = orjson.dumps(state_table(view, past, may_operate=self._may_operate), default=str)
        began_s = time.monotonic()
        if self._charts_of != past.generation and began_s >= self._charts_due_s:
            self._charts = orjson.dumps(past_table(past), default=str)
            self._charts_of = past.generation
            # A table of a long run is large: making it takes at most a tenth of the time.
            self._charts_due_s = began_s + max(CHARTS_EVERY_S, 10 * (time.monotonic() - began_s))

    @property
    def _may_operate(self) -> bool:
        return self._guard.may_operate and self._feed.note is not None

    async def _page(self, request: web.Request) -> web.Response:
        answer = web.Response(body=page_file("index.html"), content_type="text/html", charset="utf-8")
        if "token" in request.query:
            answer.set_cookie(self._cookie, self._guard.cookie, httponly=True, samesite="Strict", path="/")
        return answer

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in ASSETS:
            raise web.HTTPNotFound
        return web.Response(body=page_file(name), content_type=TYPES[name.rpartition(".")[2]], charset="utf-8")

    async def _now(self, request: web.Request) -> web.Response:
        """The run's state, at most a second old; its history, too, if it is not the one that the page has `seen`."""
        async with self._looking:
            if time.monotonic() >= self._looked_s + LOOK_EVERY_S:
                await asyncio.get_running_loop().run_in_executor(self._looker, self._take_look)
                self._looked_s = time.monotonic()
        is_known = request.query.get("seen") == str(self._charts_of)
        history = b"null" if is_known else self._charts
        body = b'{"generation":%d,"state":%b,"history":%b}' % (self._charts_of, self._state, history)
        return web.Response(body=body, content_type="application/json")

    async def _samples(self, request: web.Request) -> web.Response:
        asked = request.query
        num = int(asked.get("num_groups", "")[:9]) if asked.get("num_groups", "").isdecimal() else 4
        step = int(asked.get("step", "")[:9]) if asked.get("step", "").isdecimal() else -1
        kinds: dict[str, bool | None] = {"held-out": True, "true": True, "1": True, "all": None}
        held_out = None if "prompt" in asked else kinds.get(asked.get("held_out", ""), False)
        wanted = SampleQuery(step, held_out, search=asked.get("search", ""), prompt=asked.get("prompt", ""))
        read = partial(read_samples, self._feed.run_dir, wanted, min(num, MAX_KEPT_GROUPS))
        return await self._read(lambda: {"groups": read()})

    async def _runs(self, request: web.Request) -> web.Response:
        return await self._read(lambda: [asdict(run) for run in runs_of(self._feed.run_dir.parent)])

    async def _run(self, request: web.Request) -> web.Response:
        name, folder = request.query.get("name", ""), self._feed.run_dir.parent

        def past() -> Any:
            known = {run.name for run in runs_of(folder)}
            return past_table(load_run(folder / name)) if name in known else None

        return await self._read(past)

    async def _read(self, read: Callable[[], Any]) -> web.Response:
        with self._asking():
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._looker, read)
            except MyxaError as error:
                return _answer(409, {"error": error_answer(error)})
        if found is None:
            raise web.HTTPNotFound
        return web.Response(body=orjson.dumps(found, default=str), content_type="application/json")

    @contextlib.contextmanager
    def _asking(self) -> Generator[None]:
        if self._num_asks >= MAX_ASKS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_ASKS} questions wait for the run's answers: try again")
        self._num_asks += 1
        try:
            yield
        finally:
            self._num_asks -= 1

    async def _verb(self, request: web.Request) -> web.Response:
        """Pass the request on to the run's own socket, which checks it, and its answer back."""
        if request.method == "POST" and request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="send JSON")
        verb, pairs = request.match_info["verb"], [pair for pair in request.query.items() if pair[0] != "token"]
        if self._feed.note is None:
            over = LaunchError("the run is over", remedy="`myxa report RUN` shows how it went")
            return _answer(409, {"error": error_answer(over)})
        with self._asking():
            try:
                return await self._passed_on(self._feed.note, request, verb, pairs)
            except (OSError, aiohttp.ClientError) as error:
                gone = LaunchError(f"the run does not answer: {error}", remedy="`myxa report RUN` shows how it ended")
                return _answer(503, {"error": error_answer(gone)})
            finally:
                if request.method == "POST":
                    self._feed.wake()

    async def _passed_on(
        self, note: ControlNote, request: web.Request, verb: str, pairs: list[tuple[str, str]]
    ) -> web.Response:
        url = f"http://{CONTROL_HOST}/{quote(verb, safe='')}"
        connector = aiohttp.UnixConnector(note.control)
        async with aiohttp.ClientSession(connector=connector, timeout=stream_timeout()) as session:
            asked = session.request(request.method, url, params=pairs, data=await request.read() or None, headers=JSON)
            async with asyncio.timeout(ASK_S), asked as answer:
                body = await answer.read()
                return web.Response(status=answer.status, body=body, content_type=answer.content_type)

    @property
    def _cookie(self) -> str:
        """Cookies are shared by all ports of a host: each dashboard has its own."""
        return f"myxa-{self._port}"

    @web.middleware
    async def _headers(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            answer = await handler(request)
        except web.HTTPException as refusal:
            refusal.headers.update(SECURITY_HEADERS)
            raise
        answer.headers.update(SECURITY_HEADERS)
        return answer

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        head = Head.of(request.method, request.headers)
        ask = PageRequest(
            **asdict(head),
            query_token=request.query.get("token", ""),
            cookie=request.cookies.get(self._cookie, ""),
            header_token=request.headers.get(TOKEN_HEADER, ""),
        )
        refusal = self._guard.refusal(ask)
        if refusal is not None:
            return web.Response(status=refusal.status, text=refusal.text + "\n")
        return await handler(request)


def _answer(status: int, answer: Any) -> web.Response:
    return web.Response(status=status, body=encode(answer), content_type="application/json")


def _listening(port: int) -> socket.socket:
    link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        link.bind((HOST, port))
        link.listen(64)
    except (OSError, OverflowError) as error:  # a number that is no port overflows
        link.close()
        raise ConfigError(
            f"the dashboard cannot listen on {HOST}:{port}: {error}",
            remedy="choose another port, or 0 for any free one",
        ) from error
    link.setblocking(False)
    return link


URL_FILE = "dashboard.url"
"""In the run directory, for its owner's eyes only: the URL holds the secret."""


@contextlib.asynccontextmanager
async def run_dashboard(note: ControlNote, port: int) -> AsyncGenerator[str]:
    """Serves the read-only dashboard of a run inside its own launcher; gives its URL. Raises ConfigError if the port is
    taken."""
    path = Path(note.run_dir) / URL_FILE
    async with Dashboard(Feed(Path(note.run_dir), note), DashboardGuard()).serving(port) as url:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # a leftover may have been made with other rights
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{url}\n")
        try:
            yield url
        finally:
            path.unlink(missing_ok=True)
