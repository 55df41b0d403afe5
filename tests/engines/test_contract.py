"""What every engine owes the rollout, asked of the embedded engine itself and of it behind real HTTP.

The third variant streams incrementally, as SGLang does when told so. Sockets are real loopback sockets.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.engines.http_server import serve
from myxa.actors.engines.sglang import SglangEngine, SglangOptions
from myxa.actors.models.hf_folder import open_weights, read_config
from myxa.actors.weights.channel import ChannelReader
from myxa.actors.weights.disk import DiskWeightWriter
from myxa.core.errors import EngineError, RequestRefused
from myxa.core.messages import WeightManifest
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
def publish(tmp_path: Path, folders: list[Path]) -> Callable[[int, Path], WeightManifest]:
    """Publishes a folder's weights as a version on the disk channel."""
    writer = DiskWeightWriter(tmp_path / "weights", folders[0], "here")

    def manifest(version: int, folder: Path) -> WeightManifest:
        with open_weights(folder, read_config(folder)) as tensors:
            return writer.publish(version, list(tensors.values()))

    return manifest


@pytest.fixture
def collect(result):
    async def everything(engine: Engine, request):
        return result([delta async for delta in engine.generate(request)])

    return everything


@pytest.mark.asyncio
async def test_start_tells_what_the_engine_is(kind, folders):
    async with running(kind, folders[0]) as engine:
        info = await engine.info()
        assert (info.vocab_size, info.context_length, info.max_running) == (320, 128, 16)
        assert (info.version, info.running, info.waiting) == (0, 0, 0)
        with pytest.raises(EngineError):
            await engine.start()


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
async def test_requests_that_cannot_be_served_are_refused_and_harm_nobody(kind, folders, ask, collect):
    wrong = [
        ([], {}), ([320], {}), ([-1], {}), (200, {}), (100, {"max_new_tokens": 29}), (4, {"max_new_tokens": 0}),
        (4, {"temperature": -1.0}), (4, {"top_p": 0.0}), (4, {"top_k": 0}), (4, {"stop_token_ids": (7, 1000)}),
    ]  # fmt: skip
    async with running(kind, folders[0]) as engine:
        good = asyncio.gather(collect(engine, ask("good", 5, max_new_tokens=110, ignore_eos=True)))
        for prompt, sampling in wrong:
            with pytest.raises(RequestRefused) as caught:
                await collect(engine, ask("bad", prompt, **({"max_new_tokens": 5} | sampling)))
            assert "'bad'" in str(caught.value)
            assert caught.value.remedy
        assert len((await good)[0].ids) == 110


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
async def test_abort_of_all_ends_running_and_waiting(kind, folders, ask, collect):
    async with running(kind, folders[0]) as engine:
        all_streams = asyncio.gather(
            *(collect(engine, ask(f"r{i}", max_new_tokens=110, ignore_eos=True)) for i in range(40))
        )
        while (await engine.info()).running < 16:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        await engine.abort()
        finishes = [r.finish for r in await all_streams]
        assert finishes.count("abort") >= 30
        info = await engine.info()
        assert (info.running, info.waiting) == (0, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_holds_tokens_back_and_resume_goes_on(mode, kind, folders, ask, collect, make_core, run_core):
    request = ask("r", 10, max_new_tokens=80, ignore_eos=True, seed=1)
    wanted = run_core(make_core(folders[0]), [request])["r"]
    async with running(kind, folders[0]) as engine:
        stream = asyncio.gather(collect(engine, request))
        while not (await engine.info()).running:
            await asyncio.sleep(0.001)
        await engine.pause(mode)
        late = asyncio.gather(collect(engine, ask("late", max_new_tokens=2, ignore_eos=True)))
        done, _ = await asyncio.wait([stream, late], timeout=0.3)
        assert not done
        await engine.resume()
        assert np.array_equal((await stream)[0].ids, wanted.ids)
        assert len((await late)[0].ids) == 2


@pytest.mark.asyncio
async def test_a_pause_with_abort_ends_streams_with_abort(kind, folders, ask, collect):
    async with running(kind, folders[0]) as engine:
        stream = asyncio.gather(collect(engine, ask("r", max_new_tokens=100, ignore_eos=True)))
        while not (await engine.info()).running:
            await asyncio.sleep(0.001)
        await engine.pause("abort")
        assert (await stream)[0].finish == "abort"
        await engine.resume()
        assert (await collect(engine, ask("r", max_new_tokens=3, ignore_eos=True))).finish == "length"


@pytest.mark.asyncio
async def test_versions_around_a_commit_in_the_middle_of_generations(kind, folders, ask, collect, publish, judge):
    async with running(kind, folders[0]) as engine:
        streams = asyncio.gather(
            *(collect(engine, ask(f"r{i}", 8, max_new_tokens=110, ignore_eos=True)) for i in range(12))
        )
        while (await engine.info()).running < 12:
            await asyncio.sleep(0.001)
        await engine.prepare_weights(publish(3, folders[1]))
        assert (await engine.info()).version == 0
        await engine.commit_weights(3)
        assert (await engine.info()).version == 3
        mixed = await streams
        after = await collect(engine, ask("after", 8, max_new_tokens=40, ignore_eos=True))
    assert {tuple(sorted(set(r.versions.tolist()))) for r in mixed} <= {(0, 3), (3,), (0,)}
    assert any(set(r.versions.tolist()) == {0, 3} for r in mixed), "the commit fell into a running generation"
    for i, got in enumerate(mixed):
        assert np.array_equal(got.versions, np.sort(got.versions))
        old = got.versions == 0
        exact = judge(folders[0]).logprobs(ask(f"r{i}", 8).input_ids, got.ids, 1.0)
        assert not old.any() or np.abs(exact - got.logprobs)[old].max() <= 1e-5
        assert old.all() or np.abs(exact - got.logprobs)[~old].max() > 1e-2
    assert set(after.versions.tolist()) == {3}
    exact = judge(folders[1]).logprobs(ask("after", 8).input_ids, after.ids, 1.0)
    assert np.abs(exact - after.logprobs).max() <= 1e-5


@pytest.mark.asyncio
async def test_commit_during_a_pause_stays_paused(kind, folders, ask, collect, publish):
    async with running(kind, folders[0]) as engine:
        await engine.pause("in_place")
        await engine.prepare_weights(publish(1, folders[1]))
        await engine.commit_weights(1)
        stream = asyncio.gather(collect(engine, ask("r", max_new_tokens=2)))
        done, _ = await asyncio.wait([stream], timeout=0.2)
        assert not done
        await engine.resume()
        assert set((await stream)[0].versions.tolist()) == {1}


@pytest.mark.asyncio
async def test_only_the_prepared_version_is_committed(kind, folders, publish):
    async with running(kind, folders[0]) as engine:
        with pytest.raises(EngineError, match=r"version 1 cannot be committed, nothing is prepared"):
            await engine.commit_weights(1)
        await engine.prepare_weights(publish(1, folders[1]))
        with pytest.raises(EngineError, match=r"version 2 cannot be committed, version 1 is prepared"):
            await engine.commit_weights(2)
        await engine.prepare_weights(publish(2, folders[2]))
        with pytest.raises(EngineError, match=r"version 1 cannot be committed, version 2 is prepared"):
            await engine.commit_weights(1)
        await engine.commit_weights(2)
        with pytest.raises(EngineError, match="nothing is prepared"):
            await engine.commit_weights(2)
        assert (await engine.info()).version == 2
        await engine.prepare_weights(publish(1, folders[1]))  # a trainer that went back to a checkpoint
        await engine.commit_weights(1)
        assert (await engine.info()).version == 1


@pytest.mark.asyncio
async def test_bad_weights_are_refused_and_the_old_ones_stay(kind, folders, ask, collect, publish, tmp_path):
    seeded = ask("r", 8, max_new_tokens=20, ignore_eos=True, seed=2)
    async with running(kind, folders[0]) as engine:
        before = await collect(engine, seeded)
        manifest = publish(1, folders[1])
        path = Path(manifest.location) / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(EngineError):
            await engine.prepare_weights(manifest)
            await engine.commit_weights(1)
        gone = msgspec.structs.replace(manifest, location=str(tmp_path / "no"))
        with pytest.raises(EngineError, match="no"):
            await engine.prepare_weights(gone)
        after = await collect(engine, seeded)
        assert np.array_equal(before.ids, after.ids)
        assert set(after.versions.tolist()) == {0}


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


@pytest.mark.asyncio
async def test_a_cancelled_reader_frees_its_row_and_the_name(kind, folders, ask, collect):
    async with running(kind, folders[0]) as engine:
        task = asyncio.get_running_loop().create_task(collect(engine, ask("same", max_new_tokens=110, ignore_eos=True)))
        while not (await engine.info()).running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while True:
            try:
                got = await collect(engine, ask("same", max_new_tokens=5, ignore_eos=True))
                break
            except RequestRefused:  # a server learns of the broken connection a moment later
                await asyncio.sleep(0.01)
        assert len(got.ids) == 5


@pytest.mark.asyncio
async def test_after_close_everything_is_refused(kind, folders, ask, collect):
    async with running(kind, folders[0]) as engine:
        stream = asyncio.gather(collect(engine, ask("r", max_new_tokens=110, ignore_eos=True)))
        while not (await engine.info()).running:
            await asyncio.sleep(0.001)
        await engine.close()
        with pytest.raises(EngineError):
            await stream
        await engine.close()
        for attempt in (collect(engine, ask("x")), engine.info(), engine.abort(), engine.pause("abort")):
            with pytest.raises(EngineError):
                await attempt


def test_unknown_versions_are_not_numbers():
    from myxa.actors.engines.sglang_wire import version_number

    assert [version_number(v) for v in ("7", 7, "default", None, "")] == [7, 7, NO_VERSION, NO_VERSION, NO_VERSION]
