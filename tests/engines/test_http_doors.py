"""E3: who is served at our HTTP doors: programs of this machine, or whoever has the key; never a page of another site."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from myxa.actors.engines.embedded.engine import EmbeddedOptions
from myxa.actors.engines.http_server import serve
from myxa.actors.http_guard import Head, HttpAccess, is_loopback
from myxa.core.errors import ConfigError
from myxa.launch.cli import make_parser
from myxa.launch.commands.offline import read_key

OPTIONS = EmbeddedOptions(max_running=4, stream_interval=4, seed=5)
KEY = "a-key-of-some-length"
CURL = Head("POST", "127.0.0.1:30000", content_type="application/json")
JSON = {"Content-Type": "application/json"}
STEERING = (
    "/generate", "/pause_generation", "/continue_generation", "/abort_request", "/update_weights_from_disk",
    "/update_weight_version", "/init_weights_update_group", "/update_weights_from_distributed",
    "/destroy_weights_update_group", "/get_weights_by_name", "/flush_cache",
)  # fmt: skip
PAGES = {
    "another name": ({"Host": "evil.example:30000"}, 421),
    "our name as part of another": ({"Host": "127.0.0.1.evil.example"}, 421),
    "every address": ({"Host": "0.0.0.0:1"}, 421), "another site": ({"Origin": "http://evil.example"}, 403),
    "another port of ours": ({"Origin": "http://127.0.0.1:1"}, 403), "a sandboxed frame": ({"Origin": "null"}, 403),
    "no address at all": ({"Origin": "http://[::1"}, 403),
    "an image": ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    "a neighbour": ({"Sec-Fetch-Site": "same-site"}, 403), "text": ({"Content-Type": "text/plain;charset=UTF-8"}, 415),
    "a form": ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    "a form with files": ({"Content-Type": "Multipart/Form-Data; boundary=x"}, 415),
}  # fmt: skip


async def answered(port: int, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, dict]:
    """Status and JSON object of one raw request, so that every header is what the test says."""
    lines = {"Host": f"127.0.0.1:{port}", "Content-Length": str(len(body)), "Connection": "close"} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    raw = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    top, _, rest = raw.partition(b"\r\n\r\n")
    is_json = b"application/json" in top and rest
    return int(top.split()[1]), json.loads(rest) if is_json else {}


async def test_e03_no_page_of_another_site_steers_or_reads_an_engine(folders):
    async with serve(folders[0], options=OPTIONS) as served:
        for headers, status in PAGES.values():
            for path in STEERING:
                got, answer = await answered(served.port, "POST", path, JSON | headers, b"{}")
                assert (got, answer["error"]["code"]) == (status, status), (path, headers)
            if status != 415:
                for path in ("/server_info", "/model_info", "/flush_cache", "/health"):
                    assert (await answered(served.port, "GET", path, headers))[0] == status
        _, info = await answered(served.port, "GET", "/server_info", {})
        assert info["internal_states"][0]["is_paused"] is False
        assert info["internal_states"][0]["weight_version"] == "0"


async def test_programs_of_this_machine_need_no_settings(folders):
    body = json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}).encode()
    async with serve(folders[0], options=OPTIONS) as served:
        for headers in (
            JSON, {}, JSON | {"Host": "localhost"}, JSON | {"Host": "[::1]:9"},
            JSON | {"Authorization": "Bearer whatever-an-sdk-sends"},
            {"Content-Type": "application/json; charset=utf-8"},
            JSON | {"Origin": f"http://127.0.0.1:{served.port}", "Sec-Fetch-Site": "same-origin"},
        ):  # fmt: skip
            assert (await answered(served.port, "POST", "/generate", headers, body))[0] == 200, headers


async def test_e03_a_key_is_asked_for_where_there_is_one(folders):
    body = json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}).encode()
    async with serve(folders[0], options=OPTIONS, key=KEY) as served:
        for wrong in ("", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer \xff"):
            status, answer = await answered(served.port, "POST", "/generate", JSON | {"Authorization": wrong}, body)
            assert (status, "Authorization: Bearer" in answer["error"]["message"]) == (401, True)
        right = JSON | {"Authorization": f"Bearer {KEY}"}
        assert (await answered(served.port, "POST", "/generate", right, body))[0] == 200
        far = right | {"Host": "engine-3.cluster:30000"}
        assert (await answered(served.port, "POST", "/generate", far, body))[0] == 200
        assert (await answered(served.port, "GET", "/health", {"Host": "engine-3.cluster"}))[0] == 200


async def test_e03_no_engine_listens_to_other_machines_without_a_key(folders):
    for host in ("0.0.0.0", "::", "10.1.2.3", "gpu-7"):
        with pytest.raises(ConfigError, match="other machines reach this address.*--key-env"):
            async with serve(folders[0], host, options=OPTIONS):
                pass


async def test_e03_connections_that_say_nothing_are_ended_and_streams_are_not(folders, monkeypatch):
    monkeypatch.setattr("myxa.actors.engines.http_server.HEAD_S", 0.4)
    async with serve(folders[0], options=OPTIONS) as served:
        silent = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(20)]
        for _, writer in silent[10:]:
            writer.write(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        for one, _ in silent:
            assert await asyncio.wait_for(one.read(), 10) == b""
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        for each in (writer, *(writer for _, writer in silent)):
            each.close()


async def test_e03_half_sent_bodies_and_unread_streams_hold_nobody_up_and_end(folders, monkeypatch):
    monkeypatch.setattr("myxa.actors.engines.http_bodies.BODY_S", 1.0)
    stream = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    good = json.dumps({"input_ids": [2], "sampling_params": {"max_new_tokens": 2}}).encode()
    async with serve(folders[0], options=OPTIONS) as served:

        async def begun(body: bytes, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {size}\r\n\r\n"
            writer.write(head.encode() + body)
            return reader, writer

        body = json.dumps(stream).encode()
        unread = [await begun(body, len(body)) for _ in range(12)]
        half = [await begun(b"{", 100) for _ in range(30)]
        async with asyncio.timeout(20):
            assert (await answered(served.port, "GET", "/health", {}))[0] == 200
            status, answer = await answered(served.port, "POST", "/generate", JSON, good)
            assert (status, len(answer["output_ids"])) == (200, 2)
            for reader, _ in half:
                assert b"the body did not arrive within 1 s" in await reader.readuntil(b"}}")
        for _, writer in (*half, *unread):
            writer.close()
        assert (await answered(served.port, "POST", "/generate", JSON, good))[0] == 200


def test_a_key_comes_from_a_variable_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENGINE_KEY", KEY)
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "two").write_text("two words")

    def key_of(*given: str) -> str:
        return read_key(make_parser().parse_args(["engine", "serve", "m", *given]))

    assert [key_of("--key-env", "ENGINE_KEY"), key_of("--key-file", "key"), key_of()] == [KEY, KEY, ""]
    for given, says in (
        (["--key-env", "NO_SUCH_VARIABLE"], "--key-env: the variable NO_SUCH_VARIABLE holds no key"),
        (["--key-file", "absent"], "--key-file: absent cannot be read: .*No such file"),
        (["--key-file", "/dev/zero"], "not a regular file"),
        (["--key-file", "two"], "something else than one key"),
        (["--key-env", "A", "--key-file", "two"], "both given"),
    ):
        with pytest.raises(ConfigError, match=says):
            key_of(*given)


def test_every_head_is_judged_alike_at_every_door() -> None:
    door = HttpAccess()
    assert door.refusal(CURL, "/x") is None
    assert door.refusal(replace(CURL, content_type=""), "/x") is None
    assert HttpAccess(host="127.0.0.7").refusal(replace(CURL, host="127.0.0.7:1"), "/x") is None
    assert door.refusal(replace(CURL, host="127.0.0.7:1"), "/x") is not None
    assert HttpAccess(KEY, open_paths=("/health",)).refusal(replace(CURL, host="x"), "/healthy") is None
    assert HttpAccess(KEY).refusal(CURL, "/health") is not None


def test_loopback_addresses() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "LOCALHOST"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "localhost.evil", ""))
