"""A server's own profiler, asked for by HTTP: where the trace is, who may ask, and what a refusal costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.harness.fake_sglang import FakeSglang, fake_sglang

from myxa.actors.engines.sglang import engine as sglang_engine
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.core.errors import EngineError

OPTIONS: dict[str, Any] = {"vocab_size": 320, "context_length": 128, "call_s": 20, "name": "rollout/3"}


@asynccontextmanager
async def connected(theirs: Path, **settings: Any) -> AsyncIterator[tuple[SglangEngine, FakeSglang]]:
    async with asyncio.timeout(60), fake_sglang(profile_dir=theirs) as server:
        engine = SglangEngine(server.url, SglangOptions(**(OPTIONS | settings)))
        await engine.start()
        yield engine, server
        await engine.close()


async def post(url: str, **body: Any) -> int:
    async with aiohttp.ClientSession() as stranger, stranger.post(url, json=body) as answer:
        return answer.status


async def test_a_server_writes_its_trace_into_the_folder_it_is_given(tmp_path):
    traces = tmp_path / "run" / "profiles"
    async with connected(tmp_path / "theirs", profile_dir=str(traces)) as (engine, _):
        (first,) = await engine.profile(0.05)
        (second,) = await engine.profile(0.05)
    assert (first.place, first.refused) == (str(traces), "")
    assert first.files[0].startswith("rollout.3.")
    assert set(second.files).isdisjoint(first.files)
    assert sorted(path.name for path in traces.iterdir()) == sorted((*first.files, *second.files))


async def test_an_attached_one_writes_where_it_does_by_itself_and_is_profiled_once_at_a_time(tmp_path):
    async with connected(tmp_path) as (engine, server):
        both = await asyncio.gather(engine.profile(0.1), engine.profile(0.1), return_exceptions=True)
        ((trace,),) = [one for one in both if not isinstance(one, BaseException)]
        (refused,) = [one for one in both if isinstance(one, EngineError)]
        assert "SGLANG_TORCH_PROFILER_DIR" in trace.place and trace.engine == server.url
        assert len(list(tmp_path.glob(trace.files[0]))) == 1
        assert "is being profiled already -- wait" in str(refused)


@pytest.mark.parametrize("after_s", [0.0, 0.1])
async def test_a_profile_whose_caller_stops_waiting_is_stopped(after_s, tmp_path):
    async with connected(tmp_path) as (engine, server):
        recording = asyncio.ensure_future(engine.profile(60.0))
        while server.profiles is None:
            await asyncio.sleep(0.005)
        await asyncio.sleep(after_s)
        recording.cancel()
        with pytest.raises(asyncio.CancelledError):
            await recording
        assert server.profiles is None
    assert len(list(tmp_path.glob("rollout.3.*.trace.json.gz"))) == 1


async def test_a_refusal_names_server_cause_and_remedy_and_costs_no_engine(tmp_path):
    async with connected(tmp_path) as (engine, server):
        assert await post(f"{server.url}/start_profile", profile_id="theirs") == 200
        recording = asyncio.ensure_future(engine.profile(0.3))
        while server.paths().count("/start_profile") < 2:
            await asyncio.sleep(0.005)
        assert await post(f"{server.url}/stop_profile") == 200
        with pytest.raises(EngineError) as caught:
            await recording
        assert str(caught.value) == (
            f"rollout/3 at {server.url}: POST /stop_profile answered 500: Internal Server Error -- see the server's log; "
            "--no-engine leaves the server out"
        )
        assert (await engine.info()).kind == "sglang"
    assert [path.name for path in tmp_path.glob("*.trace.json.gz")] == ["theirs-TP-0.trace.json.gz"]


async def test_a_server_that_does_not_answer_fails_the_profile_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_engine, "START_S", 0.3)
    async with connected(tmp_path) as (engine, server):
        server.is_deaf = True
        with pytest.raises(EngineError, match=r"POST /start_profile failed within 0\.3 s: .* -- is the server alive"):
            await engine.profile(0.1)
