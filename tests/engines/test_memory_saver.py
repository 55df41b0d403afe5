"""A server's memory taken back and given again (SGLang's two routes), and generation that waits for its turn."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines.contract import ask
from tests.harness.engine_server import prepare_folder
from tests.harness.fake_sglang import USAGE, FakeSglang, fake_sglang, token
from tests.harness.waiting import until

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.launch import LaunchedSglang, SglangLaunch, hide_megatron, saver_env, server_values
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.actors.rollout.tenant import EngineTurn
from myxa.actors.workflows.episode import Episode, ModelAccess
from myxa.core.device_memory import TagReport
from myxa.core.errors import ConfigError, EngineError, MemoryFault
from myxa.core.messages import SamplingParams
from myxa.core.protocols import ReleasesMemory
from myxa.core.samples import Message, Prompt
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostVmmDriver, device_bytes

GIB = 1 << 30
ALL = ("weights", "kv_cache", "cuda_graph")
MEMORY_ROUTES = ("/release_memory_occupation", "/resume_memory_occupation")
DEADLINE_S = 30
OPTIONS = SglangOptions(vocab_size=320, start_s=5, call_s=5, health_every_s=0.05, name="rollout/0")


FACTS = {"context_length": 512, "enable_memory_saver": True, "internal_states": [{"memory_usage": USAGE}]}


@asynccontextmanager
async def client(**habits: Any) -> AsyncGenerator[tuple[FakeSglang, SglangEngine]]:
    async with asyncio.timeout(DEADLINE_S), fake_sglang(**({"facts": FACTS, "version": "3"} | habits)) as stub:
        engine = SglangEngine(stub.url, OPTIONS, saves_memory=True)
        try:
            await engine.start()
            yield stub, engine
        finally:
            await engine.close()


async def test_a_server_without_memory_saver_is_refused():
    with pytest.raises(ConfigError, match=r"without --enable-memory-saver.*memory\.share"):
        async with client(facts=FACTS | {"enable_memory_saver": False}):
            pass


async def test_sizes_are_the_servers_own_and_what_is_off_is_not_asked_for_again():
    async with client() as (stub, engine):
        assert isinstance(engine, ReleasesMemory)
        held = engine.memory_tags()
        gib = {report.tag: report.num_bytes / GIB for report in held}
        assert gib == {"weights": 1.5, "kv_cache": 4.0, "cuda_graph": 0.75}
        assert {report.policy for report in held} == {"discard"}
        await engine.park(5)
        await engine.release_memory(ALL)
        await engine.release_memory(ALL)
        await engine.restore_memory(("weights",))
        await engine.restore_memory(("weights",))
        await engine.release_memory(("kv_cache", "weights"))
        await engine.restore_memory(ALL)
        await engine.unpark()
        assert stub.asked(*MEMORY_ROUTES) == [
            ("/release_memory_occupation", ["kv_cache", "weights", "cuda_graph"]),
            ("/resume_memory_occupation", ["weights"]),
            ("/release_memory_occupation", ["weights"]),
            ("/resume_memory_occupation", ["cuda_graph", "weights", "kv_cache"]),
        ]
        assert not stub.died
        assert {report.backing for report in engine.memory_tags()} == {"mapped_dirty"}


async def test_an_answer_that_leaves_open_what_was_done_is_not_repeated():
    async with client() as (stub, engine):
        await engine.park(5)
        stub.fails_next = "/release_memory_occupation"
        with pytest.raises(EngineError, match="answered 500"):
            await engine.release_memory(ALL)
        with pytest.raises(EngineError, match="did not end well.*restart"):
            await engine.release_memory(ALL)
        with pytest.raises(EngineError, match="did not end well"):
            await engine.restore_memory(ALL)
        assert len(stub.asked(*MEMORY_ROUTES)) == 1


async def test_nothing_is_released_before_the_server_is_idle_and_one_that_stays_busy_is_left_alone():
    async with client(lingers_s=0.3) as (stub, engine):
        running = asyncio.create_task(read(engine, tokens=400))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match=r"not idle within 0\.2 s.*leave the server to this run"):
            await engine.park(0.2)
        assert not stub.asked(*MEMORY_ROUTES)
        await engine.abort()
        assert (await running).finish == "abort"
        await engine.park(5)
        await engine.release_memory(ALL)
        assert not stub.died
        assert len(stub.asked("/flush_cache")) > 1, "it was asked until its last batch was gone"


async def test_health_is_not_asked_for_by_generating_while_memory_is_away():
    async with client() as (stub, engine):
        watch = asyncio.create_task(engine.until_lost())
        await until(lambda: "/health" in stub.paths())
        await engine.park(5)
        before = stub.paths().count("/health")
        assert before > 0
        await engine.release_memory(ALL)
        await asyncio.sleep(0.2)
        assert stub.paths().count("/health") == before
        await engine.restore_memory(ALL)
        await engine.unpark()
        await until(lambda: stub.paths().count("/health") > before)
        assert not stub.died
        watch.cancel()


async def read(engine: Any, tokens: int) -> Any:
    last = None
    async for delta in engine.generate(ask("r", 5, max_new_tokens=tokens)):
        last = delta
    return last


def test_a_launched_server_is_told_to_save_memory(tmp_path: Path):
    plain = SglangLaunch(
        python="python", model_path="m", table={"mem_fraction_static": 0.9}, env={}, log_path=tmp_path / "log",
        dtype="bfloat16", seed=1, num_devices=1, max_running=8,
    )  # fmt: skip
    assert "enable_memory_saver" not in server_values(plain, 1)
    planned = (TagReport("weights", 7, "discard", "discarded"),)
    launch = replace(plain, expects=planned)
    assert server_values(launch, 1)["enable_memory_saver"] is True
    engine = LaunchedSglang(launch, OPTIONS)
    assert engine.memory_tags() == planned, "before it is started: what it is going to hold"
    assert engine.memory_pids() == ()


def test_graphs_are_pausable_and_cuda_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "nvidia" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    env = saver_env({"LD_LIBRARY_PATH": "/opt/x", "A": "1"})
    assert env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    assert env["NCCL_GRAPH_REGISTER"] == "0"
    assert env["LD_LIBRARY_PATH"].split(":") == ["/opt/x", str(library.parent)]
    assert env["A"] == "1"


def test_a_server_beside_megatron_cannot_import_it(tmp_path: Path):
    """Else its graphs would not be pausable, and it would end while it captures them."""
    installed, hiding = tmp_path / "installed", tmp_path / "hiding"
    (installed / "megatron" / "core").mkdir(parents=True)  # a namespace package, as the real one
    (installed / "megatron" / "core" / "__init__.py").write_text("parallel_state = None\n")
    hiding.mkdir()
    caught = "try:\n    from megatron.core import parallel_state\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run(
        [sys.executable, "-c", caught], env=hide_megatron({"PYTHONPATH": str(installed)}, hiding),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "hidden from SGLang" in done.stdout


# -- turns -------------------------------------------------------------------------------------------------------------


class Losses:
    """Counts how often weights were told to be lost."""

    def __init__(self) -> None:
        self.num = 0

    async def __call__(self) -> None:
        self.num += 1


PROMPT = Prompt(group_id=7, row=0, pass_index=0, messages=(Message(role="user", content="sort 3 1 2"),))


def one_sampling(tokens: int, seed: int | None) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=seed)


def episode(turn: EngineTurn, folder: Path, index: int, tokens: int, seed: int | None = None) -> Episode:
    access = ModelAccess(
        generate=turn.generate, sampling=one_sampling(tokens, seed), context_length=512, goes_on=lambda: True
    )
    return Episode(prompt=PROMPT, index=index, tokenizer=load_tokenizer(folder), model=access)


async def test_parked_requests_keep_their_tokens_and_go_on(folders):
    async with client() as (stub, engine):
        losses = Losses()
        turn = EngineTurn(engine, engine, on_weights_lost=losses)
        turn.started()
        episodes = [episode(turn, folders[0], index, tokens=60) for index in range(6)]
        tasks = [asyncio.create_task(one.generate()) for one in episodes]
        await asyncio.sleep(0.05)
        assert not stub.running, "nothing goes in before the first turn"
        await turn.resume()
        for _ in range(3):
            await asyncio.sleep(0.08)
            await turn.quiesce()
            assert not stub.running
            await asyncio.to_thread(turn.release, ALL)
            assert stub.off == set(ALL)
            await asyncio.sleep(0.02)
            await asyncio.to_thread(turn.restore, ("weights",))
            await asyncio.to_thread(turn.restore, ALL)
            await turn.resume()
        await asyncio.gather(*tasks)
        assert losses.num == 3, "each time the weights came back empty"
        assert len(stub.asked("/abort_request")) >= 3
        for one in episodes:
            sample = one.sample()
            first = len(sample.prompt_ids)
            assert sample.response_ids.tolist() == [token(first + number) for number in range(60)]
            assert set(sample.versions.tolist()) == {3}
        assert not stub.died


async def test_who_waits_for_a_turn_is_told_when_the_actor_leaves(folders):
    async with client() as (stub, engine):
        turn = EngineTurn(engine, engine, on_weights_lost=Losses())
        turn.started()
        waiting = asyncio.create_task(read(turn, tokens=3))
        await asyncio.sleep(0.02)
        turn.end()
        assert (await waiting).finish == "abort"
        assert not stub.running


async def test_a_loss_of_weights_that_could_not_be_told_is_told_again(folders):
    losses = Losses()

    async def tell() -> None:
        await losses()
        if losses.num == 1:
            raise EngineError("nobody listens", remedy="try again")

    async with client() as (_, engine):
        turn = EngineTurn(engine, engine, on_weights_lost=tell)
        turn.started()
        await turn.quiesce()
        await asyncio.to_thread(turn.release, ALL)
        with pytest.raises(MemoryFault, match="nobody listens"):
            await asyncio.to_thread(turn.restore, ALL)
        with pytest.raises(EngineError, match="weights have no contents"):
            await turn.resume()
        assert not turn.has_turn
        await asyncio.to_thread(turn.restore, ALL)
        assert losses.num == 2
        await turn.resume()
        assert turn.has_turn


# -- the embedded engine -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def embedded(folder: Path, capacity: int = 64 << 20) -> AsyncGenerator[EmbeddedEngine]:
    arena = Arena(HostVmmDriver("host:0", capacity), HostPool(0), chunk_bytes=1 << 20)
    options = EmbeddedOptions(max_running=4, context_length=128, seed=5, stream_interval=4)
    engine = EmbeddedEngine(folder, options, memory=arena)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield engine
    finally:
        await engine.close()


async def test_the_embedded_engine_leaves_and_comes_back_with_the_same_tokens(folders):
    own = EmbeddedEngine(folders[1], EmbeddedOptions(max_running=4, context_length=128, stream_interval=4))
    async with embedded(folders[1]) as engine:
        planned = {report.tag: report.num_bytes for report in engine.memory_tags()}
        await engine.start()
        held = {report.tag: report.num_bytes for report in engine.memory_tags()}
        for tag, num_bytes in held.items():
            assert 0.9 * planned[tag] - (1 << 20) <= num_bytes <= 1.1 * planned[tag] + (1 << 20), tag
        (pid,) = engine.memory_pids()
        assert device_bytes([pid], "host:0") >= sum(held.values())
        turn = EngineTurn(engine, engine, on_weights_lost=Losses())
        turn.started()
        one = episode(turn, folders[1], 0, tokens=80, seed=11)
        task = asyncio.create_task(one.generate())
        await turn.resume()
        for _ in range(4):
            await asyncio.sleep(0.01)
            await turn.quiesce()
            await asyncio.to_thread(turn.release, ALL)
            assert device_bytes([pid], "host:0") == 0, "the memory really left"
            await asyncio.to_thread(turn.restore, ALL)
            await prepare_folder(engine, folders[1], 0)
            await engine.commit_weights(0)
            await turn.resume()
        await task
        await own.start()
        try:
            plain = ModelAccess(generate=own.generate, sampling=one_sampling(80, 11), context_length=512)
            tokenizer = load_tokenizer(folders[1])
            expected = Episode(prompt=PROMPT, index=0, tokenizer=tokenizer, model=plain)
            await expected.generate()
        finally:
            await own.close()
        assert one.sample().response_ids.tolist() == expected.sample().response_ids.tolist()
