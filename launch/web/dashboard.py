"""The run in a browser: pages, its state, which a page asks for every second, and its verbs; `/metrics` for Prometheus.

Routes of the control server at a port of 127.0.0.1. `DashboardGuard` judges each request by host, origin and site, and
by a proof that it knows the secret of the URL that was printed. What changes the run must carry that secret in a
header: cookies are shared by all ports of a host. `/metrics` asks for the key of `METRICS_KEY_VARIABLE`, if it is set.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from ...actors.http_guard import Head, HttpAccess, Refusal, elsewhere, same
from ...core.errors import ConfigError, MyxaError
from ...core.knobs import Operator
from ...transport.address import LOOPBACK
from .. import verbs
from ..control.server import ControlServer, VerbContext, error_response, operator_of
from ..views.compare import runs_of
from ..views.page_data import past_table, state_table
from ..views.report import SCRIPTS, STYLES, page_file
from ..views.run_files import RunFiles, SampleQuery, load_run, read_samples
from ..views.run_view import RunView, carried_over, with_past

METRICS_KEY_VARIABLE = "MYXA_METRICS_KEY"
"""Key that scrapers must send to the Prometheus page; empty or not set: any program of this machine may ask."""
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
    """Judges requests by two secrets: one opens what shows, the other one also changes the run."""

    def __init__(self) -> None:
        self.view, self.operate = secrets.token_urlsafe(32), secrets.token_urlsafe(32)

    def refusal(self, ask: PageRequest) -> Refusal | None:
        """Why this request is not served; None: it is."""
        if refused := elsewhere(ask, is_visit=ask.method == "GET" and ask.fetch_mode == "navigate"):
            return refused
        unknown = Refusal(401, "open the URL that was printed: it holds the secret")
        if ask.method in ("GET", "HEAD"):
            return None if self.may_operate(ask) or _knows(ask, self.view) else unknown
        if ask.method != "POST":
            return Refusal(405, "only POST changes anything")
        if same(ask.header_token, self.view):
            return Refusal(403, "this URL only shows: `myxa dashboard --operate` prints one that changes the run, too")
        return None if same(ask.header_token, self.operate) else unknown

    def may_operate(self, ask: PageRequest) -> bool:
        """Whether the page that asks is one that may change the run."""
        return _knows(ask, self.operate)


def cookie_of(secret: str) -> str:
    """Opens the pages that show, and does not reveal the secret."""
    return hashlib.blake2b(b"view", key=secret.encode()[:64], digest_size=32).hexdigest()


def _knows(ask: PageRequest, secret: str) -> bool:
    return same(ask.query_token, secret) or same(ask.cookie, cookie_of(secret))


TOKEN = "token"
METRICS = "/metrics"
LOOK_EVERY_S = 2.0
CHARTS_EVERY_S = 2.0
MAX_BODY_BYTES = 64 * 1024
MAX_KEPT_GROUPS = 200
"""Of samples.jsonl, which have no tokens."""
CLOSE_S = 2.0
TYPES: Mapping[str, str] = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
ASSETS = (*STYLES, *SCRIPTS, "icon.svg")
URL_FILE = "dashboard.url"
"""In the run directory, for its owner's eyes only, while the dashboard is open: the URL holds the secret that shows."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """That of one run, opened by the verb `dashboard`; it ends with the block."""

    def __init__(self, server: ControlServer, run_dir: Path) -> None:
        self._server = server
        self._run_dir = run_dir
        self._guard = DashboardGuard()
        self._metrics_access = HttpAccess(os.environ.get(METRICS_KEY_VARIABLE, ""))
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._past = RunFiles(run_dir)
        self._last: RunView | None = None
        self._state: bytes = b""
        self._charts: bytes = b""
        self._charts_of = -1
        self._charts_due_s = 0.0
        self._looked_s = float("-inf")
        self._turn = asyncio.Lock()
        # Not the loop's own threads: verbs need those for their answers.
        self._looker = ThreadPoolExecutor(1, thread_name_prefix="dashboard-look")
        server.handlers[verbs.DASHBOARD] = self._asked

    async def __aenter__(self) -> Dashboard:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            (self._run_dir / URL_FILE).unlink(missing_ok=True)
        self._looker.shutdown(wait=False, cancel_futures=True)

    async def _asked(
        self, context: VerbContext, arguments: verbs.DashboardArguments, who: Operator
    ) -> dict[str, object]:
        url = await self.opened(arguments.port, may_operate=arguments.operate)
        return {"url": url, "run_dir": str(self._run_dir), "operate": arguments.operate}

    async def opened(self, port: int, *, may_operate: bool = False) -> str:
        """The URL with its secret. `port` 0: any free one. Raises ConfigError if it is taken or another is open."""
        async with self._turn:
            if self._runner is None:
                await self._open(port)
        if port not in (0, self._port):
            raise ConfigError(f"the dashboard of this run is at port {self._port}", remedy="leave --port out")
        return self._url(self._guard.operate if may_operate else self._guard.view)

    def _url(self, secret: str) -> str:
        return f"http://{LOOPBACK}:{self._port}/?{TOKEN}={secret}"

    async def _open(self, port: int) -> None:
        app = web.Application(middlewares=[self._guarded], client_max_size=MAX_BODY_BYTES)
        app.on_response_prepare.append(_secure)
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
                web.get(METRICS, self._metrics),
            ]
        )
        runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_S, handler_cancellation=True
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, LOOPBACK, port).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"the dashboard cannot listen on {LOOPBACK}:{port}: {error}",
                remedy="choose another port, or 0 for any free one",
            ) from error
        self._runner, self._port = runner, runner.addresses[0][1]
        path = self._run_dir / URL_FILE
        path.unlink(missing_ok=True)  # a leftover may have been made with other rights
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{self._url(self._guard.view)}\n")

    # -- what shows ----------------------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        answer = web.Response(body=page_file("index.html"), content_type="text/html", charset="utf-8")
        if secret := request.query.get(TOKEN):
            answer.set_cookie(self._cookie, cookie_of(secret), httponly=True, samesite="Strict", path="/")
        return answer

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in ASSETS:
            raise web.HTTPNotFound
        return web.Response(body=page_file(name), content_type=TYPES[name.rpartition(".")[2]], charset="utf-8")

    async def _now(self, request: web.Request) -> web.Response:
        """The run's state of late; its history, too, if it is not the one that the page has `seen`."""
        async with self._turn:
            if time.monotonic() >= self._looked_s + LOOK_EVERY_S:
                view = await self._status(whole=True)
                await asyncio.get_running_loop().run_in_executor(self._looker, self._draw, view)
                self._looked_s = time.monotonic()
        may_operate = b"true" if self._guard.may_operate(self._ask(request)) else b"false"
        history = b"null" if request.query.get("seen") == str(self._charts_of) else self._charts
        body = b'{"generation":%d,"mayOperate":%b,"state":%b,"history":%b}' % (
            self._charts_of, may_operate, self._state, history,
        )  # fmt: skip
        return web.Response(body=body, content_type="application/json")

    async def _status(self, *, whole: bool) -> RunView:
        return await self._server.carry_out(verbs.STATUS, verbs.StatusArguments(whole=whole), _this_process())

    def _draw(self, view: RunView) -> None:
        past = self._past
        past.read()
        self._last = carried_over(with_past(view, past), self._last or view)
        self._state = orjson.dumps(state_table(self._last, past), default=str)
        began_s = time.monotonic()
        if self._charts_of != past.generation and began_s >= self._charts_due_s:
            self._charts = orjson.dumps(past_table(past), default=str)
            self._charts_of = past.generation
            # A table of a long run is large: making it takes at most a tenth of the time.
            self._charts_due_s = began_s + max(CHARTS_EVERY_S, 10 * (time.monotonic() - began_s))

    async def _samples(self, request: web.Request) -> web.Response:
        query = request.query
        num = int(query.get("num_groups", "")[:9]) if query.get("num_groups", "").isdecimal() else 4
        step = int(query.get("step", "")[:9]) if query.get("step", "").isdecimal() else -1
        held_out = None if "prompt" in query else {"held-out": True, "all": None}.get(query.get("held_out", ""), False)
        query_of_samples = SampleQuery(step, held_out, search=query.get("search", ""), prompt=query.get("prompt", ""))
        read = partial(read_samples, self._run_dir, query_of_samples, min(num, MAX_KEPT_GROUPS))
        return await self._read(lambda: {"groups": read()})

    async def _runs(self, request: web.Request) -> web.Response:
        return await self._read(lambda: [asdict(run) for run in runs_of(self._run_dir.parent)])

    async def _run(self, request: web.Request) -> web.Response:
        name, folder = request.query.get("name", ""), self._run_dir.parent

        def past() -> Any:
            names = {run.name for run in runs_of(folder)}
            return past_table(load_run(folder / name)) if name in names else None

        return await self._read(past)

    async def _read(self, read: Callable[[], Any]) -> web.Response:
        answer = await asyncio.get_running_loop().run_in_executor(self._looker, read)
        if answer is None:
            raise web.HTTPNotFound
        return web.Response(body=orjson.dumps(answer, default=str), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        snapshot = (await self._status(whole=False)).snapshot
        if not snapshot:
            raise web.HTTPServiceUnavailable(text="the monitor has not answered yet: try again")
        return web.Response(text=prometheus_text(snapshot), content_type="text/plain", charset="utf-8")

    # -- what changes --------------------------------------------------------------------------------------------------

    async def _verb(self, request: web.Request) -> web.Response:
        if request.method == "POST" and request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="send JSON")
        pairs = [pair for pair in request.query.items() if pair[0] != TOKEN]
        answer = await self._server.answer(request, pairs, lambda _: _this_process())
        if request.method == "POST":
            self._looked_s = float("-inf")  # the page shows at once what it did
        return answer

    # -- who may -------------------------------------------------------------------------------------------------------

    @property
    def _cookie(self) -> str:
        """Cookies are shared by all ports of a host: each dashboard has its own."""
        return f"myxa-{self._port}"

    def _ask(self, request: web.Request) -> PageRequest:
        return PageRequest(
            **asdict(Head.of(request.method, request.headers)),
            query_token=request.query.get(TOKEN, ""),
            cookie=request.cookies.get(self._cookie, ""),
            header_token=request.headers.get(TOKEN_HEADER, ""),
        )

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        ask = self._ask(request)
        refusal = (self._metrics_access if request.path == METRICS else self._guard).refusal(ask)
        if refusal is not None:
            return web.Response(status=refusal.status, text=refusal.text + "\n")
        try:
            return await handler(request)
        except MyxaError as error:
            return error_response(error)


