"""A service that takes tasks and is not to be relied on: it comes late, twice, in another order, or goes away."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest
from aiohttp import web
from tests.gateway.scripted import Says
from tests.gateway.test_agent import ROW, context, running
from tests.harness.waiting import until
from tests.workflows.chat_models import QWEN3

from myxa.core.errors import MemberFailed
from myxa.core.samples import Sample

Act = Callable[["Client"], Awaitable[None]]


class Client:
    """Of one task."""

    def __init__(self, task: dict[str, Any], http: httpx.AsyncClient, rollout: asyncio.Future[Any]) -> None:
        self.task, self.http, self.rollout = task, http, rollout

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.task['key']}"}
        return await self.http.post(f"{self.task['base_url']}{path}", json=body, headers=headers)

    async def ask(self) -> dict[str, Any]:
        answer = await self.post("/v1/chat/completions", {"messages": self.task["messages"]})
        assert answer.status_code == 200, answer.text
        return answer.json()


async def played(act: Act, says: Says | None = None, **options: Any) -> tuple[Sample, ...]:
    """A rollout whose task a service polls for."""
    says = says or Says(QWEN3, lambda prompt: "hello")
    async with running(polls=True, **options) as workflow, httpx.AsyncClient(timeout=30) as http:
        place = await workflow.gateway.served()
        rollout = asyncio.ensure_future(workflow(context(says), ROW))
        try:
            headers = {"Authorization": f"Bearer {place.tasks_key}"}
            task = (await http.post(f"{place.base_url}/v1/tasks/next", headers=headers)).json()
            await act(Client(task, http, rollout))
            async with asyncio.timeout(20):
                return await rollout
        finally:
            rollout.cancel()
            await asyncio.wait([rollout])


async def test_rewards_said_twice_and_after_the_end() -> None:
    late: list[int] = []

    async def act(client: Client) -> None:
        await client.ask()
        for reward in (0.25, 0.5):
            assert (await client.post("/v1/session/reward", {"reward": reward})).status_code == 200
        assert (await client.post("/v1/session/end", {})).status_code == 200
        await asyncio.wait([client.rollout])
        for path in ("/v1/session/reward", "/v1/session/end"):
            late.append((await client.post(path, {"reward": 1.0})).status_code)

    (sample,) = await played(act)
    assert sample.reward == 0.5
    assert late == [401, 401]


async def test_a_reward_for_an_answer_that_nobody_gave() -> None:
    async def act(client: Client) -> None:
        (answer,) = (await client.ask())["myxa"]["answers"]
        unknown = await client.post("/v1/session/reward", {"reward": 1.0, "answer": "nobody's"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "answer")
        await client.post("/v1/session/reward", {"reward": 2.0, "answer": answer})
        await client.post("/v1/session/reward", {"reward": 0.5, "answer": answer})
        await client.post("/v1/session/end", {})

    (sample,) = await played(act)
    assert sample.reward == 0.5
    assert sample.token_rewards is not None and sample.token_rewards.sum() == 0.5


async def test_an_end_before_any_turn() -> None:
    async def act(client: Client) -> None:
        await client.post("/v1/session/end", {"reward": 1.0})

    with pytest.raises(MemberFailed, match="without a turn"):
        await played(act)


async def test_an_end_while_a_turn_is_under_way() -> None:
    """What was answered is learnt. The request is refused in its dialect's form, and the engine does not go on."""
    says = Says(QWEN3, lambda prompt: "hello")

    async def act(client: Client) -> None:
        answer = (await client.ask())["choices"][0]["message"]
        says.may_go.clear()
        history = [*client.task["messages"], answer, {"role": "user", "content": "more"}]
        asking = asyncio.ensure_future(client.post("/v1/chat/completions", {"messages": history}))
        await until(lambda: len(says.prompts) == 2)
        await client.post("/v1/session/end", {"reward": 1.0})
        refused = await asking
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")

    (sample,) = await played(act, says)
    assert (sample.num_turns, sample.reward) == (1, 1.0)


async def test_two_services_with_one_task() -> None:
    """As where the answer to a task got lost: both act, what each was answered is learnt once, and the first to end
    it ends it."""
    says = Says(QWEN3, lambda prompt: "hello")
    ends: list[int] = []

    async def act(client: Client) -> None:
        await asyncio.gather(client.ask(), client.ask())
        for reward in (0.5, 1.0):
            ends.append((await client.post("/v1/session/end", {"reward": reward})).status_code)
            await asyncio.wait([client.rollout])

    samples = await played(act, says)
    assert ends == [200, 401]
    assert [one.reward for one in samples] == [None, 0.5]
    assert len(says.prompts) == 2 == sum(one.num_turns for one in samples)


