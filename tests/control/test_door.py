"""The control sockets: HTTP, what is refused, who may what, what is audited, what callers may cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from tests.control.control_room import ask, connect, control_bench, http, request, speak
from tests.harness.waiting import until

from myxa.core.errors import ConfigError, MyxaError
from myxa.launch.control.client import ControlClient, ControlNote
from myxa.launch.control.server import ServerLimits

SLOW = request("POST /slow", b'{"value": 1}')
GAZE = request("GET /gaze")


# -- requests and answers ------------------------------------------------------------------------------------------


async def test_post_takes_json_and_get_a_query_and_the_kernel_says_who_asks(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        status, result = await http(bench.control, "POST /echo", '{"text": "hé", "flag": true}'.encode())
        assert (status, result["text"], result["flag"]) == (200, "hé", True)
        assert (result["who"]["uid"], result["who"]["pid"]) == (os.getuid(), os.getpid()) and result["who"]["user"]
        status, result = await http(bench.control, "GET /echo?number=4&ratio=0.5&flag=true&names=a&names=b%20c")
        assert (status, result["number"], result["ratio"], result["flag"], result["names"]) == (
            200, 4, 0.5, True, ["a", "b c"],
        )  # fmt: skip
        assert (await http(bench.control, "POST /echo"))[0] == 200, "no body means no arguments"


@pytest.mark.parametrize(
    "arguments", [["http://myxa/echo?text=a"], ["--json", '{"text": "a"}', "http://localhost/echo"]]
)
async def test_curl_is_a_client(tmp_path: Path, arguments: list[str]):
    async with control_bench(tmp_path) as bench:
        curl = await asyncio.create_subprocess_exec(
            "curl", "-sS", "--max-time", "20", "--unix-socket", str(bench.control), *arguments,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await curl.communicate()
        assert json.loads(out)["text"] == "a"


async def test_the_client_of_the_commands(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        note = ControlNote(run_dir=str(tmp_path), control=str(bench.control), pid=1)
        client = ControlClient(note)
        assert (await asyncio.to_thread(client.ask, "echo", 20.0, text="x" * 900_000))["text"] == "x" * 900_000
        with pytest.raises(ConfigError, match="1: must be nice -- be nice"):
            await asyncio.to_thread(client.ask, "refuse", value=1)
        with pytest.raises(MyxaError, match="did not answer gaze in time"):
            await asyncio.to_thread(client.ask, "gaze", 0.1)
        ending = asyncio.create_task(asyncio.to_thread(client.ask, "slow", 20.0, value=1))
        await bench.entered.wait()
        await bench.server.close()
        with pytest.raises(MyxaError, match="the run ended before it answered slow"):
            await ending


# -- what is wrong -------------------------------------------------------------------------------------------------

DEEP = b'{"names": ' + b"[" * 40 + b"]" * 40 + b"}"
DEEPER = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
JSON_TYPE = "Content-Type: application/json"
WRONG: list[tuple[str, bytes, tuple[str, ...], int, str]] = [
    ("POST /echo", b"{", (), 400, "that is no JSON"),
    ("POST /echo", b"[]", (), 400, "must be an object"),
    ("POST /echo", b'{"text": "\xff"}', (), 400, "echo: "),
    ("POST /echo", b'{"txet": "a"}', (), 400, "takes no 'txet'"),
    ("POST /echo", b'{"number": "3"}', (), 400, "Expected `int`, got `str`"),
    ("POST /echo", b'{"number": -1099511627777}', (), 400, "number must be at least -1099511627776"),
    ("POST /echo", b'{"ratio": 1e999}', (), 400, "out of range"),
    ("POST /echo", DEEP, (), 400, "got `array`"),
    ("POST /echo", DEEPER, (), 400, "that is no JSON"),
    ("GET /echo?number=three", b"", (), 400, "Expected `int`"),
    ("GET /put?value=3", b"", (), 400, "GET only shows"),  # a link that someone is made to open
    ("POST /refuse", b'{"value": 1}', (), 400, "must be nice"),
    ("GET /crash", b"", (), 500, "ZeroDivisionError"),
    ("POST /elsewhere-unsure", b'{"value": 1}', (), 504, "nobody answered"),
    ("GET /ehco", b"", (), 404, "'ehco' is no verb"),
    ("GET /__class__", b"", (), 404, "is no verb"),
    ("GET /", b"", (), 404, "Not Found"),
    ("GET /v1/echo", b"", (), 404, "Not Found"),
    ("GET /../../etc/passwd", b"", (), 404, "Not Found"),
    ("DELETE /echo", b"", (), 405, "Method Not Allowed"),
    ("PUT /echo", b"{}", (), 405, "Method Not Allowed"),
    # pages of other sites, by way of a forwarded port
    ("POST /put", b'{"value": 3}', ("Content-Type: text/plain",), 415, "application/json"),
    ("POST /put", b'{"value": 3}', ("Content-Type: application/x-www-form-urlencoded",), 415, "application/json"),
    ("POST /put", b'{"value": 3}', (JSON_TYPE, "Origin: http://evil.example"), 403, "another site"),
    ("GET /echo", b"", ("Sec-Fetch-Site: cross-site",), 403, "another site"),
    # sizes, and bodies that do not add up
    ("POST /echo", b'{"text": "' + b"x" * (1 << 20) + b'"}', (), 413, "1048576"),
    ("POST /echo", b"", ("Content-Length: 1000000000000", "Connection: close"), 0, ""),
    ("POST /echo", b"", ("Content-Length: -1",), 400, ""),
    ("POST /echo", b"", ("Transfer-Encoding: chunked\r\n\r\nzz",), 400, ""),
    ("GET /echo", b"", ("X: " + "y" * 9000,), 400, ""),
    ("GET /echo", b"", tuple(f"X{n}: y" for n in range(500)), 400, ""),
    ("GET /echo?text=" + "y" * 9000, b"", (), 400, ""),
]


async def test_what_is_wrong_is_refused_with_a_status_and_a_reason(tmp_path: Path):
    async with control_bench(tmp_path, ServerLimits(request_s=1.0)) as bench:
        for head, body, headers, status, said in WRONG:
            before = sum(bench.server.counters.values())
            answer = await speak(bench.control, request(head, body, *headers))
            top, _, rest = answer.partition(b"\r\n\r\n")
            assert int(top.split()[1]) == (status or 408), (head, answer[:300])
            assert said in rest.decode() and "secret insides" not in rest.decode(), head
            assert not said or json.loads(rest)["error"]["message"]
            assert bench.value == 0
            assert sum(bench.server.counters.values()) > before
            assert (await ask(bench.control, "echo", text="good"))["text"] == "good"


@pytest.mark.parametrize("host", ["evil.example", "myxa.evil.example", "", "0.0.0.0"])
async def test_a_host_that_is_not_ours_is_not_served(tmp_path: Path, host: str):
    async with control_bench(tmp_path) as bench:
        assert (await http(bench.control, "POST /put", b'{"value": 3}', host=host))[0] in (400, 421)
        assert bench.value == 0


@pytest.mark.parametrize(
    "data", [b"\x00\x01\x02\x03\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b'{"verb": "ps"}\n\n']
)
async def test_what_is_no_http_is_refused_and_counted(tmp_path: Path, data: bytes):
    async with control_bench(tmp_path) as bench:
        assert b" 400 " in (await speak(bench.control, data)).splitlines()[0]
        assert bench.server.counters["malformed"] == 1


# -- who may what, and the audit log -------------------------------------------------------------------------------


async def test_the_socket_is_for_its_owner(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        assert bench.control.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []


async def test_a_socket_whose_file_is_removed_is_made_again(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        caller = connect(bench.control)
        caller.sendall(GAZE)
        await until(lambda: bench.gazes == 1, "the caller")
        bench.control.unlink()
        await until(bench.control.exists, "a new socket")
        assert (await ask(bench.control, "echo", text="again"))["text"] == "again"
        bench.leave.set()
        assert b" 200 OK" in await asyncio.to_thread(caller.recv, 100), "a caller that is in stays"
        caller.close()


async def test_what_changes_something_is_noted_whatever_became_of_it(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        await ask(bench.control, "put", value=3, reason="because")
        await ask(bench.control, "refuse", value=4)
        await ask(bench.control, "put", value="x")
        await ask(bench.control, "echo")
        for verb in ("elsewhere", "elsewhere-refuse", "elsewhere-unsure"):
            await ask(bench.control, verb, value=5)
        noted = [(r.verb, r.result, r.arguments.get("value")) for r in bench.audit]
        assert noted == [
            ("put", "done", 3), ("refuse", "refused", 4), ("put", "refused", None), ("elsewhere-unsure", "failed", 5),
        ]  # fmt: skip
        assert (bench.audit[0].reason, bench.audit[0].who.pid) == ("because", os.getpid())


async def test_a_change_is_made_to_its_end_although_the_caller_went(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        _, writer = await asyncio.open_unix_connection(str(bench.control))
        writer.write(SLOW)
        await bench.entered.wait()
        writer.close()
        await asyncio.sleep(0.05)
        bench.leave.set()
        await until(lambda: bench.value == 1, "the change")
        await until(lambda: bench.noted == [("slow", "done")], "the audit")


async def test_closing_ends_everything_that_is_being_served(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        links = [connect(bench.control) for _ in range(2)]
        links[0].sendall(GAZE)
        links[1].sendall(SLOW)
        await bench.entered.wait()
        await until(lambda: bench.gazes == 1, "the look")
        await asyncio.wait_for(bench.server.close(), 10)
        assert bench.value == 0
        for link in links:
            link.close()


# -- what callers may cost -----------------------------------------------------------------------------------------

FEW = ServerLimits(num_requests=4, request_s=1.0)
HALF_OPEN = [
    b"",
    b"GET /ec",
    b"GET /echo HTTP/1.1\r\n",
    b"POST /put HTTP/1.1\r\nHost: myxa\r\nContent-Length: 12\r\n\r\n{",
]


@pytest.mark.parametrize("half", HALF_OPEN)
async def test_half_open_connections_are_closed_in_time(tmp_path: Path, half: bytes):
    async with control_bench(tmp_path, FEW) as bench:
        started = time.monotonic()
        answer = await speak(bench.control, half)
        assert time.monotonic() - started < 10
        assert answer == b"" or b" 408 " in answer.splitlines()[0]
        assert bench.value == 0


async def test_a_drip_does_not_keep_a_connection(tmp_path: Path):
    async with control_bench(tmp_path, FEW) as bench:
        reader, writer = await asyncio.open_unix_connection(str(bench.control))
        writer.write(b"GET /echo HTTP/1.1\r\n")
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and time.monotonic() - started < 20:
                writer.write(b"x")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.05)
        assert time.monotonic() - started < 10
        writer.close()


@pytest.mark.parametrize("half", HALF_OPEN)
async def test_e05_half_open_connections_keep_nobody_out(tmp_path: Path, half: bytes):
    async with control_bench(tmp_path) as bench:
        links: list[socket.socket] = []
        for _ in range(100):
            links.append(await asyncio.to_thread(connect, bench.control))
            links[-1].sendall(half)
        started = time.monotonic()
        for _ in range(3):
            assert (await ask(bench.control, "echo", text="x"))["text"] == "x"
        assert time.monotonic() - started < 5
        for link in links:
            link.close()


@asynccontextmanager
async def callers(path: Path, data: bytes, number: int) -> AsyncGenerator[None]:
    """So many connections that asked this and wait for the answer."""
    links = [await asyncio.open_unix_connection(str(path)) for _ in range(number)]
    try:
        for _, writer in links:
            writer.write(data)
        yield
    finally:
        for _, writer in links:
            writer.close()


async def test_readers_leave_room_to_steer_and_room_is_free_once_the_work_is_done(tmp_path: Path):
    async with control_bench(tmp_path, FEW) as bench:
        async with callers(bench.control, request("GET /gaze"), 4):
            await until(lambda: bench.gazes == 4, "all of them look")
            assert (await http(bench.control, "GET /echo"))[0] == 503
            assert (await ask(bench.control, "put", value=3)) == 3
        assert (await ask(bench.control, "echo"))["error"]["type"] == "Overloaded", "though the callers went"
        bench.leave.set()
        await until_served(bench.control)


async def until_served(path: Path) -> None:
    deadline = time.monotonic() + 20
    while "error" in await ask(path, "echo"):
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "first", [SLOW, request("POST /echo", b"", "Transfer-Encoding: chunked")], ids=["ahead", "body"]
)
async def test_what_is_sent_without_end_is_not_kept(tmp_path: Path, first: bytes):
    """Requests that are sent while one is served, and a body without an end."""
    more = SLOW * 2000 if first is SLOW else b"10000\r\n" + b"x" * 65536 + b"\r\n"
    async with control_bench(tmp_path) as bench:
        link, loop = connect(bench.control), asyncio.get_running_loop()
        link.setblocking(False)
        before, deadline = psutil.Process().memory_info().rss, time.monotonic() + 10
        try:
            await loop.sock_sendall(link, first)
            while time.monotonic() < deadline:
                await asyncio.wait_for(loop.sock_sendall(link, more), 1.0)
        except (OSError, TimeoutError):
            pass
        finally:
            link.close()
        assert time.monotonic() < deadline, "it takes no more, or is closed"
        assert psutil.Process().memory_info().rss < before + (64 << 20)
        bench.leave.set()
        assert (await ask(bench.control, "echo", text="x"))["text"] == "x"