async def _secure(request: web.Request, answer: web.StreamResponse) -> None:
    answer.headers.update(SECURITY_HEADERS)


def _this_process() -> Operator:
    return operator_of(os.getuid(), os.getpid(), "dashboard")


# -- Prometheus --------------------------------------------------------------------------------------------------------

BY_KIND = {"time": "myxa_time_share", "events": "myxa_events_total"}


def prometheus_text(snapshot: Mapping[str, Mapping[str, float]]) -> str:
    """What the monitor's `snapshot` says, in Prometheus' text format: `myxa_train_loss{source="trainer/0"} 0.5`."""
    rows: dict[str, dict[str, float]] = defaultdict(dict)
    for source, values in snapshot.items():
        kind, _, actor = source.partition("/")
        if kind in BY_KIND:
            rows[BY_KIND[kind]] |= {_labels(kind=name, source=actor): value for name, value in values.items()}
        elif source in ("age_s", "step"):
            rows[f"myxa_{source}"] |= {_labels(source=actor): value for actor, value in values.items()}
        elif source == "monitor":
            rows["myxa_telemetry_dropped_total"][""] = values["dropped"]
        elif source != "metrics":  # those of all sources as value
            for name, value in values.items():  # of names that differ in odd characters alone the newest counts
                rows[f"myxa_{re.sub('[^a-zA-Z0-9_]', '_', name)}"][_labels(source=source)] = value
    return "".join(f"{name}{labels} {float(n)!r}\n" for name in sorted(rows) for labels, n in rows[name].items())


def _labels(**labels: str) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{name}="{text.translate(escapes)}"' for name, text in labels.items()) + "}"
