"""Several real servers (the embedded engine over loopback HTTP) behind one engine: routing, failures, versions."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import msgspec
import numpy as np
import pytest
from aiohttp import ClientSession, web

from myxa.actors.engines.embedded.engine import EmbeddedOptions
from myxa.actors.engines.engine_pool import EnginePool, MemberState
from myxa.actors.engines.http_server import ServedEngine, serve
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.core.errors import EngineError, RequestRefused
from myxa.core.messages import WeightManifest

DEADLINE_S = 60
SERVING, FENCED, JOINING = MemberState.SERVING, MemberState.FENCED, MemberState.JOINING
OPTIONS = SglangOptions(vocab_size=320, start_s=2, call_s=10, health_every_s=0.1, lost_after_s=0.3, name="rollout/0")


class Fleet:
    """Servers that can be stopped and started again at their addresses, and a pool in front of them."""

    def __init__(self, folders) -> None:
        self.folders = folders
        self.stacks: dict[str, AsyncExitStack] = {}
        self.served: dict[str, ServedEngine] = {}
        self.pool: EnginePool

    async def start_server(self, name: str, port: int = 0, seed: int = 0) -> ServedEngine:
        self.stacks[name] = AsyncExitStack()
        options = EmbeddedOptions(max_running=16, stream_interval=2, seed=seed)
        server = serve(self.folders[0], port=port, options=options, is_incremental=True)
        self.served[name] = await self.stacks[name].enter_async_context(server)
        return self.served[name]

    async def stop_server(self, name: str) -> None:
        await self.stacks.pop(name).aclose()

    async def adopt(self, version: int) -> None:
        folder = self.folders[version % len(self.folders)]
        await self.pool.prepare_weights(
            WeightManifest(
                version=version, channel="disk", location=str(folder), generation=0, num_bytes=0, tensors=(), digest="",
                host="",
            )
        )  # fmt: skip
        await self.pool.commit_weights(version)

    def states(self) -> dict[str, MemberState]:
        by_url = self.pool.states()
        return {name: by_url[served.url] for name, served in self.served.items()}

    async def until(self, **states: MemberState) -> None:
        async with asyncio.timeout(20):
            while any(self.states()[name] is not state for name, state in states.items()):
                await asyncio.sleep(0.02)

    async def running(self) -> dict[str, int]:
        return {name: (await served.engine.info()).running for name, served in self.served.items()}


@asynccontextmanager
async def fleet(folders, names: str = "ab"):
    made = Fleet(folders)
    try:
        async with asyncio.timeout(DEADLINE_S):
            urls = [(await made.start_server(name)).url for name in names]
            makers = {url: partial(SglangEngine, url, OPTIONS) for url in urls}
            made.pool = EnginePool(makers, name="rollout/0", retry_s=0.1)
            await made.pool.start()
            await made.adopt(1)
            yield made
    finally:
        await made.pool.close()
        for name in list(made.stacks):
            await made.stop_server(name)


@asynccontextmanager
async def watched(pool: EnginePool):
    """The watch that the rollout actor keeps over its engine."""
    watch = asyncio.ensure_future(pool.until_lost())
    try:
        yield watch
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def collect(engine, request, result):
    return result([delta async for delta in engine.generate(request)])


def session(request, name: str):
    return msgspec.structs.replace(request, session=name)


@pytest.mark.asyncio
async def test_the_pool_is_one_engine_and_spreads_requests(folders, ask, result):
    async with fleet(folders) as it:
        info = await it.pool.info()
        assert (info.max_running, info.version, info.context_length) == (32, 1, 128)
        await it.pool.pause("in_place")
        jobs = [
            asyncio.ensure_future(collect(it.pool, ask(f"r{i}", 5, max_new_tokens=6, ignore_eos=True), result))
            for i in range(8)
        ]
        while (await it.pool.info()).running < 8:
            await asyncio.sleep(0.02)
        waiting = {name: (await served.engine.info()).waiting for name, served in it.served.items()}
        running = await it.running()
        assert {name: running[name] + waiting[name] for name in running} == {"a": 4, "b": 4}
        await it.pool.resume()
        for got in await asyncio.gather(*jobs):
            assert got.versions.tolist() == [1] * 6
        with pytest.raises(RequestRefused, match="max_new_tokens"):
            await collect(it.pool, ask("long", 5, max_new_tokens=1000), result)
        assert set(it.states().values()) == {SERVING}


@pytest.mark.asyncio
async def test_requests_of_a_lost_server_go_on_elsewhere_with_their_tokens(folders, ask, result, judge, caplog):
    """Server "a" is stopped while it streams; nothing is generated twice, and every log-prob is the model's own."""
    async with fleet(folders) as it, watched(it.pool) as watch:
        request = session(ask("r1", 5, max_new_tokens=100, ignore_eos=True), "g")
        deltas = []
        async for delta in it.pool.generate(request):
            deltas.append(delta)
            if len(deltas) == 2:
                await it.stop_server("a" if (await it.running())["a"] else "b")
        got = result(deltas)
        assert (len(got.ids), got.finish, set(got.versions.tolist())) == (100, "length", {1})
        exact = judge(folders[1]).logprobs(request.input_ids, got.ids, 1.0)
        assert np.abs(exact - got.logprobs).max() < 1e-4
        assert sorted(it.states().values(), key=str) == [FENCED, SERVING]
        assert "is fenced" in caplog.text
        assert not watch.done()


