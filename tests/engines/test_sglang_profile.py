"""A server's own profiler, asked for by HTTP: the stand-in's is torch's, with SGLang's routes, fields and file names."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from myxa.actors.engines.engine_pool import EnginePool
from myxa.actors.engines.http_server import serve
from myxa.actors.engines.sglang import engine as sglang_engine
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.launch import LaunchedSglang, SglangLaunch
from myxa.actors.rollout.rollout import profile_engine
from myxa.core.errors import EngineError

STAND_IN = Path(__file__).parent / "stand_in"
OPTIONS = SglangOptions(vocab_size=320, start_s=60, call_s=20, name="rollout/3")
DEADLINE_S = 90


@asynccontextmanager
async def server(folder: Path, traces: Path):
    """One of somebody else's; (address, process)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--host", "127.0.0.1",
        "--port", str(port), "--skip-tokenizer-init", "--incremental-streaming-output", "--dtype", "float32",
        "--max-running-requests", "8", "--random-seed", "1",
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(STAND_IN), "SGLANG_TORCH_PROFILER_DIR": str(traces)}
    process = subprocess.Popen(command, env=env)  # noqa: ASYNC220 -- quick
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def operators(trace: Path) -> set[str]:
    with gzip.open(trace) as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


async def generating(engine, ask, doing):
    """What `doing` returns, while the engine generates."""

    async def generate() -> None:
        for number in range(1000):
            async for _ in engine.generate(ask(f"r{number}", 5, max_new_tokens=50, ignore_eos=True)):
                pass

    load = asyncio.ensure_future(generate())
    try:
        return await doing
    finally:
        load.cancel()


@pytest.mark.asyncio
async def test_a_launched_server_writes_its_trace_where_it_is_told(folders, tmp_path, ask):
    traces = tmp_path / "run" / "profiles"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])}
    launch = SglangLaunch(
        python=sys.executable, model_path=str(folders[0]), table={}, env=env, log_path=tmp_path / "log",
        dtype="float32", seed=1, num_devices=0, max_running=8,
    )  # fmt: skip
    options = SglangOptions(vocab_size=320, start_s=60, call_s=20, name="rollout/3", profile_dir=str(traces))
    engine = LaunchedSglang(launch, options)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await engine.start()
            (first,) = await generating(engine, ask, engine.profile(0.1))
            (second,) = await profile_engine(engine, 0.1, "rollout/3")
    finally:
        await engine.close()
    assert (first.place, first.refused) == (str(traces), "")
    (name,) = first.files
    assert name.startswith("rollout.3.")
    assert {"aten::matmul", "aten::mm"} & operators(traces / name), "what the server did, not what its client did"
    assert set(second.files).isdisjoint(first.files)
    assert sorted(path.name for path in traces.iterdir()) == sorted((*first.files, *second.files))


@pytest.mark.asyncio
async def test_an_attached_one_writes_where_it_does_by_itself_and_is_profiled_once_at_a_time(folders, tmp_path):
    async with server(folders[0], tmp_path / "theirs") as (url, _):
        engine = SglangEngine(url, OPTIONS)
        await engine.start()
        both = await asyncio.gather(engine.profile(0.3), engine.profile(0.3), return_exceptions=True)
        ((trace,),) = [one for one in both if not isinstance(one, BaseException)]
        (refused,) = [one for one in both if isinstance(one, EngineError)]
        await engine.close()
    assert "SGLANG_TORCH_PROFILER_DIR" in trace.place
    assert trace.engine == url
    (pattern,) = trace.files
    assert len(list((tmp_path / "theirs").glob(pattern))) == 1
    assert "is being profiled already -- wait" in str(refused)


@pytest.mark.asyncio
@pytest.mark.parametrize("after_s", [0.05, 2.0])
async def test_one_that_nobody_waits_for_any_more_is_stopped(after_s, folders, tmp_path):
    async with server(folders[0], tmp_path) as (url, _):
        engine = SglangEngine(url, OPTIONS)
        await engine.start()
        recording = asyncio.ensure_future(engine.profile(60.0))
        await asyncio.sleep(after_s)
        recording.cancel()
        with pytest.raises(asyncio.CancelledError):
            await recording
        async with aiohttp.ClientSession() as stranger, stranger.post(f"{url}/stop_profile") as answer:
            assert answer.status == 500, "nothing runs any more"
        await engine.close()
    assert len(list(tmp_path.glob("rollout.3.*.trace.json.gz"))) == 1


@pytest.mark.asyncio
async def test_a_refusal_names_server_cause_and_remedy_and_costs_no_engine(folders, tmp_path):
    async with server(folders[0], tmp_path) as (url, _), aiohttp.ClientSession() as stranger:
        engine = SglangEngine(url, OPTIONS)
        await engine.start()
        async with stranger.post(f"{url}/start_profile", json={"profile_id": "theirs"}) as answer:
            assert answer.status == 200
        recording = asyncio.ensure_future(profile_engine(engine, 1.0, "rollout/3"))
        await asyncio.sleep(0.5)
        async with stranger.post(f"{url}/stop_profile") as answer:
            assert answer.status == 200
        (trace,) = await recording
        assert trace.refused == (
            f"rollout/3 at {url}: POST /stop_profile answered 500: Internal Server Error -- see the server's log; "
            "--no-engine leaves the server out"
        )
        assert (await engine.info()).kind == "sglang"
        await engine.close()
    assert [path.name for path in tmp_path.glob("*.trace.json.gz")] == ["theirs-TP-0.trace.json.gz"]


@pytest.mark.asyncio
async def test_one_that_does_not_answer_is_told_in_time(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_engine, "START_S", 0.5)
    async with server(folders[0], tmp_path) as (url, process):
        engine = SglangEngine(url, OPTIONS)
        await engine.start()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"POST /start_profile failed within 0\.5 s: .* -- is the server alive"):
            await engine.profile(0.1)
        await engine.close()


@pytest.mark.asyncio
async def test_of_a_pool_each_server_answers_for_itself(folders, tmp_path):
    """The second server is our own, which has no such route."""
    async with server(folders[0], tmp_path) as (first, _), serve(folders[0], is_incremental=True) as second:
        pool = EnginePool(
            {url: lambda url=url: SglangEngine(url, OPTIONS) for url in (first, second.url)}, name="rollout/3"
        )
        await pool.start()
        traces = {trace.engine: trace for trace in await pool.profile(0.2)}
        await pool.close()
        states = {state.value for state in pool.states().values()}
    assert not traces[first].refused
    assert len(list(tmp_path.glob(traces[first].files[0]))) == 1
    assert "POST /start_profile answered 404" in traces[second.url].refused
    assert states == {"serving"}


@pytest.mark.asyncio
async def test_an_engine_in_the_actors_own_process_has_nothing_beside_it():
    assert await profile_engine(None, 1.0, "rollout/0") == ()
