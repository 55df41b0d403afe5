"""The reward `remote`, against a real server: what is asked, what may be answered, and what is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from tests.harness.fake_sglang import serving
from tests.rewards.world import Server, refuses, rewarder

from myxa.actors.rewards.remote import MAX_ANSWER_BYTES, remote_options
from myxa.actors.rewards.rewarder import Rewarder
from myxa.algos.rewards.outcome import RewardOutcome
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.errors import ConfigError, UserCodeError
from myxa.core.samples import Message


@asynccontextmanager
async def judge(*replies: Any) -> AsyncIterator[Server]:
    here = Server(*replies)
    async with serving(here.answer) as url:
        here.url = f"{url}/score"
        yield here


def remote(url: str, args: dict[str, Any] | None = None, **settings: Any) -> AbstractAsyncContextManager[Rewarder]:
    return rewarder("remote", args={"url": url, "backoff_s": 0.0} | (args or {}), **settings)


def answer(text: str = "four", index: int = 0) -> Completion:
    return Completion(
        group_id=3, index=index, messages=(Message(role="user", content="2+2?"),), prompt="2+2?", text=text,
        turns=(text,), label="4", metadata={"level": 1}, num_tokens=7,
    )  # fmt: skip


async def test_an_answer_is_posted_and_its_judgement_checked() -> None:
    async with judge(0.5, {"reward": 1, "style": 0.25}) as there, remote(there.url) as made:
        assert await made.score(answer()) == RewardOutcome(0.5)
        assert await made.score(answer()) == RewardOutcome(1.0, {"style": 0.25})
        assert there.asked[0] == {
            "group_id": 3, "index": 0, "messages": [{"role": "user", "content": "2+2?"}], "prompt": "2+2?",
            "response": "four", "turns": ["four"], "label": "4", "metadata": {"level": 1}, "finish": "stop",
            "num_tokens": 7, "conversation": [], "reward": None, "sample_metadata": {},
        }  # fmt: skip


async def test_only_https_is_asked_by_way_of_the_environments_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service in the cluster (http) is not behind it, whatever a cluster's environment says."""
    asked: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 403 no\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server, judge(0.5) as here:
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, "http://{}:{}".format(*server.sockets[0].getsockname()))
        monkeypatch.delenv("no_proxy", raising=False)
        async with remote(here.url) as rewards:
            assert (await rewards.score(answer())).value == 0.5
        async with remote("https://judge.invalid/score", {"tries": 1}) as rewards:
            with pytest.raises(UserCodeError):
                await rewards.score(answer())
    assert asked == [b"CONNECT judge.invalid:443 HTTP/1.1\r\n"]


async def test_a_group_is_posted_as_a_whole() -> None:
    async with judge([0.5, {"reward": 1}], [1.0]) as there, remote(there.url, scope="group") as made:
        group = [answer("a", 0), answer("b", 1)]
        assert await made.score_group(group) == (RewardOutcome(0.5), RewardOutcome(1.0))
        assert [one["response"] for one in there.asked[0]["answers"]] == ["a", "b"]
        with pytest.raises(UserCodeError, match=r'"remote" returned 1 rewards for 2 answers \(group 3\)'):
            await made.score_group(group)


