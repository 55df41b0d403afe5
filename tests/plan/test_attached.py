"""D6: attaching to what is no SGLang server, or to nothing, is refused by words within seconds."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.plan.memory_cases import SHAPES

from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.wire import ServerAnswer, attach_fault
from myxa.core.config import RunConfig
from myxa.core.config.learning import MegatronSettings
from myxa.core.errors import EngineError
from myxa.launch.checks.check import CheckedRun
from myxa.launch.checks.node import attached_servers
from myxa.launch.supervisor.placement import place as place_actors

MODEL = {"model_path": "/models/m", "model_type": "qwen3", "weight_version": "0"}
FACTS = {"version": "0.5.17", "context_length": 128, "max_running_requests": 8}
HTML = b"<html><head><title>404 Not Found</title></head><body>nginx/1.25</body></html>"


def answer(status: int, body: bytes | Mapping[str, object], kind: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    return head.encode() + data


def routes(**found: bytes) -> dict[str, bytes]:
    return {f"/{name}": value for name, value in found.items()}


SERVERS: dict[str, tuple[dict[str, bytes] | bytes | None, str]] = {
    "nginx": (answer(404, HTML, "text/html"), "answered 404: <html>.*nginx/1.25.*this is no SGLang server"),
    "vllm": (routes(health=answer(200, b"")), "GET /model_info answered 404: .*this is no SGLang server"),
    "a page for everything": (answer(200, HTML, "text/html"), "answered 200: <html>.*this is no SGLang server"),
    "a list": (answer(200, b"[1]"), "answered 200: .1.*this is no SGLang server"),
    "nothing in it": (answer(200, b""), "answered 200 with nothing: this is no SGLang server"),
    "deep JSON": (answer(200, b"[" * 100_000), "this is no SGLang server"),
    "another key": (answer(401, {"error": "Unauthorized"}), "answered 401: .*it asks for another key -- set engine.key_env"),
    "a redirect": (answer(302, b""), "answered 302"),
    "codes for a terminal": (answer(404, b"\x1b[2J\x1b]0;mine\x07\r\nno"), "answered 404: .2J .0;mine no: this is no SGLang"),
    "another protocol": (b"SSH-2.0-OpenSSH_9.6\r\n", "this is no SGLang server; if it speaks https, write https://"),
    "an old one": (
        routes(health=answer(200, b""), model_info=answer(200, MODEL), server_info=answer(200, FACTS | {"version": "0.4.6"})),
        "it is SGLang 0.4.6, older than 0.5",
    ),
    "another model": (
        routes(
            health=answer(200, b""), model_info=answer(200, MODEL | {"model_type": "llama"}), server_info=answer(200, FACTS)
        ),
        "it serves a model of type 'llama' ./models/m., the run's is of type 'qwen3'",
    ),
}  # fmt: skip


@contextmanager
def server(script: dict[str, bytes] | bytes | None) -> Iterator[str]:
    """Answers every request as the script says; None: accepts and never answers."""
    listening = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def serve(link: socket.socket) -> None:
        with link:
            link.settimeout(5)
            try:
                path = link.recv(65536).decode("latin1").split(" ")[1]
                assert script is not None
                link.sendall(script if isinstance(script, bytes) else script.get(path, answer(404, b"{}")))
            except (OSError, IndexError):
                return

    def accept() -> None:
        while True:
            try:
                link, _ = listening.accept()
            except OSError:
                return
            if script is None:
                kept.append(link)
            else:
                threading.Thread(target=serve, args=(link,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield url_of(listening)
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(5)
        for link in kept:
            link.close()


def bound() -> socket.socket:
    """A place that refuses connections until it listens, and that no other process gets meanwhile."""
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    return place


def url_of(place: socket.socket) -> str:
    return f"http://127.0.0.1:{place.getsockname()[1]}"


def config(*urls: str, model: str) -> RunConfig:
    raw = {
        "model": {"path": model},
        "data": {"train": "d.jsonl"},
        "roles": {"rollout": {"kind": "sglang", "count": 1}},
        "engine": {"attach": list(urls)},
    }
    return RunConfig.model_validate(raw)


def told(url: str, wait_s: float = 0.0, **megatron: object) -> list[tuple[str, bool]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(SHAPES["0.6B"].source)))
        settings = config(url, model=folder).model_copy(update={"megatron": MegatronSettings.model_validate(megatron)})
        run = CheckedRun(settings, place_actors(settings, 1), wait_s=wait_s)
        return [(str(one.error), one.severity == "warning") for one in attached_servers(run)]


def documented() -> dict[str, str]:
    """What answers -> message, of the error cases."""
    lines = (Path(__file__).parents[1] / "error_cases.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if "`engine.attach: <url>" in line]
    return {name: message.strip("`") for name, message in cells}


@pytest.mark.parametrize("name", sorted({*SERVERS, *documented()}))
def test_d06_a_server_of_another_kind_is_refused_by_what_it_answers(name: str) -> None:
    """In the words of the error cases."""
    script, says = SERVERS.get(name, (None, ""))
    with server(script) as url:
        begun = time.monotonic()
        ((text, is_warning),) = told(url)
        assert time.monotonic() - begun < 10
    assert text.startswith(f"engine.attach: {url}: ")
    assert is_warning is (name not in SERVERS), "one that never answers may come"
    assert re.search(says, text), text
    if name in documented():
        pattern = re.escape(documented()[name]).replace("<url>", re.escape(url)).replace(re.escape("..."), ".*")
        assert re.fullmatch(pattern, text), text
        assert text.isprintable()


@pytest.mark.parametrize("name", ["nginx", "another key", "an old one", "another model"])
async def test_d06_an_engine_refuses_it_too_however_long_it_may_wait_for_a_start(name: str) -> None:
    script, says = SERVERS[name]
    with server(script) as url:
        engine = SglangEngine(url, SglangOptions(vocab_size=320, model_type="qwen3", start_s=300.0))
        async with asyncio.timeout(20):
            with pytest.raises(EngineError, match=says):
                await engine.start()
            await engine.close()


def test_a_server_that_fits_is_taken() -> None:
    script = routes(health=answer(200, b""), model_info=answer(200, MODEL), server_info=answer(200, FACTS))
    with server(script) as url:
        assert told(url) == []


async def test_a_server_of_a_version_that_was_not_tried_is_taken_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = FACTS | {"version": "0.6.1"}
    script = routes(health=answer(200, b""), model_info=answer(200, MODEL), server_info=answer(200, facts))
    with server(script) as url:
        ((text, is_warning),) = await asyncio.to_thread(told, url, 0.5)
        engine = SglangEngine(url, SglangOptions(vocab_size=320, model_type="qwen3"))
        await engine.start()
        await engine.close()
    assert is_warning, "also of a run that is started"
    for said in (text, *(record.getMessage() for record in caplog.records if "0.6.1" in record.getMessage())):
        assert all(word in said for word in (url, "0.6.1", "0.5.17", "0.5.23"))
    assert sum("0.6.1" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(("says", "is_taken"), [(True, True), (False, False), (None, False)])
def test_a_server_that_tells_no_experts_is_refused_where_they_are_replayed(says: bool | None, is_taken: bool) -> None:
    facts = FACTS if says is None else FACTS | {"enable_return_routed_experts": says}
    script = routes(health=answer(200, b""), model_info=answer(200, MODEL), server_info=answer(200, facts))
    with server(script) as url:
        found = told(url, routing_replay="rollout")
        assert told(url, routing_replay=True) == []
    assert (not found) is is_taken
    assert all("does not tell the experts" in text and not is_warning for text, is_warning in found)


def test_d06_nothing_there_is_a_warning_of_the_plan_and_ends_a_start() -> None:
    for wait_s in (0.0, 0.5):
        with bound() as place:
            ((text, is_warning),) = told(url_of(place), wait_s)
        assert "GET /model_info: " in text
        assert "Cannot connect to host" in text
        assert text.endswith(" -- start the server, or mend engine.attach")
        assert is_warning is (wait_s == 0)


def test_a_server_that_comes_within_the_wait_is_taken() -> None:
    script = routes(model_info=answer(200, MODEL), server_info=answer(200, FACTS))

    def come() -> None:
        place.listen()
        while True:
            try:
                link, _ = place.accept()
            except OSError:
                return
            with link:
                link.sendall(script.get(link.recv(65536).decode().split(" ")[1], b""))

    with bound() as place:
        timer = threading.Timer(0.6, come)
        timer.daemon = True
        timer.start()
        try:
            assert told(url_of(place), wait_s=30.0) == []
        finally:
            place.shutdown(socket.SHUT_RDWR)
            timer.join(5)


def test_https_on_a_port_of_plain_http_is_told() -> None:
    with server(answer(200, MODEL)) as url:
        ((text, is_warning),) = told(url.replace("http://", "https://"))
    assert "SSL" in text
    assert "if it speaks https" in text
    assert not is_warning


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_server_that_is_loading_may_come(status: int) -> None:
    loading = ServerAnswer("/model_info", status, b"loading")
    fault, remedy = attach_fault(loading, loading)
    assert f"answered {status}: loading" in fault
    assert remedy.startswith("start the server")
    assert loading.may_come
