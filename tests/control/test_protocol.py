"""The control sockets: both framings on one socket, what is refused, what peers may cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path

import pytest
from tests.control.control_room import ask, connect, control_bench, http, speak
from tests.harness.waiting import until

from myxa.launch.control.connection import ConnectionLimits

COUNT_LINE = b'{"verb": "count", "args": {"until": %d}}\n'
COUNT_HTTP = b"GET /v1/count?until=%d HTTP/1.1\r\nHost: x\r\n\r\n"


# -- both framings -------------------------------------------------------------------------------------------------


async def test_lines_are_answered_in_order_with_their_ids(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        lines = b"".join(b'{"id": %d, "verb": "echo", "args": {"number": %d}}\n' % (n, n) for n in range(200))
        answers = [json.loads(line) for line in (await speak(bench.control, lines)).splitlines()]
        assert [(a["id"], a["ok"], a["result"]["number"]) for a in answers] == [(n, True, n) for n in range(200)]
        answer = await speak(bench.control, b'\n \r\n{"verb": "echo"}\n\n\r\n{"verb": "echo", "id": "b"}')
        assert [json.loads(line)["id"] for line in answer.splitlines()] == [None, "b"], "the last needs no newline"
        result = (await ask(bench.control, "echo", text="hé", names=["a", "b"]))["result"]
        assert (result["text"], result["names"]) == ("hé", ["a", "b"])
        who = result["who"]
        assert (who["uid"], who["pid"], who["via"]) == (os.getuid(), os.getpid(), "socket"), "the kernel says who it is"
        assert who["user"] and who["host"]


async def test_http_posts_json_and_gets_by_query_and_curl_is_a_client(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        status, answer = await http(bench.control, "POST /v1/echo", b'{"text": "x", "flag": true}')
        assert (status, answer["result"]["text"], answer["result"]["flag"]) == (200, "x", True)
        status, answer = await http(bench.control, "GET /v1/echo?number=4&ratio=0.5&flag=true&names=a&names=b%20c")
        result = answer["result"]
        assert (status, result["number"], result["ratio"], result["flag"], result["names"]) == (
            200, 4, 0.5, True, ["a", "b c"],
        )  # fmt: skip
        assert result["who"]["via"] == "http"
        for arguments in (["http://x/v1/echo?text=a"], ["-d", '{"text": "a"}', "http://x/v1/echo"]):
            curl = await asyncio.create_subprocess_exec(
                "curl", "-sS", "--max-time", "20", "--unix-socket", str(bench.control), *arguments,
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _ = await curl.communicate()
            assert json.loads(out)["result"]["text"] == "a"


async def test_a_stream_by_lines_and_by_http(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        reader, writer = await asyncio.open_unix_connection(str(bench.control))
        writer.write(b'{"id": 1, "verb": "count"}\n')
        lines = [json.loads(line) for line in (await reader.read()).splitlines()]
        writer.close()
        assert [line["item"]["number"] for line in lines[:-1]] == [0, 1, 2]
        assert lines[-1] == {"id": 1, "ok": True, "end": True}
        answer = await speak(bench.control, COUNT_HTTP % 3, ends=False)
        assert answer.count(b'"item"') == 3
        assert b'"end":true' in answer
        await until(lambda: bench.streams == 0, "the streams end")


@pytest.mark.parametrize(
    ("framing", "how"),
    [("lines", "closes"), ("lines", "half-closes"), ("lines", "speaks"), ("http", "closes"), ("http", "half-closes")],
)
async def test_a_stream_ends_when_the_caller_goes(tmp_path: Path, framing: str, how: str):
    async with control_bench(tmp_path) as bench:
        reader, writer = await asyncio.open_unix_connection(str(bench.control))
        writer.write((COUNT_LINE if framing == "lines" else COUNT_HTTP) % 1_000_000)
        assert await reader.read(10)
        await until(lambda: bench.streams == 1, "the stream goes")
        if how == "closes":
            writer.close()
        elif how == "half-closes":
            writer.write_eof()
        else:
            writer.write(b"\n")
        await until(lambda: bench.streams == 0, "the stream ends")
        writer.close()


# -- errors --------------------------------------------------------------------------------------------------------

WRONG_LINES = [
    (b"{}", "missing required field `verb`"),
    (b"{nonsense", "that is no request"),
    (b'{"verb": 3}', "that is no request"),
    (b'{"verb": "echo", "more": 1}', "unknown field `more`"),
    (b'{"verb": "ehco"}', "'ehco' is no verb"),
    (b'{"verb": "echo", "args": {"txet": "a"}}', "unknown field `txet`"),
    (b'{"verb": "echo", "args": {"number": "3"}}', "Expected `int`, got `str`"),
    (b'{"verb": "echo", "args": {"number": -1099511627777}}', "echo: number must be at least -1099511627776"),
    (b'{"verb": "echo", "args": [1]}', "Expected `object`, got `array`"),
    (b'{"verb": "echo", "args": {"names": ' + b"[" * 40 + b"]" * 40 + b"}}", "nests more than"),
    (b'{"verb": "echo", "args": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "nests more than"),
    (b'{"verb": "echo", "args": {"ratio": 1e999}}', "out of range"),
    (b'{"verb": "echo", "args": {"text": "\xff"}}', "echo: "),
    (b'{"verb": "__class__"}', "is no verb"),
    (b'{"verb": "crash"}', "ZeroDivisionError"),
]


async def test_what_is_wrong_is_said_and_the_connection_goes_on(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        for number, (line, said) in enumerate(WRONG_LINES, start=1):
            answers = await speak(bench.control, line + b'\n{"verb": "echo", "id": 2}\n')
            wrong, good = (json.loads(a) for a in answers.splitlines())
            assert said in wrong["error"]["message"]
            assert "secret insides" not in json.dumps(wrong)
            assert wrong["error"]["remedy"]
            assert (good["ok"], good["id"]) == (True, 2)
            assert sum(bench.server.counters.values()) == number
        assert bench.value == 0


WRONG_HTTP = [
    ("GET /v1/put?value=3", b"", 400),
    ("POST /v1/echo", b"{", 400),
    ("POST /v1/echo", b"[]", 400),
    ("POST /v1/echo", b'{"number": "3"}', 400),
    ("GET /v1/echo?number=three", b"", 400),
    ("DELETE /v1/echo", b"", 405),
    ("PUT /v1/echo", b"{}", 405),
    ("GET /", b"", 404),
    ("GET /v1/echo/more", b"", 404),
    ("GET /../../etc/passwd", b"", 404),
    ("GET /v1/crash", b"", 500),
    ("POST /v1/refuse", b'{"value": 1}', 400),
    ("POST /v1/elsewhere-unsure", b'{"value": 1}', 504),
]


async def test_wrong_http_is_answered_with_a_status_and_a_reason(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        for head, body, status in WRONG_HTTP:
            told, answer = await http(bench.control, head, body)
            assert (told, bool(answer["error"]["message"])) == (status, True), head
        assert bench.value == 0, "nor does a link that someone is made to open"
        before = bench.server.counters["malformed"]
        for data in (b"\x00\x01\x02\x03\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"[1]\n\n\n"):
            assert b" 400 " in (await speak(bench.control, data, ends=False)).splitlines()[0]
        assert bench.server.counters["malformed"] == before + 4
        assert (await ask(bench.control, "echo"))["ok"]


# -- who may what --------------------------------------------------------------------------------------------------


async def test_the_view_socket_only_shows(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        assert (await ask(bench.view, "echo", text="x"))["result"]["text"] == "x"
        answer = await ask(bench.view, "put", value=3)
        assert "only shows" in answer["error"]["message"]
        status, answer = await http(bench.view, "POST /v1/put", b'{"value": 3}')
        assert status == 400
        assert bench.value == 0
        assert bench.dispatcher.counters["refused"] == 2
        assert bench.audit == [], "whoever may only look cannot make the audit log grow"


@pytest.mark.parametrize("gid", [-1, os.getgid()], ids=["owner", "group"])
async def test_sockets_are_for_their_owner_or_a_group_that_may_look(tmp_path: Path, gid: int):
    async with control_bench(tmp_path, gid=gid) as bench:
        modes = [path.stat().st_mode & 0o777 for path in (bench.control, bench.view)]
        assert modes == [0o600, 0o600 if gid < 0 else 0o660]
        assert gid < 0 or bench.view.stat().st_gid == gid
    assert list(tmp_path.iterdir()) == []


# -- audit ---------------------------------------------------------------------------------------------------------


async def test_what_changes_something_is_noted_whatever_became_of_it(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        await ask(bench.control, "put", value=3, reason="because")
        await ask(bench.control, "refuse", value=4)
        await ask(bench.control, "put", value="x")
        await ask(bench.control, "echo")
        await ask(bench.control, "elsewhere", value=5)
        await ask(bench.control, "elsewhere-refuse", value=5)
        await ask(bench.control, "elsewhere-unsure", value=5)
        noted = [(r.verb, r.result, r.arguments.get("value")) for r in bench.audit]
        assert noted == [
            ("put", "done", 3),
            ("refuse", "refused", 4),
            ("put", "refused", None),
            ("elsewhere-unsure", "failed", 5),
        ]
        assert bench.audit[0].reason == "because"
        assert bench.audit[0].who.pid == os.getpid()


async def test_a_change_is_made_to_its_end_although_the_caller_went(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        for say in (b'{"verb": "slow", "args": {"value": 8}}\n',
                    b'POST /v1/slow HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\n\r\n{"value": 8}'):  # fmt: skip
            bench.value = 0
            bench.entered.clear()
            bench.leave.clear()
            _, writer = await asyncio.open_unix_connection(str(bench.control))
            writer.write(say)
            await bench.entered.wait()
            writer.close()
            await asyncio.sleep(0.05)
            bench.leave.set()
            await until(lambda: bench.value == 8, "the change")
        await until(lambda: len(bench.audit) == 2, "the audit")


# -- limits --------------------------------------------------------------------------------------------------------


async def test_a_request_that_is_too_long_is_refused(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        long = b'{"verb": "echo", "args": {"text": "' + b"x" * (1 << 20) + b'"}}\n'
        answer = await speak(bench.control, long, ends=False)
        assert b"longer than 1048576 bytes" in answer
        status, _ = await http(bench.control, "POST /v1/echo", long)
        assert status == 413
        assert await flood(bench.control, b'{"verb": "' + b"x" * 65536, b"x" * 65536) < 16 << 20, "an endless line"
        assert (await ask(bench.control, "echo"))["ok"]


async def test_what_is_sent_ahead_is_bounded(tmp_path: Path):
    line = b'{"verb": "slow", "args": {"value": 1}}\n'
    head = b'POST /v1/slow HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\n\r\n{"value": 1}'
    for limits, num_cut_off in ((ConnectionLimits(), 0), (ConnectionLimits(ahead_bytes=100_000), 1)):
        async with control_bench(tmp_path, limits) as bench:
            assert await flood(bench.control, line, line * 2000) < 16 << 20
            assert await flood(bench.control, head, head * 500) < 16 << 20
            counters = bench.server.counters
            while counters["flood"] < num_cut_off:
                await asyncio.sleep(0.01)
            bench.leave.set()
            assert (await ask(bench.control, "echo"))["ok"]


async def flood(path: Path, first: bytes, more: bytes) -> int:
    """Write until the other side closes or takes no more for a second; bytes that it took."""
    link = connect(path)
    link.setblocking(False)
    loop = asyncio.get_running_loop()
    sent = 0
    try:
        await loop.sock_sendall(link, first)
        while sent < 64 << 20:
            await asyncio.wait_for(loop.sock_sendall(link, more), 1.0)
            sent += len(more)
    except (OSError, TimeoutError):
        pass
    finally:
        link.close()
    return sent


async def test_slow_writers_and_idle_callers_are_cut_off(tmp_path: Path):
    limits = ConnectionLimits(first_s=1.0, idle_s=1.0, request_s=0.5)
    async with control_bench(tmp_path, limits) as bench:
        asked = connect(bench.control)
        asked.sendall(b'{"verb": "echo", "args": {"value": 0}}\n')
        for first in (b"", b'{"verb"', b"GET /v1", b"POST /v1/put HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"):
            assert await speak(bench.control, first, ends=False) == b""
        await until(lambda: bench.server.counters["idle"] == 1, "idle")
        await until(lambda: bench.server.counters["slow_writer"] == 3, "slow writers")
        await until(lambda: bench.server.counters["silent"] == 1, "silent")
        assert bench.value == 0
        asked.close()


async def test_a_drip_does_not_keep_a_connection(tmp_path: Path):
    async with control_bench(tmp_path, ConnectionLimits(idle_s=5.0, request_s=0.5)) as bench:
        reader, writer = await asyncio.open_unix_connection(str(bench.control))
        writer.write(b"GET /v1/echo HTTP/1.1\r\n")
        started = time.monotonic()
        while not reader.at_eof() and time.monotonic() - started < 20:
            try:
                writer.write(b"x")
                await asyncio.wait_for(reader.read(1), 0.05)
            except TimeoutError:
                continue
            except ConnectionError:
                break
        writer.close()
        await until(lambda: bench.server.counters["slow_writer"] == 1, "cut off")


async def test_callers_that_do_not_read_are_cut_off(tmp_path: Path):
    async with control_bench(tmp_path, ConnectionLimits(read_s=0.5)) as bench:
        links = [connect(bench.control) for _ in range(2)]
        links[0].sendall(b'{"verb": "count", "args": {"until": 999, "bytes": 1000000}}\n')
        links[1].sendall(b"GET /v1/count?until=999&bytes=1000000 HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: bench.server.counters["slow_reader"] == 2, "cut off")
        await until(lambda: bench.streams == 0, "the streams end")
        for link in links:
            link.close()


async def test_the_number_of_connections_is_bounded_for_each_socket(tmp_path: Path):
    async with control_bench(tmp_path, ConnectionLimits(num_connections=4)) as bench:
        links = [connect(bench.view) for _ in range(4)]
        for link in links:
            link.sendall(COUNT_LINE % 1_000_000)
        await until(lambda: bench.streams == 4, "streams")
        answer = json.loads(await speak(bench.view, b"", ends=False))
        assert answer["error"]["type"] == "Overloaded"
        assert (await ask(bench.control, "echo"))["ok"], "the other socket is not touched by that"
        links.pop().close()
        await until(lambda: bench.server.counters["too_many"] == 1, "counted")
        await until(lambda: bench.streams == 3, "one is over")
        assert (await ask(bench.view, "echo"))["ok"]
        for link in links:
            link.close()


@pytest.mark.parametrize(
    "half", [b"", b'{"verb": "ec', b"GET /v1/ec", b"POST /v1/p HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]
)
async def test_e05_half_open_connections_keep_nobody_out(tmp_path: Path, half: bytes):
    async with control_bench(tmp_path) as bench:
        links = [await asyncio.to_thread(connect, bench.control) for _ in range(2 * ConnectionLimits().num_connections)]
        for link in links:
            with contextlib.suppress(OSError):  # it was shown out for a later one
                link.sendall(half)
        await asyncio.sleep(0.2)
        started = time.monotonic()
        for _ in range(3):
            assert (await ask(bench.control, "echo"))["ok"]
        assert time.monotonic() - started < 2
        assert bench.server.counters["silent"] >= ConnectionLimits().num_connections
        assert not bench.server.counters["too_many"]
        for link in links:
            link.close()


async def test_room_is_made_by_the_oldest_silent_one_and_by_none_that_is_served(tmp_path: Path):
    async with control_bench(tmp_path, ConnectionLimits(num_connections=3)) as bench:
        stream, used, silent = (connect(bench.control) for _ in range(3))
        stream.sendall(COUNT_LINE % 1_000_000)
        used.sendall(b'{"verb": "echo", "args": {"value": 0}}\n')
        await until(lambda: bench.streams == 1, "the stream")
        await asyncio.sleep(0.1)
        assert (await ask(bench.control, "echo"))["ok"]
        await until(lambda: bench.server.counters["silent"] == 1, "one goes")
        for link in (silent, used):
            link.settimeout(5)
        assert await asyncio.to_thread(silent.recv, 1) == b"", "the one that never asked, although it is the newest"
        assert await asyncio.to_thread(used.recv, 1 << 16)
        used.sendall(b'{"verb": "echo", "args": {"value": 0}}\n')
        assert await asyncio.to_thread(used.recv, 1 << 16), "it is still served"
        assert bench.streams == 1
        for link in (stream, used, silent):
            link.close()


async def test_closing_ends_everything_that_is_in_hand(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        streams = [connect(bench.control) for _ in range(2)]
        streams[0].sendall(COUNT_LINE % 1_000_000)
        streams[1].sendall(COUNT_HTTP % 1_000_000)
        slow = connect(bench.control)
        slow.sendall(b'{"verb": "slow", "args": {"value": 1}}\n')
        await bench.entered.wait()
        await until(lambda: bench.streams == 2, "streams")
        await asyncio.wait_for(bench.server.close(), 10)
        assert bench.streams == 0
        assert bench.value == 0
        for link in (*streams, slow):
            link.close()