async def test_what_may_be_over_soon_is_tried_again() -> None:
    async def late(request: web.Request) -> web.Response:
        await asyncio.sleep(4)
        return web.json_response(0.0)

    async def lost(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.json_response(0.0)

    replies = (refuses(503), refuses(429), late, lost, 1.0)
    async with judge(*replies) as there, remote(there.url, {"tries": 5}, timeout_s=1.5) as made:
        assert (await made.score(answer())).value == 1.0
        assert (len(there.asked), made.num_errors) == (5, 0)


@pytest.mark.parametrize(("reply", "num_asked", "said"), [
    (refuses(500), 3, "answered 500: no, the last of 3 tries (group 3, sample 0)"),
    (refuses(404), 1, "answered 404: no (group 3, sample 0)"),
    (refuses(307), 1, "answered 307: no"), ("good", 1, "returned a value of type str, not a number"),
    ({"score": 1}, 1, "returned a dict without \"reward\"; it has 'score'"),
    (None, 1, "returned a value of type NoneType"),
    (web.Response(text="{"), 1, "answered with what is no JSON: '{'"),
    (web.Response(text="NaN"), 1, "no JSON"), (web.Response(body=b"\xff"), 1, "no JSON"),
    (web.Response(body=b"1" * (MAX_ANSWER_BYTES + 1)), 1, f"answered with more than {MAX_ANSWER_BYTES} bytes"),
])  # fmt: skip
async def test_what_is_wrong_is_told_with_the_address(reply: Any, num_asked: int, said: str) -> None:
    async with judge(reply) as there, remote(there.url) as made:
        with pytest.raises(UserCodeError) as caught:
            await made.score(answer())
        assert said in caught.value.message
        assert there.url in caught.value.message or "returned" in said
        assert (len(there.asked), made.num_errors) == (num_asked, 1)


async def test_nobody_there_is_an_error_and_then_an_outage() -> None:
    async with judge(1.0) as there, remote(there.url, {"tries": 2}, pause_after=2, cool_down_s=0.05) as made:
        await made.score(answer())
        there.replies = [refuses(503)]
        with pytest.raises(UserCodeError, match="the last of 2 tries"):
            await made.score(answer())
        waiting = asyncio.ensure_future(made.score(Completion(group_id=4, index=0, messages=(), prompt="", text="")))
        async with asyncio.timeout(10):
            while not made.gauges()["reward/is_paused"]:
                await asyncio.sleep(0.01)
        there.replies = [1.0]
        assert (await waiting).value == 1.0, "it waits for the service, and is not dropped"
    async with remote("http://127.0.0.1:1/none", {"tries": 1}) as made:
        with pytest.raises(UserCodeError, match="http://127.0.0.1:1/none cannot be asked: ClientConnectorError"):
            await made.score(answer())


async def test_no_more_calls_at_a_time_than_allowed() -> None:
    may_go, entered = asyncio.Event(), asyncio.Semaphore(0)

    async def waits(request: web.Request) -> web.Response:
        entered.release()
        await may_go.wait()
        return web.json_response(1.0)

    async with judge(waits) as there, remote(there.url, {"max_calls": 2}) as made:
        scores = [asyncio.ensure_future(made.score(answer(index=i))) for i in range(6)]
        for _ in range(2):
            await asyncio.wait_for(entered.acquire(), 10)
        may_go.set()
        assert [one.value for one in await asyncio.gather(*scores)] == [1.0] * 6
        assert there.most_at_once == 2


async def test_a_closed_rewarder_asks_nobody() -> None:
    async with judge(1.0) as there:
        async with remote(there.url) as made:
            pass
        with pytest.raises(UserCodeError, match="after the rewarder was closed"):
            await made.score(answer())
        assert there.asked == []


@pytest.mark.parametrize(("args", "said"), [
    ({}, 'reward.args.url = "": reward "remote" asks a service -- http://host:port/path'),
    ({"url": "file:///x"}, 'reward.args.url = "file:///x"'),
    ({"url": "http://a/b", "retries": 3}, 'reward.args.retries: reward "remote" takes no such argument'),
    ({"url": "http://a/b", "tries": "3"}, "reward.args.tries = '3': must be of type int"),
    ({"url": "http://a/b", "tries": 0}, "tries and max_calls must be at least 1"),
    ({"url": "http://a/b", "backoff_s": -1.0}, "reward.args.backoff_s = -1.0: must not be negative"),
])  # fmt: skip
def test_arguments_are_checked(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        remote_options(args)
    assert said in str(caught.value)


def test_workers_do_not_ask() -> None:
    with pytest.raises(ValueError, match='fn = "remote" is asked by the rollout actor itself'):
        RewardSettings(fn="remote", workers=2)
