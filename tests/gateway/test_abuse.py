"""Clients that are hostile or mistaken: an error in the dialect's form, and a good session beside them is answered."""

from __future__ import annotations

import asyncio
import json
import random
import resource
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest
import pytest_asyncio
from tests.gateway.scripted import Says, serving, session_of
from tests.harness.waiting import until
from tests.workflows.chat_models import QWEN3

from myxa.actors.gateway.server import Gateway

HELLO: Any = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 50},
}
"""One that is answered, by path."""


class Victim:
    """A gateway with a session that is attacked and a session that is good."""

    def __init__(self, gateway: Gateway, url: str) -> None:
        says = Says(QWEN3, lambda prompt: "Hello there.")
        self.gateway, self.url = gateway, url
        self.one, self.good = session_of(says), session_of(says)
        self.key, self.good_key = gateway.open(self.one), gateway.open(self.good)
        self.http = httpx.AsyncClient(base_url=url, timeout=60)

    async def post(self, path: str, body: bytes | object, key: str = "", **headers: str) -> httpx.Response:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(
            path, content=raw, headers={"Authorization": f"Bearer {key or self.key}", **headers}
        )

    async def is_well(self) -> None:
        async with asyncio.timeout(10):
            answer = await self.post("/v1/chat/completions", BODIES["/v1/chat/completions"], self.good_key)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello there."


def check_refused(path: str, answer: httpx.Response, *status: int) -> None:
    """In the form of the path's dialect."""
    assert answer.status_code in status, (answer.status_code, answer.text[:300])
    body = answer.json()
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    assert isinstance(body["error"]["type"], str)
    assert (body.get("type") == "error") is path.startswith("/v1/messages")


@pytest_asyncio.fixture
async def victim() -> AsyncGenerator[Victim]:
    gateway = Gateway(prefix="r0-")
    async with serving(gateway) as url:
        found = Victim(gateway, url)
        yield found
        await found.is_well()
        await found.http.aclose()
        for key in (found.key, found.good_key):
            await gateway.close(key)


@pytest.mark.parametrize("path", [*BODIES, "/v1/messages/count_tokens", "/v1/session/reward", "/v1/session/end"])
async def test_keys_that_open_nothing(victim: Victim, path: str) -> None:
    body = BODIES.get(path, {})
    ended = victim.gateway.open(session_of(victim_says()))
    await victim.gateway.close(ended)
    keys = (
        ended,
        "sk-myxa-r1-other-actor",
        "sk-ant-other-run",
        "x" * 4000,
        victim.key[:-1],
        victim.key.upper(),
        "ü" * 9,
    )
    for key in keys:
        headers = {b"Authorization": f"Bearer {key}".encode()}
        check_refused(path, await victim.http.post(path, json=body, headers=headers), 401)
    check_refused(path, await victim.http.post(path, json=body), 401)
    check_refused("/v1/tasks/next", await victim.post("/v1/tasks/next", {}), 401)


def victim_says() -> Says:
    return Says(QWEN3, lambda prompt: "Hello there.")


WRONG: tuple[Any, ...] = (None, -1, 1.5, 10**30, "\x00", [None], {"a": 1}, [{"type": 7}])


@pytest.mark.parametrize("path", BODIES)
async def test_wrong_types_in_each_field(victim: Victim, path: str) -> None:
    names = ("model", "messages", "input", "prompt", "system", "instructions", "max_tokens", "max_completion_tokens",
             "max_output_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_sequences", "seed", "n", "stream",
             "tools", "tool_choice", "stream_options", "logprobs", "top_logprobs", "logit_bias", "frequency_penalty",
             "repetition_penalty", "response_format", "text", "thinking", "metadata", "previous_response_id",
             "echo", "best_of", "suffix", "modalities", "user")  # fmt: skip
    bodies = [{**BODIES[path], "max_tokens": 3, name: value} for name in names for value in WRONG]
    for answer in await asyncio.gather(*(victim.post(path, body) for body in bodies)):
        if answer.status_code != 200:
            check_refused(path, answer, 400, 404)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_wrong_types_inside_of_messages(victim: Victim, path: str) -> None:
    place = "input" if path == "/v1/responses" else "messages"
    for name in ("role", "content", "name", "tool_calls", "tool_call_id", "type", "call_id", "arguments", "output"):
        for value in WRONG:
            for role in ("assistant", "tool"):
                body = {**BODIES[path], place: [{"role": role, "content": "x", name: value}, *HELLO]}
                answer = await victim.post(path, body)
                if answer.status_code != 200:
                    check_refused(path, answer, 400)


BEYOND: list[tuple[dict[str, Any], int]] = [
    ({"n": 10**9}, 400),
    ({"n": 0}, 400),
    ({"max_tokens": -1}, 400),
    ({"max_tokens": 10**12}, 200),
    ({"max_tokens": 1e12}, 400),
    ({"stop": [f"x{one}" for one in range(100_000)]}, 400),
    ({"stop": [""]}, 400),
    ({"stop": "x" * 1_000_000}, 400),
    ({"seed": 10**30}, 400),
    ({"top_p": 0}, 400),
    ({"temperature": 1e308}, 400),
]


async def test_numbers_and_lists_beyond_measure(victim: Victim) -> None:
    path = "/v1/chat/completions"
    for more, status in BEYOND:
        answer = await victim.post(path, {**BODIES[path], **more})
        assert answer.status_code == status, (str(more)[:30], answer.text[:300])
        if status != 200:
            check_refused(path, answer, status)


NO_REQUESTS = [
    b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"model": "\xff"}', b'{"model": "\\ud800"}', b'{"model": NaN}',
    b'{"messages": [{"role": "user", "content": "\\ud83d"}], "prompt": "\\udc00", "input": "\\ud800", "max_tokens": 5}',
    b"[" * 200_000, b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    b'{"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
