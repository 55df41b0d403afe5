"""Who only looks keeps nobody from steering, writes nothing, and whoever is refused is told so, however busy the run is."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from tests.control.control_room import Bench, ask, control_bench, http
from tests.harness.waiting import until

from myxa.core.knobs import AuditRecord
from myxa.launch.control.connection import ConnectionLimits
from myxa.launch.control.dispatcher import MAX_AT_ONCE

pytestmark = pytest.mark.asyncio
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


# -- shares --------------------------------------------------------------------------------------------------------


async def test_as_many_as_look_there_is_room_for_those_who_steer(tmp_path: Path):
    async with (
        control_bench(tmp_path, MANY) as bench,
        callers(bench.view, b'{"verb": "gaze"}\n', MAX_AT_ONCE),
    ):
        await until(lambda: bench.gazes == MAX_AT_ONCE, "all of them look")
        assert (await ask(bench.view, "echo"))["error"]["type"] == "Overloaded"
        assert (await ask(bench.control, "put", value=3))["result"] == 3
        assert [(record.verb, record.result) for record in bench.audit] == [("put", "done")]
        bench.leave.set()


async def test_a_share_is_free_again_when_the_work_is_done_not_when_the_caller_goes(tmp_path: Path):
    async with control_bench(tmp_path, MANY) as bench:
        async with callers(bench.view, b'{"verb": "gaze"}\n', MAX_AT_ONCE):
            await until(lambda: bench.gazes == MAX_AT_ONCE, "all of them look")
        assert (await ask(bench.view, "echo"))["error"]["type"] == "Overloaded"
        bench.leave.set()
        deadline = time.monotonic() + 20
        while not (await ask(bench.view, "echo"))["ok"]:
            assert time.monotonic() < deadline


@asynccontextmanager
async def crowded(folder: Path) -> AsyncGenerator[Bench]:
    """The control socket with nothing left of its share."""
    line = b'{"verb": "slow", "args": {"value": 1}}\n'
    async with control_bench(folder, MANY) as bench, callers(bench.control, line, MAX_AT_ONCE):
        while (await ask(bench.control, "echo"))["ok"]:
            await asyncio.sleep(0.01)
        yield bench
        bench.leave.set()


async def test_refused_and_busy_requests_are_answered_and_the_connection_goes_on(tmp_path: Path):
    async with crowded(tmp_path) as bench:
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


async def test_refusals_of_those_who_only_look_cost_no_line_of_the_audit_log(tmp_path: Path):
    async with control_bench(tmp_path) as bench:
        lines = b'{"verb": "put", "args": {"value": 1}}\n' * 100
        reader, writer = await asyncio.open_unix_connection(str(bench.view))
        writer.write(lines)
        for _ in range(100):
            assert b"only shows" in await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        assert bench.audit == []
        assert bench.dispatcher.counters["refused"] == 100
