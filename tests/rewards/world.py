"""What the tests of rewards share: answers to be judged, a file of the user's own functions, rewarders that are closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar, cast

import pytest
from aiohttp import web

from myxa.actors.rewards import rewarder as rewarder_module
from myxa.actors.rewards.call import Answers, Outcomes, RewardSpec, call_reward, load_reward
from myxa.actors.rewards.rewarder import Rewarder
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.errors import UserCodeError


class CallsHere:
    """In place of a pool: the function is called as in a worker, without a process."""

    pids = ()
    seconds: ClassVar[dict[str, float]] = {}

    def __init__(self, spec: RewardSpec, size: int, at_once: int = 0) -> None:
        self._reward = load_reward(spec)

    async def score(self, answers: Answers, timeout_s: float) -> Outcomes:
        return await call_reward(self._reward, answers)

    async def close(self) -> None:
        """There is nothing."""


def call_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewarders that are made from now on start no process."""
    monkeypatch.setattr(rewarder_module, "RewardPool", CallsHere)


def answer(text: str, label: str = "", index: int = 1, group_id: int = 3, **more: Any) -> Completion:
    facts = {"messages": (), "prompt": "?"} | more
    return Completion(group_id=group_id, index=index, text=text, label=label, **facts)


def answers(*texts: str, **more: Any) -> list[Completion]:
    return [answer(text, index=i, **more) for i, text in enumerate(texts)]


@asynccontextmanager
async def rewarder(fn: str, **settings: Any) -> AsyncIterator[Rewarder]:
    made = Rewarder(RewardSettings(fn=fn, **settings))
    try:
        yield made
    finally:
        await made.close()
        assert made.worker_pids == ()


async def failure(of: Rewarder, *completions: Completion) -> str:
    """The error that these answers must end in."""
    with pytest.raises(UserCodeError) as caught:
        await (of.score_group(completions) if of.judges_groups else of.score(completions[0]))
    return str(caught.value)


def refuses(status: int, times: int = 1) -> Any:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(status=status, text="no" * times)

    return reply


class Server:
    """Answers with one reply after the other, the last one for ever."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.url = list(replies), ""
        self.asked: list[Any] = []
        self.keys: list[str] = []
        self.at_s: list[float] = []
        self.at_once = self.most_at_once = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.at_s.append(asyncio.get_running_loop().time())
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization", ""))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if callable(reply):
                reply = await cast("Any", reply)(request)
            return reply if isinstance(reply, web.StreamResponse) else web.json_response(reply)
        finally:
            self.at_once -= 1
