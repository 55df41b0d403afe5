"""The embedded engine in process and the same engine behind real HTTP: token for token the same, seeds included.

What is asked of every engine is in `contract.py`; here is what only ours promises. The third variant streams
incrementally, as SGLang does when told so. Sockets are real loopback sockets.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.engines.http_server import serve
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.wire import version_number
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.actors.weights.channels.reader import ChannelReader
from myxa.core.protocols import Delta, Engine
from myxa.core.samples import NO_VERSION

KINDS = ("embedded", "http", "http-incremental")
OPTIONS = EmbeddedOptions(max_running=16, stream_interval=4, seed=5)
DEADLINE_S = 60.0


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@asynccontextmanager
async def running(kind: str, folder: Path) -> AsyncIterator[Engine]:
    """A started engine of that kind; everything is closed at the end and no thread is left."""
    async with asyncio.timeout(DEADLINE_S):
        if kind == "embedded":
            engine = EmbeddedEngine(folder, OPTIONS, reader=ChannelReader())
            await engine.start()
            try:
                yield engine
            finally:
                await engine.close()
        else:
            async with serve(folder, options=OPTIONS, is_incremental=kind == "http-incremental") as served:
                remote = SglangEngine(served.url, SglangOptions(vocab_size=320))
                await remote.start()
                try:
                    yield remote
                finally:
                    await remote.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith(OPTIONS.name)]


@pytest.fixture
def collect(result):
    async def everything(engine: Engine, request):
        return result([delta async for delta in engine.generate(request)])

    return everything


@pytest.mark.asyncio
async def test_streams_hold_every_token_in_order_with_stamps_and_end_with_a_reason(
    kind, folders, ask, collect, make_core, run_core, judge
):
    requests = [
        ask(f"r{i}", 4 + i, max_new_tokens=3 + 2 * i, seed=i, temperature=(1.0, 0.0, 0.8)[i % 3]) for i in range(24)
    ]
    async with running(kind, folders[0]) as engine:
        got = dict(zip([r.request_id for r in requests],
                       await asyncio.gather(*(collect(engine, r) for r in requests)), strict=True))  # fmt: skip
    wanted = run_core(make_core(folders[0]), requests)
    for request in requests:
        name = request.request_id
        assert np.array_equal(got[name].ids, wanted[name].ids)
        assert (got[name].finish, got[name].matched) == (wanted[name].finish, wanted[name].matched)
        assert got[name].versions.tolist() == [0] * len(got[name].ids)
        exact = judge(folders[0]).logprobs(request.input_ids, got[name].ids, request.sampling.temperature)
        assert np.abs(exact - got[name].logprobs).max() <= 1e-5
    assert max(len(r.deltas) for r in got.values()) > 3, "long answers come in pieces"


@pytest.mark.asyncio
async def test_penalties_and_stop_strings_are_the_same_on_both_sides_of_the_wire(
    kind, folders, ask, collect, make_core, run_core
):
    decode = partial(load_tokenizer(folders[0]).decode, skip_special=False)
    wishes = [{"repetition_penalty": 1.7}, {"frequency_penalty": 0.9, "presence_penalty": -0.4}, {"min_p": 0.2}]
    wishes += [{"min_new_tokens": 30, "stop_token_ids": tuple(range(64))}, {"stop": ("a", "e", "never said")}]
    requests = [ask(f"r{i}", 6, max_new_tokens=90, seed=i, **wish) for i, wish in enumerate(wishes)]
    wanted = run_core(make_core(folders[0], decode=decode), requests)
    assert wanted["r4"].matched_text in ("a", "e")
    async with running(kind, folders[0]) as engine:
        for request in requests:
            got, exact = await collect(engine, request), wanted[request.request_id]
            assert np.array_equal(got.ids, exact.ids)
            assert np.abs(got.logprobs - exact.logprobs).max() <= 1e-5
            assert (got.finish, got.matched, got.matched_text) == (exact.finish, exact.matched, exact.matched_text)


@pytest.mark.asyncio
async def test_abort_ends_one_stream_and_its_tokens_can_be_continued(kind, folders, ask, collect, make_core, run_core):
    whole_request = ask("r1", 10, max_new_tokens=90, ignore_eos=True, seed=3)
    whole = run_core(make_core(folders[0]), [whole_request])["r1"]
    async with running(kind, folders[0]) as engine:
        first, other = (
            asyncio.gather(collect(engine, r))
            for r in (whole_request, ask("r10", 10, max_new_tokens=90, ignore_eos=True))
        )
        while (await engine.info()).running < 2:
            await asyncio.sleep(0.001)
        await engine.abort("r1")
        (part,) = await first
        assert part.finish == "abort"
        assert len(part.ids) < 90
        context = np.concatenate([whole_request.input_ids, part.ids])
        rest = await collect(engine, ask("r1", context, max_new_tokens=90 - len(part.ids), ignore_eos=True, seed=3))
        assert np.array_equal(np.concatenate([part.ids, rest.ids]), whole.ids)
        (untouched,) = await other
        assert (untouched.finish, len(untouched.ids)) == ("length", 90), (
            '"r1" is a prefix of "r10", and another request'
        )
        await engine.abort("nobody")


@pytest.mark.asyncio
async def test_closing_a_stream_early_frees_its_row(kind, folders, ask, collect):
    async with running(kind, folders[0]) as engine:
        for i in range(40):  # more than there are rows
            stream = cast(
                "AsyncGenerator[Delta, None]", engine.generate(ask(f"r{i}", max_new_tokens=110, ignore_eos=True))
            )
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    assert delta.finish is None
                    break
        got = await collect(engine, ask("last", max_new_tokens=5, ignore_eos=True))
        assert len(got.ids) == 5


def test_unknown_versions_are_not_numbers():
    assert [version_number(v) for v in ("7", 7, "default", None, "")] == [7, 7, NO_VERSION, NO_VERSION, NO_VERSION]
