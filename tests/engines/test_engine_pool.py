"""Several servers behind one engine: whom a request goes to, what failures cost, and that no two versions are served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.engines.contract import Result, ask, collect, later
from tests.harness.fake_sglang import FakeSglang, serving, token
from tests.harness.manifests import manifest_of
from tests.harness.waiting import until

from myxa.actors.engines import engine_pool
from myxa.actors.engines.engine_pool import SLACK, SPREAD, Choice, EnginePool, MemberState
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.core.errors import EngineError, RequestRefused, WeightsRefused
from myxa.core.messages import WeightManifest
from myxa.core.protocols import EngineInfo
from myxa.core.weight_channel import WeightProgress

DEADLINE_S = 60
SERVING, FENCED, JOINING = MemberState.SERVING, MemberState.FENCED, MemberState.JOINING
OPTIONS = SglangOptions(vocab_size=320, start_s=2, call_s=10, health_every_s=0.1, lost_after_s=0.3, name="rollout/0")


# -- the choice ----------------------------------------------------------------------------------------------------


def test_without_a_session_the_least_loaded_serves_and_names_break_ties():
    choice = Choice()
    assert choice.pick("", {"a": 3, "b": 1, "c": 1}) == "b"
    with pytest.raises(ValueError, match="no server"):
        choice.pick("s", {})


def test_a_session_stays_until_its_server_is_overloaded_or_gone(monkeypatch):
    monkeypatch.setattr(engine_pool, "MAX_SESSIONS", 3)
    choice = Choice()
    for loads, picked in (
        ({"a": 0, "b": 0}, "a"), ({"a": SLACK, "b": 0}, "a"), ({"a": SLACK + 1, "b": 0}, "b"),
        ({"a": 0, "b": SLACK}, "b"), ({"a": 5}, "a"), ({"a": 5, "b": 0}, "a"),
    ):  # fmt: skip
        assert choice.pick("s", loads) == picked
    for name in "tuv":
        choice.pick(name, {"a": 0, "b": 5})
    assert choice.pick("v", {"a": 5, "b": 0}) == "a"
    assert choice.pick("s", {"a": 5, "b": 0}) == "b", "the oldest session is forgotten"


def test_no_server_is_ever_far_above_the_least_loaded():
    """A few popular sessions, arrivals and ends at random."""
    rng = random.Random(3)
    choice, loads = Choice(), {"a": 0, "b": 0, "c": 0}
    for _ in range(5_000):
        if rng.random() < 0.52 or not any(loads.values()):
            before = dict(loads)
            name = choice.pick(str(rng.choice([1, 1, 1, 2, rng.randrange(1000)])), loads)
            assert before[name] <= SPREAD * min(before.values()) + SLACK
            loads[name] += 1
        else:
            name = rng.choice([n for n, load in loads.items() if load])
            loads[name] -= 1


# -- servers that count instead of computing -----------------------------------------------------------------------


class Fleet:
    """Servers that can be stopped and started again at their addresses, and a pool in front of them."""

    def __init__(self, folders) -> None:
        self.folders = folders
        self.stacks: dict[str, AsyncExitStack] = {}
        self.fakes: dict[str, FakeSglang] = {}
        self.pool: EnginePool

    async def start_server(self, name: str, port: int = 0) -> FakeSglang:
        facts = {"context_length": 128, "max_running_requests": 16}
        fake = self.fakes[name] = FakeSglang(facts=facts, version="0")
        self.stacks[name] = AsyncExitStack()
        fake.url = await self.stacks[name].enter_async_context(serving(fake.handle, port))
        return fake

    async def stop_server(self, name: str) -> None:
        await self.stacks.pop(name).aclose()

    async def adopt(self, version: int) -> None:
        await self.pool.prepare_weights(manifest_of(version, self.folders[version % len(self.folders)]))
        await self.pool.commit_weights(version)

    def states(self) -> dict[str, MemberState]:
        by_url = self.pool.states()
        return {name: by_url[fake.url] for name, fake in self.fakes.items()}

    def running(self) -> dict[str, int]:
        return {name: len(fake.running) for name, fake in self.fakes.items()}

    def versions(self) -> list[str]:
        return [fake.version for fake in self.fakes.values()]

    async def answers(self, count: int, version: int) -> None:
        """So many requests one after the other and as many together; all tokens are of that version."""
        requests = [ask(f"r{i}", 5, max_new_tokens=4, ignore_eos=True) for i in range(count)]
        alone = [await collect(self.pool, request) for request in requests]
        for got in (*alone, *await asyncio.gather(*(collect(self.pool, request) for request in requests))):
            assert got.versions.tolist() == [version] * 4


@asynccontextmanager
async def fleet(folders, options: SglangOptions = OPTIONS, retry_s: float = 0.1) -> AsyncIterator[Fleet]:
    """Two servers "a" and "b" that serve version 1."""
    made = Fleet(folders)
    try:
        async with asyncio.timeout(DEADLINE_S):
            urls = [(await made.start_server(name)).url for name in "ab"]
            makers = {url: partial(SglangEngine, url, options) for url in urls}
            made.pool = EnginePool(makers, name="rollout/0", retry_s=retry_s)
            await made.pool.start()
            await made.adopt(1)
            yield made
    finally:
        await made.pool.close()
        for name in list(made.stacks):
            await made.stop_server(name)


@asynccontextmanager
async def watched(pool: EnginePool) -> AsyncIterator[asyncio.Future[None]]:
    """The watch that the rollout actor keeps over its engine."""
    watch = asyncio.ensure_future(pool.until_lost())
    await asyncio.sleep(0)
    try:
        yield watch
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def test_the_pool_is_one_engine_and_spreads_requests(folders):
    async with fleet(folders) as it:
        info = await it.pool.info()
        assert (info.max_running, info.version, info.context_length) == (32, 1, 128)
        jobs = [later(it.pool, ask(f"r{i}", 5, max_new_tokens=60, ignore_eos=True)) for i in range(8)]
        await until(lambda: it.running() == {"a": 4, "b": 4})
        assert (await it.pool.info()).running == 8
        await it.pool.pause("in_place")
        assert all(fake.is_paused for fake in it.fakes.values())
        await it.pool.resume()
        await it.pool.abort()
        for got in await asyncio.gather(*jobs):
            assert got.finish == "abort" and set(got.versions.tolist()) <= {1}
        with pytest.raises(RequestRefused, match="max_new_tokens"):
            await collect(it.pool, ask("long", 5, max_new_tokens=1000))
        assert set(it.states().values()) == {SERVING}


async def test_requests_of_a_lost_server_continue_elsewhere_with_their_tokens(folders):
    """A server is stopped while it streams: no token is lost or generated twice."""
    async with fleet(folders) as it, watched(it.pool) as watch:
        for fake in it.fakes.values():
            fake.tells_spans = True
        request = msgspec.structs.replace(ask("r1", 5, max_new_tokens=100, ignore_eos=True), session="g")
        deltas = []
        async for delta in it.pool.generate(request):
            deltas.append(delta)
            if len(deltas) == 2:
                await it.stop_server("a" if it.running()["a"] else "b")
        got = Result(deltas)
        assert (len(got.ids), got.finish, set(got.versions.tolist())) == (100, "length", {1})
        assert got.ids.tolist() == [token(5 + number) for number in range(100)]
        assert sorted(it.states().values(), key=str) == [FENCED, SERVING]
        assert not watch.done()


async def test_a_server_that_comes_back_serves_nothing_before_it_has_a_version(folders):
    async with fleet(folders) as it, watched(it.pool):
        port = int(it.fakes["a"].url.rsplit(":", 1)[1])
        await it.stop_server("a")
        await until(lambda: it.states()["a"] is FENCED)
        await it.adopt(2)
        assert it.states() == {"a": FENCED, "b": SERVING}
        await it.start_server("a", port)
        await until(lambda: it.states()["a"] is JOINING)
        await it.answers(6, version=2)
        assert it.versions() == ["0", "2"]
        await it.adopt(3)
        await until(lambda: it.states()["a"] is SERVING)
        assert it.versions() == ["3", "3"]


async def test_a_server_restarted_behind_our_back_never_serves_its_old_weights(folders):
    """It is back before its health is looked at: only its stamps tell that it lost the weights it was given."""
    options = SglangOptions(vocab_size=320, call_s=10, health_every_s=30, name="rollout/0")
    async with fleet(folders, options, retry_s=30) as it:
        it.fakes["b"].version = "0"  # what a restart leaves: the weights of the folder it was started with
        await it.answers(8, version=1)
        assert it.states() == {"a": SERVING, "b": FENCED}


async def test_behind_a_router_requests_go_through_it_and_control_goes_to_the_servers(folders):
    """The router does what sglang-router does with /generate: each request goes to the next server."""
    paths: list[str] = []

    async def route(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        return await list(it.fakes.values())[len(paths) % 2].handle(request)

    async with serving(route) as url:
        options = SglangOptions(vocab_size=320, call_s=10, generate_url=url, name="rollout/0")
        async with fleet(folders, options) as it:
            assert it.versions() == ["1", "1"]
            await it.answers(3, version=1)
    assert paths == ["/generate"] * 6


async def test_a_pool_none_of_whose_servers_answers_names_them():
    pool = EnginePool({url: partial(SglangEngine, url, OPTIONS) for url in ("http://127.0.0.1:9",)}, name="rollout/0")
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9: .*no healthy answer within 2 s"):
        await pool.start()
    await pool.close()
    with pytest.raises(ValueError, match="at least one"):
        EnginePool({}, name="x")


# -- failures: clients that do as they are told --------------------------------------------------------------------

DEAD_TRAINER = EngineError("weights from trainer/0: plan: trainer/0 died")


class Sham:
    """A client of a server; the test says what goes wrong, by the method's name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fails: dict[str, EngineError] = {}
        self.version = 3
        self.lost = asyncio.Event()
        self.closed = "no"
        self.is_cut = False

    def _meet(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]

    async def start(self) -> EngineInfo:
        return await self.info()

    async def info(self) -> EngineInfo:
        self._meet("info")
        return EngineInfo(
            kind="sham", vocab_size=9, context_length=9, max_running=1, version=self.version, running=0, waiting=0
        )

    async def until_lost(self) -> None:
        await self.lost.wait()
        raise EngineError(f"{self.name} ended")

    def cut(self) -> None:
        self.is_cut = True

    async def close(self) -> None:
        self.closed = "begun"
        await asyncio.sleep(0.02)  # its groups are left at the sender, its connections closed
        self.closed = "done"

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        self._meet("prepare")

    async def commit_weights(self, version: int) -> None:
        self._meet("commit")
        self.version = version

    def weight_progress(self) -> WeightProgress:
        return WeightProgress(at="here")


