"""Recorded streams of a real SGLang, broken in every way a network or a dying server breaks them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable

import pytest
from tests.engines.contract import ask
from tests.engines.contract_subjects import RECORDINGS, client_of
from tests.engines.recording import Exchange, read_recording
from tests.harness.fake_sglang import fake_sglang

from myxa.actors.engines.sglang.http_client import SglangHttp
from myxa.actors.rewards.remote import RemoteReward, remote_options
from myxa.core.completions import Completion
from myxa.core.errors import EngineError

LABELS = sorted(path.parent.name for path in RECORDINGS.glob("*/about.json"))
DEADLINE_S = 60.0
NUM_BREAKS = 15
Breaker = Callable[[random.Random, list[bytes]], list[bytes]]


def recorded_stream(label: str) -> Exchange:
    """A long one that ended by itself."""
    recording = read_recording(RECORDINGS / label / "an_abort_ends_one_stream_whose_tokens_can_be_continued.jsonl")
    (found,) = [e for e in recording.exchanges.values() if e.request == "POST /generate" and e.body["rid"].startswith("r10~")]  # fmt: skip
    return found


def cut_anywhere(rng: random.Random, events: list[bytes]) -> list[bytes]:
    whole = b"".join(events)
    return [whole[: rng.randrange(len(whole))]]


def cut_into_crumbs(rng: random.Random, events: list[bytes]) -> list[bytes]:
    whole = b"".join(events)
    cuts = sorted(rng.sample(range(1, len(whole)), 20))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def lose_events(rng: random.Random, events: list[bytes]) -> list[bytes]:
    start = rng.randrange(len(events))
    return events[:start] + events[start + rng.randint(1, 5) :]


def mix_events(rng: random.Random, events: list[bytes]) -> list[bytes]:
    a, b = rng.sample(range(len(events)), 2)
    mixed = list(events)
    mixed[a], mixed[b] = mixed[b], mixed[a]
    return mixed


def add_garbage(rng: random.Random, events: list[bytes]) -> list[bytes]:
    at = rng.randrange(len(events))
    garbage = rng.choice([rng.randbytes(40) + b"\n\n", b"data: " + rng.randbytes(40).replace(b"\n", b"") + b"\n\n",
                          b"data: null\n\n", b"data: {}\n\n", b"data: []\n\n", b"<html>502</html>\n\n", b"data: 7\n\n"])  # fmt: skip
    return [*events[:at], garbage, *events[at:]]


def tear_an_event(rng: random.Random, events: list[bytes]) -> list[bytes]:
    at = rng.randrange(len(events))
    event = events[at]
    a, b = sorted(rng.sample(range(6, len(event) - 2), 2))
    return [*events[:at], event[:a] + event[b:], *events[at + 1 :]]


BREAKERS = (cut_anywhere, cut_into_crumbs, lose_events, mix_events, add_garbage, tear_an_event)


@pytest.mark.parametrize("label", LABELS)
async def test_a_broken_stream_gives_true_tokens_or_an_error(label: str):
    exchange = recorded_stream(label)
    events = [text.encode() for text in exchange.outs]
    is_incremental = "--incremental-streaming-output" in (RECORDINGS / label / "about.json").read_text()
    true_ids: list[int] = []
    for text in (text for text in exchange.outs if "output_ids" in text):
        ids = json.loads(text.removeprefix("data:"))["output_ids"]
        true_ids = true_ids + ids if is_incremental else ids
    assert len(true_ids) == 50
    request = ask("r10", exchange.body["input_ids"], max_new_tokens=50, ignore_eos=True)
    facts = {"context_length": 512, "max_running_requests": 16}
    num_whole, said = 0, list[str]()
    async with (
        asyncio.timeout(DEADLINE_S),
        fake_sglang(chunks=[], facts=facts, version="0") as server,
        client_of(server.url) as engine,
    ):
        for breaker in BREAKERS:
            rng = random.Random(f"{label} {breaker.__name__}")
            for _ in range(NUM_BREAKS):
                server.chunks, server.is_cut = breaker(rng, events), rng.random() < 0.3
                got: list[int] = []
                try:
                    async for delta in engine.generate(request):
                        got += delta.output_ids.tolist()
                        if delta.finish is not None:
                            num_whole += breaker is cut_into_crumbs
                            assert got == true_ids
                except EngineError as err:
                    said.append(str(err))
                assert got == true_ids[: len(got)], breaker.__name__
    assert num_whole > NUM_BREAKS / 3
    assert all("'r10'" in text and server.url in text for text in said)


# -- deadlines -----------------------------------------------------------------------------------------------------

WITHIN_S = 0.2
ANSWERS = (Completion(group_id=3, index=0, messages=(), prompt="2+2?", text="4", turns=("4",), label="4"),)
Call = Callable[[str], Awaitable[object]]


async def of_a_client(url: str, doing: Callable[[SglangHttp], Awaitable[object]]) -> object:
    http = SglangHttp(url, name="rollout/0", call_s=10)
    http.open()
    try:
        return await doing(http)
    finally:
        await http.close()


async def look(url: str) -> object:
    return await of_a_client(url, lambda http: http.answer("/health", WITHIN_S))


async def post(url: str) -> object:
    return await of_a_client(url, lambda http: http.post("/pause", {}, within_s=WITHIN_S))


async def remote_reward(url: str) -> object:
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


@pytest.mark.parametrize("call", [look, post, remote_reward])
async def test_a_cancellation_at_the_deadline_is_heard_and_a_deadline_alone_is_an_error(call: Call):
    async with fake_sglang(is_deaf=True) as server:
        for offset_s in (-0.03, 0.0, 0.03):
            assert await ends_as(call, server.url, offset_s) == "cancelled"
        alone = await ends_as(call, server.url, 5.0)
        assert re.search("no answer within 0.2 s|failed within 0.2 s|did not answer within 0.2 s", alone)
