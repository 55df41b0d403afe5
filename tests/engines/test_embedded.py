"""The embedded engine as a whole: its threads, its memory, its weights, and what happens when something breaks."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.models.hf_folder import open_weights, read_config, write_folder
from myxa.actors.models.tiny import init_weights, make_tiny_model, tiny_config
from myxa.actors.weights.channels.reader import ChannelReader, make_writer
from myxa.core.errors import EngineError, ModelError
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


async def collect(engine, request, result):
    async with asyncio.timeout(DEADLINE_S):
        return result([delta async for delta in engine.generate(request)])


@pytest.mark.asyncio
async def test_shared_memory_weights_reach_running_requests_version_after_version(
    folders, ask, result, published, judge
):
    engine = EmbeddedEngine(folders[0], OPTIONS, reader=ChannelReader())
    await engine.start()
    try:
        streams = asyncio.gather(
            *(collect(engine, ask(f"r{i}", 8, max_new_tokens=110, ignore_eos=True), result) for i in range(24))
        )
        for version in range(1, 6):
            await engine.prepare_weights(published(version, folders[version % 3]))
            await engine.commit_weights(version)
            await asyncio.sleep(0.01)
        got = await streams
        last = await collect(engine, ask("last", 8, max_new_tokens=20, ignore_eos=True), result)
    finally:
        await engine.close()
    seen = {int(v) for r in got for v in r.versions}
    assert len(seen) > 2
    assert all(np.array_equal(r.versions, np.sort(r.versions)) and len(r.ids) == 110 for r in got)
    assert set(last.versions.tolist()) == {5}
    exact = judge(folders[5 % 3]).logprobs(ask("last", 8).input_ids, last.ids, 1.0)
    assert np.abs(exact - last.logprobs).max() <= 1e-5
    assert not own_threads()


@pytest.mark.asyncio
async def test_pause_mode_retract_rebuilds_the_cache_at_every_commit(folders, ask, result, published, judge):
    options = EmbeddedOptions(max_running=8, pause_mode="retract", name=OPTIONS.name)
    engine = EmbeddedEngine(folders[0], options, reader=ChannelReader())
    await engine.start()
    try:
        stream = asyncio.gather(collect(engine, ask("r", 8, max_new_tokens=110, ignore_eos=True), result))
        while not (await engine.info()).running:
            await asyncio.sleep(0.001)
        await engine.prepare_weights(published(1, folders[1]))
        await engine.commit_weights(1)
        (got,) = await stream
    finally:
        await engine.close()
    for version in {int(v) for v in got.versions}:
        mine = got.versions == version
        exact = judge(folders[version]).logprobs(ask("r", 8).input_ids, got.ids, 1.0)
        assert np.abs(exact - got.logprobs)[mine].max() <= 1e-5


@pytest.mark.asyncio
async def test_weights_of_another_shape_or_torn_are_refused_by_name(folders, ask, result, published, tmp_path):
    other = make_tiny_model(tmp_path / "other", "1m", vocab_size=320, context_length=128)
    engine = EmbeddedEngine(folders[0], OPTIONS, reader=ChannelReader())
    await engine.start()
    try:
        before = await collect(engine, ask("r", 8, max_new_tokens=20, seed=1), result)
        await engine.prepare_weights(published(1, folders[1]))
        writer = make_writer("shm", tmp_path, folders[0])
        smaller = init_weights(tiny_config("0p5m", 384), 0)
        with pytest.raises(EngineError, match=r"embed_tokens.weight came as float32\[384, 128\].*\[320, 128\]"):
            await engine.prepare_weights(writer.publish(2, smaller))
        with pytest.raises(EngineError, match=r"weight model.norm.weight is missing"):
            await engine.prepare_weights(writer.publish(3, init_weights(other, 0)[:-1][:1]))
        writer.close()
        with pytest.raises(EngineError, match="version 1 cannot be committed, nothing is prepared"):
            await engine.commit_weights(1)  # its bytes were overwritten by the failed ones
        after = await collect(engine, ask("r", 8, max_new_tokens=20, seed=1), result)
        assert np.array_equal(before.ids, after.ids)
    finally:
        await engine.close()


@pytest.mark.asyncio
async def test_an_impatient_commit_never_mixes_weights(folders, ask, result, published, judge):
    """A caller that stops waiting for a commit must not leave the served set open to the next prepare."""
    engine = EmbeddedEngine(folders[0], OPTIONS, reader=ChannelReader())
    await engine.start()
    try:
        stream = asyncio.gather(collect(engine, ask("r", 4, max_new_tokens=100, ignore_eos=True), result))
        await engine.prepare_weights(published(1, folders[1]))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await engine.commit_weights(1)
        await engine.prepare_weights(published(2, folders[2]))
        version = (await engine.info()).version
        got = await collect(engine, ask("probe", 8, max_new_tokens=30, ignore_eos=True), result)
        assert set(got.versions.tolist()) == {version}
        exact = judge(folders[version]).logprobs(ask("probe", 8).input_ids, got.ids, 1.0)
        assert np.abs(exact - got.logprobs).max() <= 1e-5
        await engine.commit_weights(2)
        got = await collect(engine, ask("probe", 8, max_new_tokens=30, ignore_eos=True), result)
        exact = judge(folders[2]).logprobs(ask("probe", 8).input_ids, got.ids, 1.0)
        assert np.abs(exact - got.logprobs).max() <= 1e-5
        await stream
    finally:
        await engine.close()


@pytest.mark.asyncio
async def test_without_a_reader_folders_can_be_loaded_and_manifests_cannot(folders, published):
    engine = EmbeddedEngine(folders[0], OPTIONS)
    await engine.start()
    try:
        with pytest.raises(EngineError, match="without a reader"):
            await engine.prepare_weights(published(1, folders[1]))
        await engine.prepare_folder(folders[1], 4)
        await engine.commit_weights(4)
        assert (await engine.info()).version == 4
        with pytest.raises(ModelError, match=r"neither model\.safetensors"):
            await engine.prepare_folder(folders[1].parent, 5)
    finally:
        await engine.close()


@contextmanager
def broken_step(monkeypatch: pytest.MonkeyPatch, after: int):
    """The decoder raises on its `after`-th call, as a bug or a lack of memory would."""
    from myxa.actors.engines.embedded.model import Decoder

    calls = []
    inner = Decoder.forward

    def forward(self, *args, **named):
        calls.append(1)
        if len(calls) >= after:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return inner(self, *args, **named)

    monkeypatch.setattr(Decoder, "forward", forward)
    yield
    monkeypatch.undo()


@pytest.mark.asyncio
async def test_a_step_that_breaks_is_told_to_everybody_and_nothing_hangs(folders, ask, result, monkeypatch):
    engine = EmbeddedEngine(folders[0], OPTIONS)
    await engine.start()
    try:
        with broken_step(monkeypatch, after=6):
            streams = [collect(engine, ask(f"r{i}", max_new_tokens=60, ignore_eos=True), result) for i in range(12)]
            for outcome in await asyncio.gather(*streams, return_exceptions=True):
                assert isinstance(outcome, EngineError)
                assert "engine under test broke: RuntimeError: DefaultCPUAllocator" in str(outcome)
                assert isinstance(outcome.__cause__, RuntimeError)
        for attempt in (engine.info(), engine.abort(), collect(engine, ask("late"), result)):
            with pytest.raises(EngineError, match="broke"):
                await attempt
    finally:
        await engine.close()
    assert not own_threads()


@pytest.mark.asyncio
async def test_e03_a_step_that_fails_once_costs_no_request(folders, ask, result, monkeypatch):
    """A moment without memory: the model computes again a step later."""
    from myxa.actors.engines.embedded.model import Decoder

    inner, calls = Decoder.forward, []

    def forward(self, *args, **named):
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return inner(self, *args, **named)

    def requests():
        return [ask(f"r{i}", max_new_tokens=30, ignore_eos=True, temperature=0) for i in range(6)]

    engine = EmbeddedEngine(folders[0], OPTIONS)
    await engine.start()
    try:
        wanted = await asyncio.gather(*(collect(engine, one, result) for one in requests()))
        calls.clear()
        monkeypatch.setattr(Decoder, "forward", forward)
        found = await asyncio.gather(*(collect(engine, one, result) for one in requests()))
    finally:
        await engine.close()
    assert [one.ids.tolist() for one in found] == [one.ids.tolist() for one in wanted]


@pytest.mark.asyncio
async def test_calls_that_wait_while_a_step_breaks_are_answered(folders, ask, result, monkeypatch):
    engine = EmbeddedEngine(folders[0], OPTIONS)
    await engine.start()
    try:
        with broken_step(monkeypatch, after=3):
            stream = asyncio.gather(collect(engine, ask("r", max_new_tokens=60, ignore_eos=True), result))
            outcomes: list[object] = []
            async with asyncio.timeout(DEADLINE_S):
                while not any(isinstance(o, EngineError) for o in outcomes):
                    outcomes = await asyncio.gather(*(engine.info() for _ in range(5)), return_exceptions=True)
            with pytest.raises(EngineError, match="broke"):
                await stream
    finally:
        await engine.close()


@pytest.mark.asyncio
async def test_impossible_settings_are_refused_before_anything_starts(folders, tmp_path):
    for options, says in (
        (EmbeddedOptions(dtype="float16"), "dtype float16 is not for CPUs"),
        (EmbeddedOptions(context_length=129), r"context_length 129 is outside 2..128"),
        (EmbeddedOptions(max_running=0), "max_running is 0"),
        (EmbeddedOptions(memory_share=1e-9), "do not fit into"),
    ):
        engine = EmbeddedEngine(folders[0], options)
        with pytest.raises(EngineError, match=says):
            await engine.start()
        await engine.close()
    engine = EmbeddedEngine(tmp_path / "nowhere")
    with pytest.raises(EngineError, match="was not started"):
        await engine.info()
    with pytest.raises(ModelError, match="does not exist"):
        await engine.start()
    await engine.close()


@pytest.mark.asyncio
async def test_scarce_memory_means_fewer_rows_and_still_every_answer(folders, ask, result):
    from myxa.memory.budget import kv_bytes, weight_bytes
    from myxa.memory.host import available_bytes

    config = read_config(folders[0])
    wanted = weight_bytes(config, "float32") + 3.5 * kv_bytes(config, "float32", num_slots=1, context_length=128)
    share = wanted / available_bytes()
    engine = EmbeddedEngine(folders[0], EmbeddedOptions(memory_share=share, name=OPTIONS.name))
    try:
        info = await engine.start()
        assert 1 <= info.max_running <= 8, "about three rows, as the host's memory wavers"
        streams = [collect(engine, ask(f"r{i}", max_new_tokens=5, ignore_eos=True), result) for i in range(20)]
        assert [len(r.ids) for r in await asyncio.gather(*streams)] == [5] * 20
    finally:
        await engine.close()


@pytest.mark.asyncio
async def test_close_while_it_starts_leaves_no_thread(folders):
    engine = EmbeddedEngine(folders[0], OPTIONS)
    start = asyncio.gather(engine.start())
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await start
    assert not own_threads()


def test_an_abandoned_loop_does_not_keep_the_thread(folders, ask):
    """A program that ends its loop without closing the engine: the thread notices that nobody listens."""

    async def forget() -> None:
        engine = EmbeddedEngine(folders[0], OPTIONS)
        await engine.start()
        deltas = engine.generate(ask("r", max_new_tokens=100, ignore_eos=True))
        await anext(deltas)

    asyncio.run(forget())
    for _ in range(2):  # the worker's thread ends when nothing refers to its executor any more
        for thread in threading.enumerate():
            if thread.name == OPTIONS.name:
                thread.join(10)
        gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith(OPTIONS.name):
            thread.join(10)
    assert not own_threads()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "weight model.norm.weight holds NaN"),
        (float("-inf"), "weight model.norm.weight holds NaN or infinity"),
        (3e38, "logits of the model folder's weights are not finite"),
    ],
)
async def test_e6_broken_weights_end_the_start_and_blame_no_prompt(tmp_path: Path, value: float, message: str):
    write_with_norm(tmp_path, value)
    engine = EmbeddedEngine(tmp_path, OPTIONS)
    try:
        with pytest.raises(ModelError, match=message):
            await engine.start()
    finally:
        await engine.close()


def write_with_norm(folder: Path, value: float) -> None:
    config = make_tiny_model(folder, "0p5m", seed=5)
    with open_weights(folder, config) as tensors:
        copies = []
        for tensor in tensors.values():
            data = bytes(tensor.data)
            if tensor.spec.name == "model.norm.weight":
                numbers = np.full(tensor.spec.shape, value, dtype=np.float32)
                data = (numbers.tobytes() if tensor.spec.dtype == "float32" else
                        (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())  # fmt: skip
            copies.append(NamedArray(spec=tensor.spec, data=memoryview(data)))
    write_folder(folder, config.source, copies)
