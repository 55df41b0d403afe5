"""The embedded engine as a whole: its threads, its memory, its weights, and what happens when something breaks."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.engines.contract import ask, collect, later

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.engines.embedded.model import Decoder
from myxa.actors.engines.embedded.tensors import kv_bytes, weight_bytes
from myxa.actors.models.hf_folder import open_weights, read_config, write_folder
from myxa.actors.models.tiny import init_weights, make_tiny_model, tiny_config
from myxa.actors.weights.channels.host import make_writer
from myxa.core.errors import EngineError, ModelError
from myxa.core.host_memory import available_bytes
from myxa.core.messages import WeightManifest
from myxa.core.protocols import NamedArray

OPTIONS = EmbeddedOptions(max_running=8, stream_interval=2, name="engine under test")
DEADLINE_S = 60


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(OPTIONS.name)]


@pytest.fixture
def published(tmp_path: Path, folders):
    """Publishes a folder's weights through shared memory."""
    writer = make_writer("shm", tmp_path, folders[0])

    def publish(version: int, folder: Path) -> WeightManifest:
        with open_weights(folder, read_config(folder)) as tensors:
            return writer.publish(version, list(tensors.values()))

    yield publish
    writer.close()


@asynccontextmanager
async def running(folder: Path, options: EmbeddedOptions = OPTIONS) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(folder, options)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await engine.start()
            yield engine
    finally:
        await engine.close()
    assert not own_threads()


async def test_weights_of_another_shape_or_torn_are_refused_by_name(folders, published, tmp_path):
    other = make_tiny_model(tmp_path / "other", "1m", vocab_size=320, context_length=128)
    writer = make_writer("shm", tmp_path, folders[0])
    request = ask("r", 8, max_new_tokens=20, seed=1)
    async with running(folders[0]) as engine:
        before = await collect(engine, request)
        await engine.prepare_weights(published(1, folders[1]))
        for tensors, says in (
            (
                init_weights(tiny_config("0p5m", 384), 0),
                r"embed_tokens.weight came as float32\[384, 128\].*\[320, 128\]",
            ),
            (init_weights(other, 0)[:-1][:1], r"weight model.norm.weight is missing"),
        ):
            with pytest.raises(EngineError, match=says):
                await engine.prepare_weights(writer.publish(2, tensors))
            writer.release(2)
        with pytest.raises(EngineError, match="version 1 cannot be committed, nothing is prepared"):
            await engine.commit_weights(1)  # its bytes were overwritten by the failed ones
        assert np.array_equal(before.ids, (await collect(engine, request)).ids)
    writer.close()


async def test_a_commit_whose_caller_stops_waiting_never_mixes_weights(folders, published, judge):
    probe = ask("probe", 8, max_new_tokens=30, ignore_eos=True)
    async with running(folders[0]) as engine:
        stream = later(engine, ask("r", 4, max_new_tokens=100, ignore_eos=True))
        await engine.prepare_weights(published(1, folders[1]))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await engine.commit_weights(1)
        await engine.prepare_weights(published(2, folders[2]))
        for version in ((await engine.info()).version, 2):
            if version == 2:
                await engine.commit_weights(2)
            got = await collect(engine, probe)
            assert set(got.versions.tolist()) == {version}
            exact = judge(folders[version]).logprobs(probe.input_ids, got.ids, 1.0)
            assert np.abs(exact - got.logprobs).max() <= 1e-5
        await stream


@pytest.fixture
def broken_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], None]:
    """Has the decoder raise on the calls that are picked, as a bug or a lack of memory would."""

    def begin(is_broken: Callable[[int], bool]) -> None:
        number, inner = 0, Decoder.hidden

        def forward(self, *args, **named):
            nonlocal number
            number += 1
            if is_broken(number):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return inner(self, *args, **named)

        monkeypatch.setattr(Decoder, "hidden", forward)

    return begin


async def test_a_step_that_breaks_ends_every_request_and_call_and_nothing_hangs(folders, broken_steps):
    async with running(folders[0]) as engine:
        broken_steps(lambda number: number >= 6)
        streams = [later(engine, ask(f"r{i}", max_new_tokens=60, ignore_eos=True)) for i in range(12)]
        outcomes: list[object] = []  # of calls that wait while it breaks
        while not any(isinstance(o, EngineError) for o in outcomes):
            outcomes = await asyncio.gather(*(engine.info() for _ in range(5)), return_exceptions=True)
        for outcome in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert "engine under test broke: RuntimeError: DefaultCPUAllocator" in str(outcome)
            assert isinstance(outcome.__cause__, RuntimeError)
        for attempt in (engine.info(), engine.abort(), collect(engine, ask("late"))):
            with pytest.raises(EngineError, match="broke"):
                await attempt


