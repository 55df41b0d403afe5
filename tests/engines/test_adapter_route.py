"""Adapters that an SGLang server holds: each request is of the version that it began with, and nothing waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.contract import ask, collect, endless, later
from tests.harness.fake_sglang import FakeSglang, fake_sglang
from tests.harness.waiting import until

from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.launch import SglangLaunch, server_values
from myxa.actors.engines.sglang.server_args import SglangNeeds
from myxa.actors.engines.sglang.weight_routes import adapter_routes
from myxa.actors.models.adapters import WEIGHTS
from myxa.actors.weights.channels.host import DiskWeightWriter
from myxa.core.errors import ConfigError, EngineError
from myxa.core.messages import TensorSpec, WeightManifest
from myxa.core.protocols import NamedArray

NEEDS = SglangNeeds(adapter_rank=4, adapted=("o_proj", "q_proj"))
FACTS = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "o_proj", "v_proj"]}


def adapters(version: int) -> list[NamedArray]:
    """Those of one matrix."""
    found: list[NamedArray] = []
    for part, shape in (("lora_A", (4, 6)), ("lora_B", (6, 4))):
        data, name = (
            np.full(shape, version, np.float32).tobytes(),
            f"base_model.model.model.layers.0.o_proj.{part}.weight",
        )
        spec = TensorSpec(name=name, dtype="float32", shape=shape, offset=0, num_bytes=len(data))
        found.append(NamedArray(spec=spec, data=memoryview(data)))
    return found


@pytest.fixture
def writer(tmp_path: Path) -> DiskWeightWriter:
    return DiskWeightWriter(tmp_path / "weights", tmp_path, "here", lora={"rank": 4, "alpha": 8.0})


@asynccontextmanager
async def connected(**habits: Any) -> AsyncIterator[tuple[SglangEngine, FakeSglang]]:
    facts = {"context_length": 1024, "max_running_requests": 8, "model_path": str(habits.pop("folder", "/m")), **FACTS}
    habits = {"facts": facts} | habits
    async with fake_sglang(**habits) as server, asyncio.timeout(60), client_of(server) as engine:
        yield engine, server


@asynccontextmanager
async def client_of(server: FakeSglang) -> AsyncIterator[SglangEngine]:
    settings = SglangOptions(vocab_size=320, start_s=20, call_s=10, stall_s=10, name="rollout/3", needs=NEEDS)
    engine = SglangEngine(server.url, settings, adapter_routes)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def give(engine: SglangEngine, manifest: WeightManifest) -> None:
    await engine.prepare_weights(manifest)
    await engine.commit_weights(manifest.version)


async def test_requests_end_with_the_adapter_that_they_began_with_and_nothing_pauses(writer: DiskWeightWriter):
    async with connected(folder=writer.model_folder) as (engine, server):
        await give(engine, writer.publish(3, adapters(3)))
        (third,) = server.adapters
        old = later(engine, endless("old", 3, max_new_tokens=900))
        await until(lambda: bool(server.running))
        await engine.prepare_weights(writer.publish(4, adapters(4)))
        assert (await engine.info()).version == 3
        await engine.commit_weights(4)
        assert (await engine.info()).version == 4
        new = await collect(engine, ask("new", 3, max_new_tokens=5, ignore_eos=True))
        assert set(new.versions.tolist()) == {4}
        for version in (5, 6):
            await give(engine, writer.publish(version, adapters(version)))
        assert third in server.adapters and not old.done(), "a request still names it"
        assert len(server.adapters) == 3, "nothing names version 4 any more"
        server.every_s = 0.0
        assert set((await old).versions.tolist()) == {3}
        await give(engine, writer.publish(7, adapters(7)))
        assert len(server.adapters) == 2 and third not in server.adapters
        asked = {path for path, _ in server.calls}
    assert not asked & {"/pause_generation", "/update_weights_from_disk", "/continue_generation"}


def held(server: FakeSglang) -> set[str]:
    return {name.split(".")[3] for name in server.adapters}


async def test_requests_that_are_aborted_or_left_keep_no_adapter(writer: DiskWeightWriter):
    async with connected(folder=writer.model_folder) as (engine, server):
        for version, is_aborted, every_s in ((1, True, 0.005), (2, False, 0.005), (3, False, 0.2)):
            server.every_s = every_s
            await give(engine, writer.publish(version, adapters(version)))
            stream = later(engine, endless("left", 3, max_new_tokens=900))
            await until(lambda: bool(server.running))
            if is_aborted:
                await asyncio.sleep(10 * every_s)
                await engine.abort("left")
                assert (await stream).finish == "abort"
            else:  # the last one leaves before a token was drawn
                await asyncio.sleep(0.05)
                stream.cancel()
                await asyncio.gather(stream, return_exceptions=True)
            await until(lambda: not server.running)
        for version in (4, 5):
            await give(engine, writer.publish(version, adapters(version)))
        assert held(server) == {"4", "5"} and not server.named


@pytest.mark.parametrize("request_id", ["left", None])
async def test_requests_that_are_aborted_in_the_queue_keep_no_adapter(writer: DiskWeightWriter, request_id: str | None):
    """They are aborted with their first token; an abort in its queue would make SGLang 0.5.17 keep the adapter."""
    async with connected(folder=writer.model_folder) as (engine, server):
        server.every_s = 0.2
        await give(engine, writer.publish(1, adapters(1)))
        stream = later(engine, endless("left", 3, max_new_tokens=900))
        await until(lambda: bool(server.running))
        await engine.abort(request_id)
        assert (await stream).finish == "abort"
        for version in (2, 3, 4):
            await give(engine, writer.publish(version, adapters(version)))
        assert held(server) == {"3", "4"} and not server.named


async def test_nothing_waits_for_what_the_server_itself_ends_in_its_queue(writer: DiskWeightWriter):
    """SGLang 0.5.17 would wait for it before it unloads, and load nothing meanwhile."""
    async with connected(folder=writer.model_folder) as (engine, server):
        server.every_s = 0.2
        await give(engine, writer.publish(1, adapters(1)))
        stream = later(engine, endless("left", 3, max_new_tokens=900))
        await until(lambda: bool(server.running))
        server._abort_request({"abort_all": True})
        assert (await stream).finish == "abort"
        for version in (2, 3, 4):
            await give(engine, writer.publish(version, adapters(version)))
        assert held(server) == {"1", "3", "4"}


async def test_a_client_that_closes_waits_for_no_request_that_was_left(writer: DiskWeightWriter):
    async with connected(folder=writer.model_folder) as (engine, server):
        await give(engine, writer.publish(1, adapters(1)))
        server.every_s = 30
        stream = later(engine, endless("left", 3, max_new_tokens=900))
        await until(lambda: bool(server.running))
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        assert (await engine.info()).running == 1
        async with asyncio.timeout(5):
            await engine.close()


async def test_a_version_whose_number_comes_again_has_other_weights_and_another_name(writer: DiskWeightWriter):
    async with connected(folder=writer.model_folder) as (engine, server):
        for _ in range(2):
            await give(engine, writer.publish(1, adapters(1)))
        loaded = [body["lora_name"] for path, body in server.calls if path == "/load_lora_adapter"]
        assert len(set(loaded)) == 2


async def test_what_an_earlier_client_left_is_waited_for_by_no_one(writer: DiskWeightWriter):
    """Its actor was killed with requests under way: unloading their adapter would hold up all loads."""
    async with connected(folder=writer.model_folder, adapters={"theirs": "/a"}) as (engine, server):
        await give(engine, writer.publish(1, adapters(1)))
        (left,) = set(server.adapters) - {"theirs"}
        stream = later(engine, endless("left", 3, max_new_tokens=900))
        await until(lambda: bool(server.running))
        await engine.close()
        await asyncio.gather(stream, return_exceptions=True)
        async with client_of(server) as heir:
            for version in (2, 3, 4):
                await give(heir, writer.publish(version, adapters(version)))
            assert set((await collect(heir, ask("new", 3, max_new_tokens=5, ignore_eos=True))).versions.tolist()) == {4}
        unloaded = {body["lora_name"] for path, body in server.calls if path == "/unload_lora_adapter"}
        assert {"theirs", left} <= set(server.adapters) and len(server.adapters) == 4
        assert left not in unloaded and len(unloaded) == 1, "its own are unloaded"


async def test_a_server_that_was_started_again_serves_no_version_until_it_gets_one(writer: DiskWeightWriter):
    async with connected(folder=writer.model_folder) as (engine, server):
        await give(engine, writer.publish(1, adapters(1)))
        server.adapters.clear()
        assert (await engine.info()).version == -1
        with pytest.raises(EngineError, match="does not have the adapter of its version"):
            await collect(engine, ask("r", 3, max_new_tokens=5))
        await give(engine, writer.publish(2, adapters(2)))
        assert (await engine.info()).version == 2


async def test_what_cannot_be_told_apart_or_is_torn_is_refused_and_the_old_one_serves(writer: DiskWeightWriter):
    async with connected(folder=writer.model_folder) as (engine, server):
        await give(engine, writer.publish(1, adapters(1)))
        torn = writer.publish(2, adapters(2))
        path = Path(torn.location) / WEIGHTS
        whole = path.read_bytes()
        for wrong in (whole[:-8], whole[:-4] + b"\1\1\1\1", b""):
            path.write_bytes(wrong)
            with pytest.raises(EngineError, match="weight version 2"):
                await give(engine, torn)
        path.write_bytes(whole)
        for server.version, folder in (("7", writer.model_folder), ("default", Path("/another/model"))):
            server.facts["model_path"] = str(folder)
            with pytest.raises(EngineError, match=f"serves {folder} with weight_version {server.version}, and the ad"):
                await give(engine, torn)
        server.facts["model_path"] = str(writer.model_folder)
        server.fails_next = "/load_lora_adapter"
        with pytest.raises(EngineError, match="answered 500"):
            await give(engine, torn)
        assert (await collect(engine, ask("r", 3, max_new_tokens=2, ignore_eos=True))).versions.tolist() == [1, 1]
        await give(engine, torn)
        assert (await engine.info()).version == 2


@pytest.mark.parametrize(
    "wrong", [{"enable_lora": False}, {"max_lora_rank": 2}, {"lora_target_modules": ["q_proj"]}, {"enable_lora": None}]
)
async def test_servers_that_cannot_hold_them_are_refused_with_the_arguments_they_need(wrong: dict[str, Any]):
    with pytest.raises(
        ConfigError, match="cannot hold .*--enable-lora --max-lora-rank=4 --lora-target-modules o_proj q_proj"
    ):
        async with connected(facts={"context_length": 1024, **FACTS, **wrong}):
            pass


@pytest.mark.parametrize("said", ["myxa.", 5, [5, "myxa."], [{"id": ["myxa."]}], {}])
async def test_a_server_that_does_not_say_what_it_holds_serves_no_version(
    said: Any, writer: DiskWeightWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"context_length": 1024, "model_path": str(writer.model_folder), **FACTS, "lora_target_modules": 5}
    async with connected(facts=facts) as (engine, server):
        await give(engine, writer.publish(1, adapters(1)))
        assert (await engine.info()).version == 1
        monkeypatch.setattr(server, "_v1_models", lambda _: {"data": said})
        assert (await engine.info()).version == -1


def test_launched_servers_are_started_for_them():
    launch = SglangLaunch(
        python="python3", model_path="/m", table={"max_loras_per_batch": 4}, env={}, log_path=Path("/l"),
        dtype="bfloat16", seed=7, num_devices=1, max_running=64,
    )  # fmt: skip
    values = server_values(launch, 1, NEEDS)
    assert (values["enable_lora"], values["max_lora_rank"], values["max_loras_per_batch"]) == (True, 4, 4)
    assert values["lora_target_modules"] == ["o_proj", "q_proj"]
    assert "enable_lora" not in server_values(launch, 1)