@asynccontextmanager
async def pool_of(names: str = "ab") -> AsyncIterator[tuple[EnginePool, dict[str, Sham], asyncio.Future[None]]]:
    """A watched pool that serves version 3, its servers' clients, and the watch."""
    shams = {name: Sham(name) for name in names}
    makers: Any = {name: partial(shams.__getitem__, name) for name in names}
    pool = EnginePool(makers, name="rollout/0", retry_s=99)
    async with asyncio.timeout(20):
        await pool.start()
        async with watched(pool) as watch:
            yield pool, shams, watch
        await pool.close()


async def states_of(pool: EnginePool) -> str:
    """One letter for each server, once everything has settled."""
    for _ in range(10):
        await asyncio.sleep(0)
    return "".join(state.value[0] for state in pool.states().values())


async def test_a_version_that_no_server_could_prepare_costs_none():
    """The trainer died, or the bytes are bad: what the servers serve is whole."""
    async with pool_of() as (pool, shams, watch):
        for sham in shams.values():
            sham.fails["prepare"] = DEAD_TRAINER
        with pytest.raises(EngineError, match=r"no server of the pool could prepare version 4: a: .*died; b: .*died"):
            await pool.prepare_weights(manifest_of(4))
        assert await states_of(pool) == "ss" and not watch.done()
        with pytest.raises(EngineError, match="the pool prepared -1"):
            await pool.commit_weights(4)
        for sham in shams.values():
            sham.fails.clear()
        await pool.prepare_weights(manifest_of(4))
        await pool.commit_weights(4)
        assert (await pool.info()).version == 4