async def test_bodies_that_are_no_requests(victim: Victim, path: str) -> None:
    for raw in NO_REQUESTS:
        check_refused(path, await victim.post(path, raw), 400)


def tool(parameters: object, name: str = "t") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"properties": found}
    return found


@pytest.mark.parametrize(
    ("tools", "status"),
    [
        ([tool({}, f"t{at}") for at in range(20_000)], 400),
        ([tool({"type": "object", "description": "x" * 4_000_000})], 400),
        ([tool({"$ref": "#", "$defs": {"a": {"$ref": "#/$defs/a"}}})], 200),
        ([tool(nested(900))], 400),
        ([tool(nested(200))], 200),
    ],
    ids=["thousands", "megabytes", "cyclic", "deep", "nested"],
)
async def test_endless_tools(victim: Victim, tools: list[Any], status: int) -> None:
    path = "/v1/chat/completions"
    slowest = 0.0

    async def watch() -> None:
        nonlocal slowest
        while True:
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(0.01)
            slowest = max(slowest, asyncio.get_running_loop().time() - began)

    watching = asyncio.ensure_future(watch())
    answer = await victim.post(path, {**BODIES[path], "tools": tools})
    watching.cancel()
    assert answer.status_code == status, answer.text[:300]
    if status != 200:
        check_refused(path, answer, status, 413)
    assert slowest < 5, "others are served meanwhile"


async def test_a_body_of_a_hundred_megabytes_is_cut_early(victim: Victim) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def endless() -> AsyncGenerator[bytes]:
        for _ in range(1600):
            yield b" " * (1 << 16)

    for key, status in ((victim.key, 413), ("sk-other", 401)):
        try:
            answer = await victim.http.post(
                "/v1/messages", content=endless(), headers={"Authorization": f"Bearer {key}"}
            )
            check_refused("/v1/messages", answer, status)
        except httpx.TransportError:  # it was closed while it was sent
            pass
    answer = await victim.post("/v1/messages", b" " * (17 << 20))
    check_refused("/v1/messages", answer, 413)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 100


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % at for at in range(50_000)) + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 2_000_000 + b"\r\n\r\n",
        b"GET /" + b"v" * 2_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 100,
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["many", "long", "path", "tls", "length", "chunk"],
)
async def test_heads_that_are_floods(victim: Victim, head: bytes) -> None:
    async with connected(victim.url) as (reader, writer):
        try:
            writer.write(head)
            await writer.drain()
            async with asyncio.timeout(10):
                said = await reader.read(12)
        except ConnectionError:
            said = b""
        assert said[9:12] in (b"", b"400", b"401"), said


async def test_slow_writers_and_slow_readers(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myxa.actors.gateway.server.BODY_S", 0.5)
    monkeypatch.setattr("myxa.actors.gateway.server.READ_S", 0.5)
    head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {victim.key}\r\nContent-Length: 1000\r\n\r\n{{"
    async with connected(victim.url) as (reader, writer):
        writer.write(head.encode())
        async with asyncio.timeout(10):
            said = (await reader.readuntil(b"}}")).decode()
        assert " 400 " in said.splitlines()[0]
        assert '"type":"error"' in said
    long = Says(QWEN3, lambda prompt: "word " * 600)
    key = victim.gateway.open(one := session_of(long))
    body = json.dumps({"messages": HELLO, "stream": True, "n": 16})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    async with connected(victim.url) as (_, writer):
        writer.write((head + body).encode())
        async with asyncio.timeout(60):
            while one.session.counts["turns"] < 16 or one.num_under_way:
                await asyncio.sleep(0.05)
                await victim.is_well()
    await victim.gateway.close(key)


async def test_more_requests_than_a_session_may_have(victim: Victim) -> None:
    says = Says(QWEN3, lambda prompt: "x")
    says.may_go.clear()
    key = victim.gateway.open(session_of(says))
    bodies = [{"messages": [{"role": "user", "content": str(at)}], "n": 100} for at in range(6)]
    asked = [asyncio.ensure_future(victim.post("/v1/chat/completions", body, key)) for body in bodies]
    await until(lambda: sum(one.done() for one in asked) == 4, "all but two are refused")
    says.may_go.set()
    answers = await asyncio.gather(*asked)
    assert sorted(answer.status_code for answer in answers) == [200] * 2 + [503] * 4
    for answer in answers:
        if answer.status_code == 503:
            check_refused("/v1/chat/completions", answer, 503)
    await victim.gateway.close(key)


async def test_streamed_text_is_the_text_whatever_the_pieces() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    letters = ["a", " ", "é", "語", "🙂", "\n", "<", "<think>", "</think>", "<tool_call>", "ß ", "👩‍👩‍👧"]
    gateway = Gateway()
    async with serving(gateway) as url, httpx.AsyncClient(timeout=60, base_url=url) as http:
        for _ in range(12):
            text = "".join(rng.choices(letters, k=rng.randrange(1, 60)))
            one = session_of(Says(QWEN3, lambda prompt, text=text: text))
            head = {"Authorization": f"Bearer {gateway.open(one)}"}
            path, body = "/v1/chat/completions", {"messages": HELLO}
            streamed = await http.post(path, json={**body, "stream": True}, headers=head)
            message = (await http.post(path, json=body, headers=head)).json()["choices"][0]["message"]
            deltas = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
            for field in ("content", "reasoning_content"):
                pieces = "".join(one["choices"][0]["delta"].get(field) or "" for one in deltas if one["choices"])
                assert pieces == (message.get(field) or ""), (text, field)
            assert one.session.counts["turns"] == 2