@pytest.mark.asyncio
async def test_a_server_that_comes_back_serves_nothing_before_it_has_a_version(folders, ask, result):
    async with fleet(folders) as it, watched(it.pool):
        port = it.served["a"].port
        await it.stop_server("a")
        await it.until(a=FENCED)
        await it.adopt(2)
        assert it.states() == {"a": FENCED, "b": SERVING}
        await it.start_server("a", port)
        await it.until(a=JOINING)
        for i in range(6):
            got = await collect(it.pool, ask(f"r{i}", 5, max_new_tokens=4, ignore_eos=True), result)
            assert got.versions.tolist() == [2] * 4
        assert (await it.served["a"].engine.info()).version == 0
        await it.adopt(3)
        await it.until(a=SERVING)
        assert [(await s.engine.info()).version for s in it.served.values()] == [3, 3]


@pytest.mark.asyncio
async def test_a_server_restarted_behind_our_back_never_serves_its_old_weights(folders, ask, result):
    """It is back before its health is looked at: only its stamps tell that it lost the weights it was given."""
    patient = EmbeddedOptions(max_running=16, stream_interval=2)
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
        first = await stack.enter_async_context(serve(folders[0], options=patient))
        other = await stack.enter_async_context(serve(folders[0], options=patient))
        options = SglangOptions(vocab_size=320, call_s=10, health_every_s=30, name="rollout/0")
        makers = {url: partial(SglangEngine, url, options) for url in (first.url, other.url)}
        pool = EnginePool(makers, name="rollout/0", retry_s=30)
        stack.push_async_callback(pool.close)
        await pool.start()
        place = WeightManifest(
            version=5,
            channel="disk",
            location=str(folders[1]),
            generation=0,
            num_bytes=0,
            tensors=(),
            digest="",
            host="",
        )
        await pool.prepare_weights(place)
        await pool.commit_weights(5)
        await other.engine.prepare_folder(folders[0], 0)
        await other.engine.commit_weights(0)  # what a restart leaves: the weights of the folder it was started with
        for i in range(8):
            got = await collect(pool, ask(f"r{i}", 5, max_new_tokens=4, ignore_eos=True), result)
            assert got.versions.tolist() == [5] * 4
        jobs = [collect(pool, ask(f"s{i}", 5, max_new_tokens=4, ignore_eos=True), result) for i in range(8)]
        for got in await asyncio.gather(*jobs):
            assert got.versions.tolist() == [5] * 4
        assert pool.states() == {first.url: SERVING, other.url: FENCED}


@pytest.mark.asyncio
async def test_a_commit_that_fails_on_one_server_fences_that_one(folders, ask, result):
    async with fleet(folders) as it, watched(it.pool) as watch:
        await it.pool.prepare_weights(
            WeightManifest(
                version=2, channel="disk", location=str(folders[2]), generation=0, num_bytes=0, tensors=(), digest="",
                host="",
            )
        )  # fmt: skip
        await it.stop_server("b")
        await it.pool.commit_weights(2)
        assert it.states() == {"a": SERVING, "b": FENCED}
        got = await collect(it.pool, ask("r", 5, max_new_tokens=4, ignore_eos=True), result)
        assert got.versions.tolist() == [2] * 4
        await it.stop_server("a")
        with pytest.raises(EngineError, match=r"rollout/0: no server of the pool serves: http"):
            await watch
        with pytest.raises(EngineError, match="no server of the pool serves"):
            await collect(it.pool, ask("r", 5, max_new_tokens=4), result)


@pytest.mark.asyncio
async def test_a_pool_of_nobody_is_told_by_name():
    pool = EnginePool({url: partial(SglangEngine, url, OPTIONS) for url in ("http://127.0.0.1:9",)}, name="rollout/0")
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9: .*no healthy answer within 2 s"):
        await pool.start()
    await pool.close()
    with pytest.raises(ValueError, match="at least one"):
        EnginePool({}, name="x")


@asynccontextmanager
async def router(targets: list[str]):
    """What sglang-router does with /generate: hands each request on to the next server and the answer back."""
    paths: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        target = targets[len(paths) % len(targets)]
        async with ClientSession() as session, session.post(target + request.path, data=await request.read()) as got:
            answer = web.StreamResponse(status=got.status)
            await answer.prepare(request)
            async for data in got.content.iter_any():
                await answer.write(data)
        return answer

    app = web.Application()
    app.router.add_route("*", "/{anything:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", paths
    finally:
        await runner.cleanup()


@pytest.mark.asyncio
async def test_behind_a_router_requests_go_through_it_and_control_goes_to_the_servers(folders, ask, result):
    served_by = EmbeddedOptions(max_running=16, stream_interval=2)
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
        servers = [await stack.enter_async_context(serve(folders[0], options=served_by)) for _ in range(2)]
        url, paths = await stack.enter_async_context(router([server.url for server in servers]))
        options = SglangOptions(vocab_size=320, call_s=10, generate_url=url, name="rollout/0")
        pool = EnginePool({s.url: partial(SglangEngine, s.url, options) for s in servers}, name="rollout/0")
        stack.push_async_callback(pool.close)
        await pool.start()
        manifest = WeightManifest(
            version=1,
            channel="disk",
            location=str(folders[1]),
            generation=0,
            num_bytes=0,
            tensors=(),
            digest="",
            host="",
        )
        await pool.prepare_weights(manifest)
        await pool.commit_weights(1)
        assert [(await s.engine.info()).version for s in servers] == [1, 1]
        jobs = [collect(pool, ask(f"r{i}", 5, max_new_tokens=4, ignore_eos=True), result) for i in range(6)]
        for got in await asyncio.gather(*jobs):
            assert got.versions.tolist() == [1] * 4
        assert paths == ["/generate"] * 6
