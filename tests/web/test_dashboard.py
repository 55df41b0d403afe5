"""The dashboard over real sockets: what it serves to whom, what it refuses, and that it follows the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import shutil
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from myxa.actors.monitor.latest import Latest
from myxa.core.errors import ConfigError
from myxa.core.messages import Event, MetricPoint, Telemetry
from myxa.launch.cli import main
from myxa.launch.control.client import ControlClient
from myxa.launch.control.server import Handler, ServerLimits
from myxa.launch.verbs import STACK, Verb
from myxa.launch.web import dashboard
from myxa.launch.web.dashboard import ASSETS, METRICS_KEY_VARIABLE, SECURITY_HEADERS, TOKEN_HEADER, prometheus_text

PATIENCE_S = 40.0


class Visit:
    """A client that knows the URL."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.base = "http://" + urlsplit(url).netloc
        self.token = url.partition("/?token=")[2]
        self.query = {"token": self.token}

    async def get(self, path: str, *, headers: dict[str, str] | None = None, token: bool = True) -> tuple[int, str]:
        async with self.session.get(self.base + path, headers=headers, params=self.query if token else {}) as answer:
            return answer.status, await answer.text()

    async def state(self) -> dict[str, Any]:
        status, text = await self.get("/api/state")
        assert status == 200, text
        return json.loads(text)

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        told = {TOKEN_HEADER: self.token, "Content-Type": "application/json"} | {
            k.replace("_", "-"): v for k, v in headers.items()
        }
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.base + path, headers=told, data=data) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text


async def asked(note: Any, **arguments: Any) -> str:
    """The URL that the verb answers."""
    return (await asyncio.to_thread(ControlClient(note).ask, "dashboard", **arguments))["url"]


@contextlib.asynccontextmanager
async def served(planting: ModuleType, seat: Any, *, operate: bool = False) -> AsyncIterator[Visit]:
    """The dashboard of a live seat."""
    async with (
        planting.serving(seat) as note,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
    ):
        yield Visit(session, await asked(note, operate=operate))


async def test_the_page_and_its_files_are_served_with_the_strict_headers_on_loopback(planting, seat) -> None:
    async with served(planting, seat) as visit:
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
    async with served(planting, seat) as visit:
        assert (await visit.get("/", token=False))[0] == 401
        assert (await visit.get("/api/state", token=False))[0] == 401
        async with visit.session.get(visit.base + "/", params=visit.query) as answer:
            (cookie,) = answer.cookies.values()
            assert answer.headers["Set-Cookie"].count("HttpOnly") == 1
            assert "SameSite=Strict" in answer.headers["Set-Cookie"]
            assert visit.token not in cookie.value
            assert str(urlsplit(visit.base).port) in cookie.key, "cookies are shared by ports: each has its own name"
        assert (await visit.get("/api/state", token=False))[0] == 200
        for header, value, status in (("Host", "rebound.example", 421), ("Origin", "http://evil.example", 403)):
            assert (await visit.get("/api/state", headers={header: value}))[0] == status, value


async def test_what_it_shows_is_what_the_run_says(planting, seat) -> None:
    async with served(planting, seat) as visit:
        told = await visit.state()
        state, history = told["state"], told["history"]
        assert (state["name"], state["phase"], told["mayOperate"]) == ("sort", "running", False)
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
    async with served(planting, seat) as visit:
        assert (await visit.post("/api/verbs/set", {"values": {"lr": 1e-5}}))[0] == 403
        assert (await visit.get("/api/verbs/set"))[0] == 400
        assert (await visit.get("/api/verbs/ps", token=False))[0] == 401
        assert not (await visit.state())["mayOperate"]
        assert seat.values == planting.FIRST
        assert len(seat.records) == 5


async def test_with_operate_and_the_secret_a_knob_is_turned(planting, seat) -> None:
    async with served(planting, seat, operate=True) as visit:
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


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_EVERY_S", "CHARTS_EVERY_S"):
        monkeypatch.setattr(dashboard, name, 0.2)


async def test_the_page_is_told_of_every_change_as_it_happens(planting, seat, quick_looks) -> None:
    async with served(planting, seat, operate=True) as visit, asyncio.timeout(PATIENCE_S):
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
    async with served(planting, seat) as visit:
        looks = 0
        asked = seat.status

        def status(given: Any) -> Any:
            nonlocal looks
            looks += 1
            return asked(given)

        seat.status = status
        await asyncio.gather(*(visit.state() for _ in range(20)))
        assert looks <= 2


async def test_the_verb_opens_one_door_with_a_secret_for_each_right(planting, seat) -> None:
    async with planting.serving(seat) as note:
        shows, operates, again = [await asked(note, operate=operate) for operate in (False, True, False)]
        assert shows == again and shows != operates and urlsplit(shows).netloc == urlsplit(operates).netloc
        file = seat.run_dir / "dashboard.url"
        assert (file.read_text().strip(), file.stat().st_mode & 0o777) == (shows, 0o600)
        port = urlsplit(shows).port or 0
        assert await asked(note, port=port) == shows
        with pytest.raises(ConfigError, match=f"is at port {port}"):
            await asked(note, port=port - 1)
        told = [(record.verb, record.result, record.arguments) for record in seat.noted]
        assert told[1] == ("dashboard", "done", {"port": 0, "operate": True})
        assert not any("token" in str(record) for record in seat.noted), "no secret is in the audit log"
        async with aiohttp.ClientSession() as session:
            look, turn = Visit(session, shows), Visit(session, operates)
            assert [(await each.state())["mayOperate"] for each in (look, turn)] == [False, True]
            assert (await look.post("/api/verbs/dashboard", {"operate": True}))[0] == 403
    assert not file.exists(), "the secret goes with the run"