async def test_e03_a_step_that_fails_once_costs_no_request(folders, broken_steps):
    """A moment without memory: the model computes again a step later."""

    async def answers() -> list[list[int]]:
        requests = [ask(f"r{i}", max_new_tokens=30, ignore_eos=True, temperature=0) for i in range(6)]
        return [one.ids.tolist() for one in await asyncio.gather(*(collect(engine, one) for one in requests))]

    async with running(folders[0]) as engine:
        wanted = await answers()
        broken_steps(lambda number: number == 6)
        assert await answers() == wanted


async def test_impossible_settings_are_refused_before_anything_starts(folders, tmp_path):
    for options, says in (
        (EmbeddedOptions(dtype="float16"), "dtype float16 is not for CPUs"),
        (EmbeddedOptions(context_length=129), r"context_length 129 is outside 2..128"),
        (EmbeddedOptions(memory_share=1e-9), "do not fit into"),
    ):
        with pytest.raises(EngineError, match=says):
            async with running(folders[0], options):
                pass
    engine = EmbeddedEngine(tmp_path / "nowhere")
    with pytest.raises(EngineError, match="was not started"):
        await engine.info()
    with pytest.raises(ModelError, match="does not exist"):
        await engine.start()
    await engine.close()


async def test_scarce_memory_means_fewer_rows_and_still_every_answer(folders):
    config = read_config(folders[0])
    wanted = weight_bytes(config, "float32") + 3.5 * kv_bytes(config, "float32", num_slots=1, context_length=128)
    options = EmbeddedOptions(memory_share=wanted / available_bytes(), name=OPTIONS.name)
    async with running(folders[0], options) as engine:
        assert 1 <= (await engine.info()).max_running <= 8, "about three rows, as the host's memory wavers"
        streams = [collect(engine, ask(f"r{i}", max_new_tokens=5, ignore_eos=True)) for i in range(20)]
        assert [len(r.ids) for r in await asyncio.gather(*streams)] == [5] * 20


async def test_close_while_it_starts_leaves_no_thread(folders):
    engine = EmbeddedEngine(folders[0], OPTIONS)
    start = asyncio.gather(engine.start())
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await start
    assert not own_threads()


def test_an_abandoned_loop_does_not_keep_the_thread(folders):
    """A program that ends its loop without closing the engine."""

    async def forget() -> None:
        engine = EmbeddedEngine(folders[0], OPTIONS)
        await engine.start()
        await anext(engine.generate(ask("r", max_new_tokens=100, ignore_eos=True)))

    asyncio.run(forget())
    for _ in range(3):  # the worker's thread ends when nothing refers to its executor any more
        for thread in threading.enumerate():
            if thread.name.startswith(OPTIONS.name):
                thread.join(5 if thread.name == OPTIONS.name else 0.2)
        gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith(OPTIONS.name):
            thread.join(10)
    assert not own_threads()


@pytest.mark.parametrize(("value", "message"), [
    (float("nan"), "weight model.norm.weight holds NaN"),
    (float("-inf"), "weight model.norm.weight holds NaN or infinity"),
    (3e38, "logits of the model folder's weights are not finite"),
])  # fmt: skip
async def test_e6_broken_weights_end_the_start_and_blame_no_prompt(tmp_path: Path, value: float, message: str):
    config = make_tiny_model(tmp_path, "0p5m", seed=5)
    with open_weights(tmp_path, config) as tensors:
        copies = [NamedArray(spec=one.spec, data=memoryview(bytes(one.data))) for one in tensors.values()]
    for at, one in enumerate(copies):
        if one.spec.name == "model.norm.weight":
            numbers = np.full(one.spec.shape, value, dtype=np.float32)
            if one.spec.dtype != "float32":
                numbers = (numbers.view(np.uint32) >> 16).astype(np.uint16)
            copies[at] = NamedArray(spec=one.spec, data=memoryview(numbers.tobytes()))
    write_folder(tmp_path, config.source, copies)
    with pytest.raises(ModelError, match=message):
        async with running(tmp_path):
            pass