async def test_of_those_that_could_not_prepare_the_ones_that_do_not_answer_are_fenced():
    async with pool_of("abc") as (pool, shams, watch):
        for name in "bc":
            shams[name].fails["prepare"] = DEAD_TRAINER
        shams["c"].fails["info"] = EngineError("nobody there")
        await pool.prepare_weights(manifest_of(4))
        assert await states_of(pool) == "ssf"
        await pool.commit_weights(4)
        assert await states_of(pool) == "sff", "no two versions are served side by side"
        assert (await pool.info()).version == 4 and not watch.done()


async def test_a_version_that_all_refuse_is_refused_and_one_that_refuses_alone_is_fenced():
    async with pool_of() as (pool, shams, watch):
        await pool.prepare_weights(manifest_of(4))
        for sham in shams.values():
            sham.fails["commit"] = WeightsRefused(f"{sham.name}: the old weights are back")
        with pytest.raises(WeightsRefused, match=r"took version 4, .*a: the old weights are back; b: the old"):
            await pool.commit_weights(4)
        assert await states_of(pool) == "ss" and not watch.done()
        assert (await pool.info()).version == 3
        await pool.prepare_weights(manifest_of(5))
        del shams["a"].fails["commit"]
        await pool.commit_weights(5)
        assert await states_of(pool) == "sf"


