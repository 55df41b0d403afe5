"""The dashboard's web server: pages, live state by server-sent events and, with `--operate`, knobs. Loopback only.

It asks the run only while a page is open. `DashboardGuard` judges each request by its headers: host, origin and site
as `actors/http_guard.py` does, and a proof that it knows the secret of the printed URL. A request that changes the run
must carry the secret itself in a header: cookies are shared by all ports of a host, and the dashboard's cookie only
opens what shows. `run_dashboard` serves a read-only dashboard inside the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import orjson
from aiohttp import web

from ...actors.http_guard import Head, Refusal, elsewhere, same
from ...core.errors import ConfigError, MyxaError
from ..control.client import ControlNote
from ..tui.feed import Feed
from ..views.compare import runs_of
from ..views.page_data import past_table, state_table
from ..views.report import page_file
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
"""Of every answer."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What is judged of a request."""

    method: str
    host: str
    query_token: str = ""
    cookie: str = ""
    header_token: str = ""
    origin: str = ""
    fetch_site: str = ""
    fetch_mode: str = ""


class DashboardGuard:
    """Judges requests by one secret."""

    def __init__(self, token: str = "", *, may_operate: bool = False) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self.may_operate = may_operate
        self.cookie = hashlib.blake2b(b"view", key=self.token.encode()[:64], digest_size=32).hexdigest()
        """Opens the pages that show, and does not reveal the secret."""

    def refusal(self, ask: PageRequest) -> Refusal | None:
        """Why this request is not served; None: it is."""
        is_visit = ask.method == "GET" and ask.fetch_mode == "navigate"
        head = Head(ask.method, ask.host, ask.origin, ask.fetch_site, ask.fetch_mode)
        if refused := elsewhere(head, is_visit=is_visit):
            return refused
        if ask.method in ("GET", "HEAD"):
            is_known = same(ask.query_token, self.token) or same(ask.cookie, self.cookie)
            return None if is_known else Refusal(401, "open the URL that was printed: it holds the secret")
        return self._refusal_to_operate(ask)

    def _refusal_to_operate(self, ask: PageRequest) -> Refusal | None:
        if not self.may_operate:
            return Refusal(403, "this dashboard only shows: start it with --operate to turn knobs here")
        if ask.method != "POST":
            return Refusal(405, "only POST changes anything")
        if not same(ask.header_token, self.token):
            return Refusal(401, "open the URL that was printed: it holds the secret")
        return None