async def test_what_a_run_does_not_tell_any_more_stays_on_show(planting, seat, quick_looks) -> None:
    async with served(planting, seat) as visit, asyncio.timeout(PATIENCE_S):
        assert (await visit.state())["state"]["phase"] == "running"
        seat.phase = "finished"
        while not (state := (await visit.state())["state"])["hasEnded"]:
            await asyncio.sleep(0.2)
        assert "the run has ended" in state["notice"]
        assert state["actors"] and not state["underWay"]


def test_of_a_run_of_yesterday_the_command_writes_the_report(seat, capsys) -> None:
    assert main(["dashboard", "--run", str(seat.run_dir), "--json"]) == 0
    report = Path(json.loads(capsys.readouterr().out)["report"])
    assert report == seat.run_dir / "report.html" and "sort-planted" in report.read_text()
    assert main(["dashboard", "--run", str(seat.run_dir), "--operate"]) == 3


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
    async with served(planting, seat) as visit:
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
    return SimpleNamespace(
        run_dir=seat.run_dir, limits=seat.limits, noted=seat.noted, handlers=lambda: seat.handlers() | {verb: handler}
    )


async def test_in_the_launcher_it_takes_no_thread_that_the_answers_need(planting, seat) -> None:
    """The verb that is asked for reads in a thread of the same loop, as `why` does."""

    async def read(*_: Any) -> dict[str, Any]:
        return await asyncio.to_thread(lambda: {"text": ""})

    threads = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    async with served(planting, answering(seat, STACK, read)) as visit, asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(*(visit.get("/api/verbs/stack?target=trainer/0") for _ in range(4)))
        assert answers == [(200, '{"text":""}\n')] * 4
        assert (await visit.state())["state"]["phase"] == "running"


async def test_questions_to_a_run_that_does_not_answer_are_limited(planting, seat) -> None:
    is_over = asyncio.Event()

    async def wait(*_: Any) -> dict[str, Any]:
        await asyncio.wait_for(is_over.wait(), PATIENCE_S)
        return {}

    seat.limits = ServerLimits(num_requests=8)
    async with served(planting, answering(seat, STACK, wait)) as visit:
        asking = [asyncio.create_task(visit.get("/api/verbs/stack?target=trainer/0")) for _ in range(9)]
        try:
            done, _ = await asyncio.wait(asking, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result()[0] for task in done] == [503]
        finally:
            is_over.set()
        assert sorted(status for status, _ in await asyncio.gather(*asking)) == [200] * 8 + [503]


# -- Prometheus --------------------------------------------------------------------------------------------------------


def test_metrics_are_told_as_prometheus_reads_them() -> None:
    latest = Latest()
    odd = 'roll"out\\\n/1'
    for source, values in (("trainer/0", {"train/loss": 0.5, "train.loss": 0.25}), (odd, {"lag/max": math.nan})):
        point = MetricPoint(source=source, step=3, wall_s=1.0, values={**values, "time/compute": 2.0})
        event = Event(source="buffer", wall_s=1.0, kind="group-dropped", text="x")
        latest.apply(Telemetry(metrics=(point,), events=(event,), dropped={"spans": 2}), 1.0)
    text = prometheus_text(latest.snapshot(5.0))
    escaped = r'"roll\"out\\\n/1"'
    for line in (
        'myxa_train_loss{source="trainer/0"} 0.25', f"myxa_lag_max{{source={escaped}}} nan",
        'myxa_events_total{kind="group-dropped",source="buffer"} 2.0', "myxa_telemetry_dropped_total 4.0",
        'myxa_step{source="trainer/0"} 3.0', 'myxa_time_share{kind="compute",source="trainer/0"} 1.0',
        'myxa_age_s{source="trainer/0"} 4.0',
    ):  # fmt: skip
        assert line in text.splitlines()
    names = [re.split("[{ ]", line)[0] for line in text.splitlines()]
    assert names == sorted(names) and len(set(text.splitlines())) == len(names), "each family is together, no row twice"


@pytest.mark.parametrize(
    ("key", "headers", "status"),
    [
        ("", {}, 200),
        ("", {"Host": "evil.example"}, 421),
        ("", {"Origin": "http://evil.example"}, 403),
        ("", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("k3y", {}, 401),
        ("k3y", {"Authorization": "Bearer k3"}, 401),
        ("k3y", {"Authorization": "Bearer k3y", "Host": "node-7"}, 200),
    ],
)
async def test_e03_no_page_reads_the_metrics_and_a_key_may_be_asked_for(
    key: str, headers: dict[str, str], status: int, planting, seat, monkeypatch
) -> None:
    monkeypatch.setenv(METRICS_KEY_VARIABLE, key)
    async with served(planting, seat) as visit:
        told, text = await visit.get("/metrics", headers=headers, token=False)
        assert (told, "myxa_train_loss" in text) == (status, status == 200)


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


async def test_a_port_that_is_taken_and_a_folder_that_is_no_run_are_refused(planting, seat) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        async with planting.serving(seat) as note:
            with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1") as caught:
                await asked(note, port=other.getsockname()[1])
            assert "another port" in caught.value.remedy
            assert await asked(note), "another one is free"
    assert main(["dashboard", "--run", str(seat.run_dir.parent)]) == 3, "that is no run"
