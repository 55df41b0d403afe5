"""A deadline and a cancellation that meet in one turn of the loop: the cancellation is heard."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from myxa.actors.engines.sglang.http_client import SglangHttp
from myxa.actors.rewards.remote import RemoteReward, remote_options
from myxa.core.completions import Completion
from myxa.core.samples import Message

WITHIN_S = 0.3
ANSWERS = (
    Completion(
        group_id=3, index=0, messages=(Message(role="user", content="2+2?"),), prompt="2+2?", text="4", turns=("4",),
        label="4", metadata={}, num_tokens=1,
    ),
)  # fmt: skip
Call = Callable[[str], Awaitable[object]]


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """It takes every request and answers none."""
    is_over = asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        await is_over.wait()
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", never)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        is_over.set()
        await runner.cleanup()


async def look(url: str) -> object:
    return await _of_a_client(url, lambda http: http.look(within_s=WITHIN_S))


async def post(url: str) -> object:
    return await _of_a_client(url, lambda http: http.post("/pause", {}, within_s=WITHIN_S))


async def _of_a_client(url: str, ask: Callable[[SglangHttp], Awaitable[object]]) -> object:
    http = SglangHttp(url, name="rollout/0", call_s=10)
    http.open()
    try:
        return await ask(http)
    finally:
        await http.close()


async def judge(url: str) -> object:
    options = remote_options({"url": url, "tries": 1}, "reward.args")
    reward = RemoteReward(options, timeout_s=WITHIN_S, takes_group=False)
    try:
        return await reward.ask(ANSWERS)
    finally:
        await reward.close()


async def ends_as(call: Call, url: str, offset_s: float) -> str:
    """How a call ends that is cancelled `offset_s` after its deadline, both while the loop stands still."""
    loop = asyncio.get_running_loop()
    asked = asyncio.ensure_future(call(url))
    loop.call_later(WITHIN_S + offset_s, asked.cancel)
    loop.call_later(WITHIN_S / 2, time.sleep, WITHIN_S)
    done, _ = await asyncio.wait({asked}, timeout=10)
    assert done, "it goes on for ever"
    return "cancelled" if asked.cancelled() else f"{asked.exception() or asked.result()!r}"


@pytest.mark.asyncio
@pytest.mark.parametrize("call", [look, post, judge])
@pytest.mark.parametrize("offset_s", [-0.05, 0.0, 0.02, 0.05])
async def test_a_cancellation_at_the_deadline_is_heard(call, offset_s):
    async with silent_server() as url:
        assert await ends_as(call, url, offset_s) == "cancelled"


@pytest.mark.asyncio
@pytest.mark.parametrize("call", [look, post, judge])
async def test_a_deadline_without_a_cancellation_is_told(call):
    async with silent_server() as url:
        assert re.search("SILENT|failed within 0.3 s|did not answer within 0.3 s", await ends_as(call, url, 5.0))