@pytest.mark.parametrize("other", ["refuses", "did not prepare"])
async def test_a_torn_server_is_fenced_and_the_whole_ones_keep_serving_when_none_took_the_version(other: str):
    async with pool_of() as (pool, shams, watch):
        shams["a"].fails["commit"] = EngineError("loading broke half-way")
        if other == "refuses":
            shams["b"].fails["commit"] = WeightsRefused("no room")
        else:
            shams["b"].fails["prepare"] = DEAD_TRAINER
        await pool.prepare_weights(manifest_of(4))
        with pytest.raises(WeightsRefused, match="those left serve what they had"):
            await pool.commit_weights(4)
        assert await states_of(pool) == "fs" and not watch.done()
        shams["b"].fails = {"commit": EngineError("loading broke half-way")}
        await pool.prepare_weights(manifest_of(5))
        with pytest.raises(EngineError, match="no server of the pool serves: .*half-way") as caught:
            await pool.commit_weights(5)
        assert not isinstance(caught.value, WeightsRefused), "nothing whole is left"


async def test_lost_servers_get_no_commit_are_closed_to_the_end_and_the_last_one_ends_the_pool():
    """A watch ends with the loss; the closing (groups to leave, connections) must not end with the watch."""
    async with pool_of() as (pool, shams, watch):
        await pool.prepare_weights(manifest_of(4))
        shams["b"].lost.set()
        assert await states_of(pool) == "sf"
        await pool.commit_weights(4)
        assert shams["b"].version == 3
        await until(lambda: shams["b"].closed == "done")
        assert shams["b"].is_cut
        shams["a"].lost.set()
        with pytest.raises(EngineError, match="rollout/0: no server of the pool serves"):
            await watch
        with pytest.raises(EngineError, match="no server of the pool serves"):
            await collect(pool, ask("r", 5, max_new_tokens=4))
        await pool.close()
        assert shams["a"].closed == "done", "the pool waits for closings under way"