HOST = "127.0.0.1"
LOOK_EVERY_S = 1.0
CHARTS_EVERY_S = 2.0
KEEP_ALIVE_S = 15.0
MAX_WATCHERS = 16
MAX_ASKS = 8
"""Questions of pages to the run at a time."""
ASK_S = 60.0
MAX_BODY_BYTES = 64 * 1024
MAX_GROUPS = 16
MAX_KEPT_GROUPS = 200
"""Of samples.jsonl, which have no tokens."""
CLOSE_S = 2.0
ASSETS = {
    "uPlot.min.css": "text/css",
    "style.css": "text/css",
    "uPlot.iife.min.js": "text/javascript",
    "charts.js": "text/javascript",
    "samples.js": "text/javascript",
    "app.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
OPERATE_VERBS = ("set", "undo", "pause", "resume", "step")
"""All that the page can do to a run, and only with `--operate`."""

_RESERVED = frozenset({"verb", "timeout_s", "self"})
"""Names of the client's own parameters, which no verb has."""

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
        self._changed = asyncio.Condition()
        self._num_looks = 0
        self._num_watchers = 0
        self._wanted_s = float("-inf")
        self._looking = asyncio.Lock()
        self._is_closing = False
        # Not the loop's own threads: in the launcher, the verbs that are asked for need those for their answers.
        self._looker = ThreadPoolExecutor(1, thread_name_prefix="dashboard-look")
        self._askers = ThreadPoolExecutor(MAX_ASKS, thread_name_prefix="dashboard-ask")
        self._asks: set[asyncio.Future[Any]] = set()

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
                web.get("/api/state", self._once),
                web.get("/api/live", self._live),
                web.get("/api/view/samples", self._samples),
                web.get("/api/runs", self._runs),
                web.get("/api/run", self._run),
                web.post("/api/operate/{verb}", self._operate),
            ]
        )
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_S)
        await runner.setup()
        look = None
        try:
            link = _listening(port)
            self._port = link.getsockname()[1]
            await web.SockSite(runner, link).start()
            look = asyncio.get_running_loop().create_task(self._look_forever())
            yield self.url
        finally:
            self._is_closing = True
            self._feed.close()
            async with self._changed:
                self._changed.notify_all()
            if look is not None:
                look.cancel()
                await asyncio.gather(look, return_exceptions=True)
            await runner.cleanup()
            for asking in list(self._asks):
                asking.cancel()  # its thread ends when the run answers, or does not in time
            self._looker.shutdown(wait=False, cancel_futures=True)
            self._askers.shutdown(wait=False, cancel_futures=True)

    # -- looking -----------------------------------------------------------------------------------------------

    async def _look_forever(self) -> None:
        while True:
            started_s = time.monotonic()
            if self._num_watchers or started_s - self._wanted_s < KEEP_ALIVE_S:
                await self._look()
            await asyncio.sleep(max(0.05, LOOK_EVERY_S - (time.monotonic() - started_s)))

    async def _look(self) -> None:
        async with self._looking:
            await asyncio.get_running_loop().run_in_executor(self._looker, self._take_look)
        async with self._changed:
            self._num_looks += 1
            self._changed.notify_all()

    def _take_look(self) -> None:
        """In a thread: asks the run, reads files, makes JSON."""
        view = self._feed.look()
        past = self._feed.past
        past.read()
        self._state = orjson.dumps(state_table(view, past, may_operate=self._may_operate), default=str)
        began_s = time.monotonic()
        if self._charts_of != past.generation and began_s >= self._charts_due_s:
            self._charts = orjson.dumps(past_table(past), default=str)
            self._charts_of = past.generation
            # A table of a long run is large: making it takes at most a tenth of the time.
            self._charts_due_s = began_s + max(CHARTS_EVERY_S, 10 * (time.monotonic() - began_s))

    @property
    def _may_operate(self) -> bool:
        return self._guard.may_operate and not self._feed.reader_only

    async def _ready(self) -> None:
        self._wanted_s = time.monotonic()
        if not self._state:
            await self._look()

    # -- what is served ----------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        answer = web.Response(body=page_file("index.html"), content_type="text/html", charset="utf-8")
        if "token" in request.query:
            answer.set_cookie(self._cookie, self._guard.cookie, httponly=True, samesite="Strict", path="/")
        return answer

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in ASSETS:
            raise web.HTTPNotFound
        return web.Response(body=page_file(name), content_type=ASSETS[name], charset="utf-8")

    async def _once(self, request: web.Request) -> web.Response:
        await self._ready()
        body = b'{"state":' + self._state + b',"history":' + self._charts + b"}"
        return web.Response(body=body, content_type="application/json")

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """State every second, history when it grew."""
        if self._num_watchers >= MAX_WATCHERS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_WATCHERS} pages are open already: close some")
        self._num_watchers += 1
        try:
            answer = web.StreamResponse(headers={**SECURITY_HEADERS, "Content-Type": "text/event-stream"})
            await answer.prepare(request)
            await self._ready()
            with contextlib.suppress(ConnectionError):
                await self._send_forever(answer)
            return answer
        finally:
            self._num_watchers -= 1

    async def _send_forever(self, answer: web.StreamResponse) -> None:
        sent_charts = -2
        while not self._is_closing:
            seen = self._num_looks
            if sent_charts != self._charts_of:
                sent_charts = self._charts_of
                await answer.write(b"event: history\ndata: " + self._charts + b"\n\n")
            await answer.write(b"event: state\ndata: " + self._state + b"\n\n")
            await self._next_look(seen)

    async def _next_look(self, seen: int) -> None:
        """Wait for a newer look, or so long that the page needs a sign of life."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                newer = self._changed.wait_for(lambda: self._num_looks > seen or self._is_closing)
                await asyncio.wait_for(newer, KEEP_ALIVE_S)

    async def _samples(self, request: web.Request) -> web.Response:
        """Token by token from the run itself; what was searched for from samples.jsonl."""
        asked = request.query
        num = int(asked.get("num_groups", "")[:9]) if asked.get("num_groups", "").isdecimal() else 4
        step = int(asked.get("step", "")[:9]) if asked.get("step", "").isdecimal() else -1
        held_out = {"held-out": True, "all": None}.get(asked.get("held_out", ""), False)
        if asked.get("search") or asked.get("prompt") or held_out is None or self._feed.is_over:
            is_any = "prompt" in asked or held_out is None
            wanted = SampleQuery(
                step, None if is_any else held_out, search=asked.get("search", ""), prompt=asked.get("prompt", "")
            )
            num = min(num, MAX_KEPT_GROUPS)
            read = partial(read_samples, self._feed.run_dir, wanted, num)
            return await self._answered(lambda: {"groups": read(), "num_left_out": 0})
        arguments: dict[str, Any] = {"num_groups": min(num, MAX_GROUPS)}
        arguments |= {"step": step} if step >= 0 else {}
        arguments |= {"held_out": True} if held_out else {}
        return await self._asked("samples", arguments)

    async def _runs(self, request: web.Request) -> web.Response:
        """The runs of the same folder."""
        return await self._answered(lambda: [run.facts() for run in runs_of(self._feed.run_dir.parent)])

    async def _run(self, request: web.Request) -> web.Response:
        """The past of another run of the same folder."""
        name, folder = request.query.get("name", ""), self._feed.run_dir.parent
        if name not in {run.name for run in await asyncio.to_thread(runs_of, folder)}:
            raise web.HTTPNotFound
        return await self._answered(lambda: past_table(load_run(folder / name)))

    async def _operate(self, request: web.Request) -> web.Response:
        verb = request.match_info["verb"]
        if verb not in OPERATE_VERBS:
            raise web.HTTPNotFound
        if request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="send JSON")
        try:
            arguments: Any = orjson.loads(await request.read())
        except orjson.JSONDecodeError:
            raise web.HTTPBadRequest(text="the body is no JSON") from None
        if not isinstance(arguments, dict):
            raise web.HTTPBadRequest(text="the body must be an object of arguments")
        answer = await self._asked(verb, cast("dict[str, Any]", arguments))
        self._feed.wake()
        return answer

    async def _asked(self, verb: str, arguments: dict[str, Any]) -> web.Response:
        """The run's answer, or its error with the remedy: both are for the page to show."""
        if _RESERVED & arguments.keys():
            raise web.HTTPBadRequest(text=f"{verb} takes no {', '.join(_RESERVED & arguments.keys())}")
        return await self._answered(partial(self._feed.ask, verb, timeout_s=ASK_S, **arguments))

    async def _answered(self, ask: Callable[[], Any]) -> web.Response:
        """What a thread finds out."""
        if len(self._asks) >= MAX_ASKS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_ASKS} questions wait for the run's answers: try again")
        asking = asyncio.get_running_loop().run_in_executor(self._askers, ask)
        self._asks.add(asking)
        asking.add_done_callback(self._asked_once)
        try:
            result = await asyncio.shield(asking)
        except MyxaError as error:
            facts = {"type": type(error).__name__, "message": error.message, "remedy": error.remedy}
            return web.Response(status=409, body=orjson.dumps({"error": facts}), content_type="application/json")
        return web.Response(body=orjson.dumps({"result": result}, default=str), content_type="application/json")

    def _asked_once(self, asking: asyncio.Future[Any]) -> None:
        """Free its place only when the thread is done, also if the page is gone."""
        self._asks.discard(asking)
        if not asking.cancelled():
            asking.exception()  # the page has the error, if it is still there

    # -- the guard ---------------------------------------------------------------------------------------------

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
        if not answer.prepared:
            answer.headers.update(SECURITY_HEADERS)
        return answer

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        head = request.headers
        ask = PageRequest(
            method=request.method,
            host=head.get("Host", ""),
            query_token=request.query.get("token", ""),
            cookie=request.cookies.get(self._cookie, ""),
            header_token=head.get(TOKEN_HEADER, ""),
            origin=head.get("Origin", ""),
            fetch_site=head.get("Sec-Fetch-Site", ""),
            fetch_mode=head.get("Sec-Fetch-Mode", ""),
        )
        refusal = self._guard.refusal(ask)
        if refusal is not None:
            return web.Response(status=refusal.status, text=refusal.text + "\n")
        return await handler(request)


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
    """Serves the read-only dashboard of a run inside its own launcher, through the run's read-only socket; gives its
    URL. Raises ConfigError if the port is taken."""
    path = Path(note.run_dir) / URL_FILE
    async with Dashboard(Feed.of_note(note, only_view=True), DashboardGuard()).serving(port) as url:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # a leftover may have been made with other rights
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{url}\n")
        try:
            yield url
        finally:
            path.unlink(missing_ok=True)
