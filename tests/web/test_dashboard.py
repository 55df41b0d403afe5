"""The dashboard over real sockets: what it serves to whom, what it refuses, and that it follows the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from myxa.core.errors import ConfigError
from myxa.launch.cli import main
from myxa.launch.control.server import Handler
from myxa.launch.control.verbs import STACK, Verb
from myxa.launch.feed import Feed
from myxa.launch.web.dashboard import (
    ASSETS,
    MAX_ASKS,
    SECURITY_HEADERS,
    TOKEN_HEADER,
    Dashboard,
    DashboardGuard,
)  # fmt: skip

PATIENCE_S = 20.0
TOKEN = "the-secret-of-this-test"


class Visit:
    """A client that knows the URL."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.base = "http://" + urlsplit(url).netloc
        self.query = {"token": TOKEN}

    async def get(self, path: str, *, headers: dict[str, str] | None = None, token: bool = True) -> tuple[int, str]:
        async with self.session.get(self.base + path, headers=headers, params=self.query if token else {}) as answer:
            return answer.status, await answer.text()

    async def state(self) -> dict[str, Any]:
        status, text = await self.get("/api/state")
        assert status == 200, text
        return json.loads(text)

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        told = {TOKEN_HEADER: TOKEN, "Content-Type": "application/json"} | {
            k.replace("_", "-"): v for k, v in headers.items()
        }
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.base + path, headers=told, data=data) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text


@contextlib.asynccontextmanager
async def served(
    planting: ModuleType, seat: Any, *, operate: bool = False
) -> AsyncIterator[tuple[Visit, contextlib.AsyncExitStack]]:
    """A dashboard of a live seat; closing the stack ends the run under it."""
    async with contextlib.AsyncExitStack() as run:
        note = await run.enter_async_context(planting.serving(seat))
        feed = Feed.of(Path(note.run_dir))
        async with Dashboard(feed, DashboardGuard(TOKEN, may_operate=operate)).serving(0) as url:
            assert url.endswith(f"/?token={TOKEN}")
            async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
                yield Visit(session, url), run


