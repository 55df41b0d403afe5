"""Recorded streams of a real SGLang, broken in every way a network or a dying server breaks them.

Whatever is done to the bytes, the client gives the recorded tokens in order, or fails naming server and request. It
never hangs, and never gives a token that was not sent.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from tests.engines.contract import ask, collect, endless, fails, started
from tests.engines.contract_subjects import CLIENT, RECORDINGS, client_of, make_versions
from tests.engines.recording import Exchange, read_recording

from myxa.actors.engines.sglang.engine import SglangEngine
from myxa.core.errors import EngineError

LABELS = sorted(path.parent.name for path in RECORDINGS.glob("*/about.json"))
DEADLINE_S = 30.0
NUM_BREAKS = 60
Breaker = Callable[[random.Random, list[bytes]], list[bytes]]


def recorded_stream(label: str) -> Exchange:
    """A long one that ended by itself."""
    recording = read_recording(RECORDINGS / label / "an_abort_ends_one_stream_whose_tokens_can_be_continued.jsonl")
    (found,) = [e for e in recording.exchanges.values() if e.request == "POST /generate" and e.body["rid"].startswith("r10~")]  # fmt: skip
    return found


@asynccontextmanager
async def saying(pieces: list[bytes], *, is_cut: bool) -> AsyncIterator[tuple[SglangEngine, list[bytes]]]:
    """A client of a server that answers every request with these pieces, then ends the answer or the connection."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path != "/generate":
            return web.json_response({"context_length": 512, "max_running_requests": 16, "weight_version": "0"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if is_cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    app = web.Application()
    app.router.add_route("*", "/{anything:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine = SglangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", CLIENT)
        await engine.start()
        try:
            yield engine, pieces
        finally:
            await engine.close()
    finally:
        await runner.cleanup()


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


@pytest.mark.asyncio
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize(
    "breaker", [cut_anywhere, cut_into_crumbs, lose_events, mix_events, add_garbage, tear_an_event]
)
async def test_a_broken_stream_gives_true_tokens_or_an_error(label: str, breaker: Breaker):
    rng = random.Random(f"{label} {breaker.__name__}")
    exchange = recorded_stream(label)
    events = [text.encode() for text in exchange.outs]
    is_incremental = "--incremental-streaming-output" in (RECORDINGS / label / "about.json").read_text()
    true_ids: list[int] = []
    for text in (text for text in exchange.outs if "output_ids" in text):
        ids = json.loads(text.removeprefix("data:"))["output_ids"]
        true_ids = true_ids + ids if is_incremental else ids
    assert len(true_ids) == 50
    request = ask("r10", exchange.body["input_ids"], max_new_tokens=50, ignore_eos=True)
    num_whole = 0
    said: list[str] = []
    for _ in range(NUM_BREAKS):
        pieces = breaker(rng, events)
        async with asyncio.timeout(DEADLINE_S), saying(pieces, is_cut=rng.random() < 0.3) as (engine, _):
            got: list[int] = []
            try:
                async for delta in engine.generate(request):
                    got += delta.output_ids.tolist()
                    if delta.finish is not None:
                        num_whole += 1
                        assert got == true_ids
            except EngineError as err:
                said.append(str(err))
            assert got == true_ids[: len(got)]
    assert all("'r10'" in text and "http://127.0.0.1" in text for text in said)
    if breaker is cut_into_crumbs:
        assert num_whole > NUM_BREAKS / 3


SERVER = """
import asyncio, sys
from myxa.actors.engines.http_server import serve_engine
asyncio.run(serve_engine(sys.argv[1], on_ready=lambda served: print(served.url, flush=True)))
"""


@pytest.mark.asyncio
async def test_a_server_that_is_killed_under_a_stream_is_named_at_once(tmp_path: Path):
    versions = make_versions(tmp_path)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(versions[0]), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        url = (await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)).decode().strip()
        async with client_of(url) as engine, started(engine, endless("r"), endless("s", 4)) as streams:
            process.kill()
            async with asyncio.timeout(DEADLINE_S):
                for name, stream in zip("rs", streams, strict=True):
                    await fails(stream, EngineError, url, f"'{name}'")
                await fails(collect(engine, endless("t")), EngineError, url)
                await fails(engine.info(), EngineError, url)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
