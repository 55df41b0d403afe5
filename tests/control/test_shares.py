"""Shares of running requests: callers that look never keep an operator from steering, and refusals are answered."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from tests.control.control_room import ask, control_bench, http
from tests.harness.waiting import until

from myxa.core.knobs import AuditRecord
from myxa.launch.control.connection import ConnectionLimits
from myxa.launch.control.dispatcher import MAX_AT_ONCE

MANY = ConnectionLimits(num_connections=2 * MAX_AT_ONCE)


@asynccontextmanager
async def callers(path: Path, line: bytes, number: int) -> AsyncGenerator[None]:
    """So many connections that asked this and wait for the answer."""
    links = [await asyncio.open_unix_connection(str(path)) for _ in range(number)]
    try:
        for _, writer in links:
            writer.write(line)
        yield
    finally:
        for _, writer in links:
            writer.close()


async def test_callers_who_look_leave_room_to_steer_and_a_share_is_free_once_the_work_is_done(tmp_path: Path):
    async with control_bench(tmp_path, MANY) as bench:
        async with callers(bench.view, b'{"verb": "gaze"}\n', MAX_AT_ONCE):
            await until(lambda: bench.gazes == MAX_AT_ONCE, "all of them look")
            assert (await ask(bench.view, "echo"))["error"]["type"] == "Overloaded"
            assert (await ask(bench.control, "put", value=3))["result"] == 3
            assert [(record.verb, record.result) for record in bench.audit] == [("put", "done")]
        assert (await ask(bench.view, "echo"))["error"]["type"] == "Overloaded", "though the callers went"
        bench.leave.set()
        deadline = time.monotonic() + 20
        while not (await ask(bench.view, "echo"))["ok"]:
            assert time.monotonic() < deadline


async def test_refused_and_busy_requests_are_answered_and_the_connection_goes_on(tmp_path: Path):
    line = b'{"verb": "slow", "args": {"value": 1}}\n'
    async with control_bench(tmp_path, MANY) as bench, callers(bench.control, line, MAX_AT_ONCE):
        while (await ask(bench.control, "echo"))["ok"]:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_unix_connection(str(bench.control))
        for number in range(3):
            writer.write(b'{"id": %d, "verb": "put", "args": {"value": "x"}}\n' % number)
            told = json.loads(await asyncio.wait_for(reader.readline(), 20))
            assert (told["id"], told["error"]["type"]) == (number, "ConfigError")
        writer.write(b'{"id": 3, "verb": "put", "args": {"value": 2}}\n')
        assert json.loads(await asyncio.wait_for(reader.readline(), 20))["error"]["type"] == "Overloaded"
        writer.close()
        status, told = await http(bench.control, "POST /v1/put", b'{"value": "x"}')
        assert (status, told["error"]["type"]) == (400, "ConfigError")
        status, told = await http(bench.control, "POST /v1/put", b'{"value": 2}')
        assert (status, told["error"]["type"]) == (503, "Overloaded")
        assert [(record.verb, record.result) for record in bench.audit] == [("put", "refused")] * 4
        bench.leave.set()


async def test_refusals_faster_than_the_audit_log_takes_them_are_counted(tmp_path: Path):
    async with control_bench(tmp_path, MANY) as bench:
        may_write = threading.Event()
        noted: list[AuditRecord] = []

        def note(record: AuditRecord) -> None:
            assert may_write.wait(30)
            noted.append(record)

        cast(Any, bench.dispatcher)._note = note
        try:
            line = b'{"verb": "put", "args": {"value": "x"}}\n'
            async with callers(bench.control, line, MAX_AT_ONCE + 3):
                await until(lambda: bench.dispatcher.counters["unnoted"] == 3, "three are too many")
                assert bench.dispatcher.counters["refused"] == MAX_AT_ONCE + 3
                may_write.set()
                await until(lambda: len(noted) == MAX_AT_ONCE, "the others are noted")
        finally:
            may_write.set()