async def test_the_page_and_its_files_are_served_with_the_strict_headers_on_loopback(planting, seat) -> None:
    async with served(planting, seat) as (visit, _):
        for path in ("/", *(f"/assets/{name}" for name in ASSETS), "/api/state", "/nothing", "/assets/../guard.py"):
            async with visit.session.get(visit.base + path, params=visit.query) as answer:
                assert answer.status == (404 if "nothing" in path or "guard" in path else 200), path
                for name, value in SECURITY_HEADERS.items():
                    assert answer.headers[name] == value, path
                assert not any(name.lower().startswith("access-control") for name in answer.headers)
        policy = SECURITY_HEADERS["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy
        port = f"{urlsplit(visit.base).port:04X}"
        lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        assert re.findall(rf"\d+: ([0-9A-F]+):{port} [0-9A-F]+:0000 0A", lines) == ["0100007F"]


async def test_the_secret_in_the_url_becomes_a_cookie_and_other_sites_are_refused(planting, seat) -> None:
    async with served(planting, seat) as (visit, _):
        assert (await visit.get("/", token=False))[0] == 401
        assert (await visit.get("/api/state", token=False))[0] == 401
        async with visit.session.get(visit.base + "/", params=visit.query) as answer:
            (cookie,) = answer.cookies.values()
            assert answer.headers["Set-Cookie"].count("HttpOnly") == 1
            assert "SameSite=Strict" in answer.headers["Set-Cookie"]
            assert TOKEN not in cookie.value
            assert str(urlsplit(visit.base).port) in cookie.key, "cookies are shared by ports: each has its own name"
        assert (await visit.get("/api/state", token=False))[0] == 200
        for header, value, status in (("Host", "rebound.example", 421), ("Origin", "http://evil.example", 403)):
            assert (await visit.get("/api/state", headers={header: value}))[0] == status, value


async def test_what_it_shows_is_what_the_run_says(planting, seat) -> None:
    async with served(planting, seat) as (visit, _):
        told = await visit.state()
        state, history = told["state"], told["history"]
        assert (state["name"], state["phase"], state["mayOperate"]) == ("sort", "running", False)
        assert "generation is the bottleneck" in state["why"]
        assert dict(state["facts"])["step"].startswith("120 of 400   running")
        assert [actor["name"] for actor in state["actors"]][:2] == ["trainer/0", "trainer/1"]
        assert {knob["name"]: knob["value"] for knob in state["knobs"]} == {
            "lr": "0.0001", "clip_low": "0.2", "max_staleness": "4", "policy": "pace", "temperature": "1", "concurrency": "16",
            "eval_every": "10",
        }  # fmt: skip
        assert [change["number"] for change in history["changes"]] == [1, 2, 3, 4, 5]
        assert {"reward/raw_mean", "rollout/tokens_per_s"} <= {row[0] for row in history["series"]}
        status, text = await visit.get("/api/samples?num_groups=12")
        groups = json.loads(text)["groups"]
        assert (status, len(groups)) == (200, 6)
        assert planting.HOSTILE in groups[-1]["prompt"], "as data: the page shows it as text"


async def test_without_operate_nothing_changes(planting, seat) -> None:
    async with served(planting, seat) as (visit, _):
        assert (await visit.post("/api/verbs/set", {"values": {"lr": 1e-5}}))[0] == 403
        assert (await visit.get("/api/verbs/set"))[0] == 400
        assert (await visit.get("/api/verbs/ps", token=False))[0] == 401
        assert not (await visit.state())["state"]["mayOperate"]
        assert seat.values == planting.FIRST
        assert len(seat.records) == 5


async def test_with_operate_and_the_secret_a_knob_is_turned(planting, seat) -> None:
    async with served(planting, seat, operate=True) as (visit, _):
        assert (await visit.post("/api/verbs/set", {"values": {"lr": 5e-5}}, X_Myxa_Token="wrong"))[0] == 401
        assert (await visit.post("/api/verbs/set", {"values": {"lr": 5e-5}}, Origin="http://evil.example"))[0] == 403
        assert (await visit.post("/api/verbs/set", {"values": {"lr": 5e-5}}, Content_Type="text/plain"))[0] == 415
        assert seat.values["lr"] == 1e-4
        status, told = await visit.post("/api/verbs/set", {"values": {"lr": 5e-5}, "reason": "noisy"})
        assert (status, told["moves"][0]["new"], seat.values["lr"]) == (200, 5e-5, 5e-5)
        assert seat.records[-1].reason == "noisy"
        status, told = await visit.post("/api/verbs/set", {"values": {"lr": -1}})
        assert (status, told["error"]["remedy"]) == (400, "lr takes above 0")
        for odd in (b"", b"[", b"[]", b"3", b'{"verb": "down", "values": {}}', b'{"timeout_s": 1e9}', b'{"x": 1}'):
            status, _ = await visit.post("/api/verbs/set", odd)
            assert status == 400, odd
        assert (await visit.get("/api/verbs/set?values=1"))[0] == 400, "a link changes nothing"
        assert (await visit.post("/api/verbs/set", b"{" + b" " * 100_000 + b"}"))[0] == 413
        assert seat.values == {**planting.FIRST, "lr": 5e-5}


async def test_the_page_is_told_of_every_change_as_it_happens(planting, seat) -> None:
    async with served(planting, seat, operate=True) as (visit, _), asyncio.timeout(PATIENCE_S):
        first = await visit.state()
        assert first["history"]["series"]
        visit.query["seen"] = str(first["generation"])
        seat.version = 121
        while True:
            told = await visit.state()
            assert told["history"] is None, "it has not grown"
            if dict(told["state"]["facts"])["step"].startswith("121"):
                break
            await asyncio.sleep(0.1)
        with (seat.run_dir / "events.jsonl").open("a") as file:
            event = {"source": "a", "wall_s": 1.8e9, "kind": "knob", "text": "new one", "data": {}}
            file.write(json.dumps(event) + "\n")
        while (told := await visit.state())["history"] is None:
            await asyncio.sleep(0.1)
        assert told["history"]["events"][-1]["text"] == "new one"


async def test_many_pages_are_one_look_at_the_run(planting, seat) -> None:
    async with served(planting, seat) as (visit, _):
        looks = 0
        asked = seat.status

        def status(given: Any) -> Any:
            nonlocal looks
            looks += 1
            return asked(given)

        seat.status = status
        await asyncio.gather(*(visit.state() for _ in range(20)))
        assert looks <= 2


async def test_a_run_that_ends_stays_on_show(planting, seat) -> None:
    async with served(planting, seat) as (visit, run), asyncio.timeout(PATIENCE_S):
        await visit.state()
        await run.aclose()
        while not (state := (await visit.state())["state"])["hasEnded"]:
            await asyncio.sleep(0.2)
        assert "the run has ended" in state["notice"]
        assert state["actors"]
        assert not state["mayOperate"]


async def test_a_run_of_yesterday_is_shown_from_its_files(seat) -> None:
    dashboard = Dashboard(Feed(seat.run_dir), DashboardGuard(TOKEN))
    async with dashboard.serving(0) as url, aiohttp.ClientSession() as session:
        visit = Visit(session, url)
        told = await visit.state()
        assert (await visit.get("/api/verbs/ps"))[0] == 409, "it is over"
    assert told["state"]["hasEnded"]
    assert told["state"]["name"] == "sort-planted"
    assert "trainer/0 waits for data" in told["state"]["why"]
    assert told["state"]["actors"][0]["parts"], "whose time was told by the files"
    assert {row[0] for row in told["history"]["series"]} >= {"reward/raw_mean", "train/loss"}
    assert {label for label, _ in told["state"]["facts"]} >= {"step", "reward"}


async def test_kept_samples_and_other_runs_of_the_folder_are_shown(planting, seat) -> None:
    other = seat.run_dir.with_name("other")
    shutil.copytree(seat.run_dir, other)
    (seat.run_dir.parent / "secret").mkdir()
    (seat.run_dir / "samples.jsonl").unlink()
    for step, text in ((1, "four"), (2, "five")):
        group = planting.planted_group(step)
        group |= {"step": step, "messages": [{"role": "user", "content": "2 + 2"}]}
        group["answers"][0]["messages"][-1]["content"] = text
        with (seat.run_dir / "samples.jsonl").open("a") as file:
            file.write(json.dumps(group) + "\n")
    async with served(planting, seat) as (visit, _):
        for query, steps in (("search=FOUR", [1]), ("prompt=user", [2, 1]), ("held_out=all", [2, 1]), ("search=x", [])):
            status, text = await visit.get(f"/api/samples?num_groups=9&{query}")
            assert (status, [group["step"] for group in json.loads(text)["groups"]]) == (200, steps), query
        status, text = await visit.get("/api/runs")
        assert (status, {run["name"] for run in json.loads(text)}) == (200, {"sort-planted", "other"})
        status, text = await visit.get("/api/run?name=other")
        assert (status, json.loads(text)["name"]) == (200, "other")
        for name in ("secret", "..", "../sort-planted/../other", "", "/etc"):
            assert (await visit.get(f"/api/run?name={name}"))[0] == 404, name
        assert (await visit.get("/api/runs", headers={"Origin": "http://evil.example"}))[0] == 403


def answering(seat: Any, verb: Verb[Any], handler: Handler) -> Any:
    """A seat that answers this verb otherwise."""
    return SimpleNamespace(run_dir=seat.run_dir, handlers=lambda: seat.handlers() | {verb: handler})


async def test_in_the_launcher_it_takes_no_thread_that_the_answers_need(planting, seat) -> None:
    """The verb that is asked for reads in a thread of the same loop, as `why` does."""

    async def read(*_: Any) -> dict[str, Any]:
        return await asyncio.to_thread(lambda: {"text": ""})

    threads = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    async with served(planting, answering(seat, STACK, read)) as (visit, _), asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(*(visit.get("/api/verbs/stack?target=trainer/0") for _ in range(4)))
        assert answers == [(200, '{"text":""}\n')] * 4
        assert (await visit.state())["state"]["phase"] == "running"


async def test_questions_to_a_run_that_does_not_answer_are_limited(planting, seat) -> None:
    is_over = asyncio.Event()

    async def wait(*_: Any) -> dict[str, Any]:
        await asyncio.wait_for(is_over.wait(), PATIENCE_S)
        return {}

    async with served(planting, answering(seat, STACK, wait)) as (visit, _):
        asking = [asyncio.create_task(visit.get("/api/verbs/stack?target=trainer/0")) for _ in range(MAX_ASKS + 1)]
        try:
            done, _ = await asyncio.wait(asking, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result()[0] for task in done] == [503]
        finally:
            is_over.set()
        assert sorted(status for status, _ in await asyncio.gather(*asking)) == [200] * MAX_ASKS + [503]


def test_scripts_make_no_markup_out_of_text() -> None:
    folder = Path(__file__).parents[2] / "launch" / "web"
    scripts = [path for path in folder.glob("*.js") if path.name != "uPlot.iife.min.js"]
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    for path in folder.glob("*.js"):
        assert not re.search(markup, path.read_text()), path
    for path in [*scripts, *folder.glob("*.css"), *folder.glob("*.html")]:
        assert not re.search(r"https?://(?!127\.0\.0\.1)|@import|url\(", path.read_text()), path
    page = (folder / "index.html").read_text()
    assert not re.search(r"\son\w+=|style=|<script(?! defer src=\"/assets/)", page)
    assert "Permission is hereby granted" in (folder / "uPlot.LICENSE").read_text()


def test_a_port_that_is_taken_and_a_folder_that_is_no_run_are_refused(seat) -> None:
    async def twice() -> None:
        async with Dashboard(Feed(seat.run_dir), DashboardGuard()).serving(0) as url:
            port = urlsplit(url).port or 0
            async with Dashboard(Feed(seat.run_dir), DashboardGuard()).serving(port):
                pass

    with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1") as caught:
        asyncio.run(twice())
    assert "another port" in caught.value.remedy
    assert main(["dashboard", "--run", str(seat.run_dir.parent)]) == 3, "that is no run"