async def test_a_task_whose_rollout_has_ended_is_not_given() -> None:
    says = Says(QWEN3, lambda prompt: "hello")
    async with running(polls=True) as workflow, httpx.AsyncClient(timeout=30) as http:
        with pytest.raises(MemberFailed, match=r"within 0\.2 s"):
            await workflow(context(says, run_s=0.2), ROW)
        place = await workflow.gateway.served()
        headers = {"Authorization": f"Bearer {place.tasks_key}"}
        assert (await http.post(f"{place.base_url}/v1/tasks/next?now", headers=headers)).status_code == 204


async def test_a_service_that_leaves_while_it_polls_takes_no_task_with_it() -> None:
    says = Says(QWEN3, lambda prompt: "hello")
    async with running(polls=True) as workflow, httpx.AsyncClient(timeout=30) as http:
        place = await workflow.gateway.served()
        headers = {"Authorization": f"Bearer {place.tasks_key}"}
        url = f"{place.base_url}/v1/tasks/next"
        with pytest.raises(httpx.ReadTimeout):
            await http.post(url, headers=headers, timeout=httpx.Timeout(30, read=0.3))
        rollout = asyncio.ensure_future(workflow(context(says), ROW))
        client = Client((await http.post(url, headers=headers)).json(), http, rollout)
        await client.ask()
        await client.post("/v1/session/end", {"reward": 1.0})
        (sample,) = await rollout
    assert sample.reward == 1.0


@asynccontextmanager
async def pushed_to(place: socket.socket, seen: list[str]) -> AsyncGenerator[None]:
    acting: set[asyncio.Task[None]] = set()

    async def act(task: dict[str, Any]) -> None:
        async with httpx.AsyncClient(timeout=30) as http:
            client = Client(task, http, rollout=asyncio.Future())
            await client.ask()
            await client.post("/v1/session/end", {"reward": 1.0})

    async def take(request: web.Request) -> web.Response:
        task = await request.json()
        assert task["key"] not in str(request.headers), "a key is in no header: those are logged"
        if request.headers["Idempotency-Key"] not in seen:
            acting.add(asyncio.ensure_future(act(task)))
        seen.append(request.headers["Idempotency-Key"])
        return web.Response(status=202 if len(seen) > 1 else 503)

    app = web.Application()
    app.router.add_post("/", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.SockSite(runner, place).start()
    try:
        yield
    finally:
        await asyncio.gather(*acting)
        await runner.cleanup()


async def test_a_service_that_is_away_at_first_and_forgets_that_it_took_the_task() -> None:
    seen: list[str] = []
    says = Says(QWEN3, lambda prompt: "hello")
    place = socket.socket()  # it refuses connections until somebody listens
    place.bind(("127.0.0.1", 0))
    async with running(url=f"http://127.0.0.1:{place.getsockname()[1]}/") as workflow:
        rollout = asyncio.ensure_future(workflow(context(says), ROW))
        await asyncio.sleep(0.3)
        assert not rollout.done()
        async with pushed_to(place, seen), asyncio.timeout(20):
            (sample,) = await rollout
    assert sample.reward == 1.0
    assert 1 <= len(seen) <= 2 and len(set(seen)) == 1


async def test_a_session_that_ends_while_a_body_comes() -> None:
    """The request is refused; no turn begins that nobody would learn from."""
    says = Says(QWEN3, lambda prompt: "hello")
    late: list[bytes] = []

    async def act(client: Client) -> None:
        await client.ask()
        where = httpx.URL(client.task["base_url"])
        reader, writer = await asyncio.open_connection(where.host, where.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.task['key']}\r\n"
        body = b'{"messages": [{"role": "user", "content": "late"}]}'
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:10])
        await client.post("/v1/session/end", {"reward": 1.0})
        await asyncio.wait([client.rollout])
        writer.write(body[10:])
        late.append(await reader.readline())
        writer.close()

    await played(act, says)
    assert late == [b"HTTP/1.1 401 Unauthorized\r\n"]
    assert len(says.prompts) == 1
