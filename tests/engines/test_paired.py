"""Prefill and decode servers as one engine: fakes on this loop, and stand-ins as processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.engines.contract import Result, ask, collect, later
from tests.harness.fake_sglang import FakeSglang, fake_sglang, serving, stand_in_environment, token
from tests.harness.manifests import manifest_of
from tests.harness.waiting import until, until_gone

from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.launch import LaunchedSglang, SglangLaunch
from myxa.actors.engines.sglang.paired import PairedSglang
from myxa.core.config.servers import GroupKind
from myxa.core.errors import EngineError, RequestRefused, WeightsRefused

DEADLINE_S = 60


def options(name: str) -> SglangOptions:
    return SglangOptions(
        vocab_size=320,
        context_length=128,
        start_s=30,
        call_s=10,
        stall_s=10,
        health_every_s=0.2,
        lost_after_s=3,
        name=name,
    )


class Pair:
    """One engine over fakes of this loop."""

    def __init__(self, fakes: dict[str, list[FakeSglang]], clients: list[SglangEngine], engine: PairedSglang) -> None:
        self.prefills, self.decodes, self.engine, self.clients = fakes["prefill"], fakes["decode"], engine, clients
        self.all = [*self.prefills, *self.decodes]

    def is_idle(self) -> bool:
        return not any(one.running for one in self.all)


@asynccontextmanager
async def pair(num_prefills: int = 1, num_decodes: int = 1, **habits: Any) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
        fakes: dict[str, list[FakeSglang]] = {"prefill": [], "decode": []}
        clients: dict[str, list[SglangEngine]] = {"prefill": [], "decode": []}
        for mode, num in (("prefill", num_prefills), ("decode", num_decodes)):
            for at in range(num):
                fake = await stack.enter_async_context(fake_sglang(mode=mode, version="0", **habits))
                client = SglangEngine(fake.url, options(f"rollout/0/{mode}.{at}"))
                rooms = await stack.enter_async_context(serving(fake.rooms))
                client.bootstrap_port = int(rooms.rsplit(":", 1)[1]) if mode == "prefill" else 0
                fakes[mode].append(fake)
                clients[mode].append(client)
        engine = PairedSglang(clients["prefill"], clients["decode"])
        await engine.start()
        try:
            yield Pair(fakes, clients["prefill"], engine)
        finally:
            await engine.close()


def whole(num_prompt: int, num_new: int) -> list[int]:
    return [token(num_prompt + at) for at in range(num_new)]


async def test_both_halves_of_a_request_know_each_other_and_nothing_is_lost_or_doubled():
    async with pair(2, 2) as them:
        answers = await asyncio.gather(
            *(collect(them.engine, ask(f"r{at}", 5 + at, max_new_tokens=9, ignore_eos=True)) for at in range(8))
        )
        for at, got in enumerate(answers):
            assert got.ids.tolist() == whole(5 + at, 9)
            assert (len(got.logprobs), set(got.versions.tolist()), got.finish) == (9, {0}, "length")
        sent = {mode: [b for one in ones for p, b in one.calls if p == "/generate"] for mode, ones in
                (("read", them.prefills), ("written", them.decodes))}  # fmt: skip
        fields = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "input_ids", "sampling_params", "extra_key")
        read, written = ({body["bootstrap_room"]: [body[f] for f in fields] for body in sent[m]} for m in sent)
        assert read == written and len(read) == 8
        assert all(body["return_logprob"] for body in sent["read"]), "else the first token has no log-prob"
        assert all(2 <= sum(p == "/generate" for p, _ in one.calls) <= 6 for one in them.all), "work is shared"
        info = await them.engine.info()
        assert (info.version, info.running, info.waiting) == (0, 0, 0)
        with pytest.raises(RequestRefused):
            await collect(them.engine, ask("r", [400], max_new_tokens=2))
        assert them.is_idle()


async def test_all_servers_are_paused_before_any_loads_and_none_continues_before_all_have_loaded(folders):
    async with pair(1, 2) as them:
        long = [later(them.engine, ask(f"r{at}", 5, max_new_tokens=60, ignore_eos=True)) for at in range(4)]
        await until(lambda: sum(len(one.met) for one in them.decodes) == 4)
        for one in them.all:
            one.loading.clear()
        await them.engine.prepare_weights(manifest_of(1, folders[1]))
        commit = asyncio.create_task(them.engine.commit_weights(1))
        await until(lambda: all("/update_weights_from_disk" in one.paths() for one in them.all))
        late = later(them.engine, ask("late", 5, max_new_tokens=5, ignore_eos=True))
        them.prefills[0].loading.set()
        them.decodes[0].loading.set()
        await asyncio.sleep(0.1)
        assert all(one.is_paused for one in them.all), "one has not loaded"
        assert not commit.done()
        them.decodes[1].loading.set()
        await commit
        assert not any(one.is_paused for one in them.all)
        for got in await asyncio.gather(*long):
            assert (got.ids.tolist(), got.finish) == (whole(5, 60), "length")
            assert set(got.versions.tolist()) == {0}, "a server that tells no spans: the older of the two"
        got = await late
        assert (got.ids.tolist(), got.versions.tolist()) == (whole(5, 5), [1] * 5)
        assert all(read == written for one in them.decodes for read, written in one.met)
        assert (await them.engine.info()).version == 1


async def test_the_first_token_is_never_newer_than_what_drew_it():
    """The decode server tells spans: by then it has another version than the prefill server had."""
    async with pair(tells_spans=True) as them:
        them.decodes[0].hold.clear()
        them.decodes[0].is_paused = True
        got = later(them.engine, ask("r", 5, max_new_tokens=6, ignore_eos=True))
        await until(lambda: bool(them.prefills[0].prompts))
        them.decodes[0].version = "7"
        them.decodes[0].is_paused = False
        assert (await got).versions.tolist() == [0, 7, 7, 7, 7, 7]


async def test_a_version_that_one_server_refuses_is_served_by_none(folders):
    async with pair(1, 2) as them:
        them.decodes[0].update_answer = (400, {"success": False, "message": "no"})
        await them.engine.prepare_weights(manifest_of(1, folders[1]))
        with pytest.raises(EngineError, match=r"rollout/0/decode\.0 at .*: refused weight version 1"):
            await them.engine.commit_weights(1)
        assert all(one.is_paused for one in them.all)
        assert (await them.engine.info()).version == -1
        with pytest.raises(EngineError, match="did not arrive whole"):
            await collect(them.engine, ask("r", 5, max_new_tokens=2))


@pytest.mark.parametrize("at_fault", [0, 1, 2])
async def test_a_pause_that_fails_leaves_the_old_version_in_every_server(at_fault: int, folders):
    async with pair(1, 2) as them:
        running = later(them.engine, ask("r0", 5, max_new_tokens=60, ignore_eos=True))
        await until(lambda: any(one.met for one in them.decodes))
        them.all[at_fault].fails_next = "/pause_generation"
        await them.engine.prepare_weights(manifest_of(1, folders[1]))
        with pytest.raises(WeightsRefused, match="/pause_generation answered 500"):
            await them.engine.commit_weights(1)
        assert not any(one.is_paused for one in them.all)
        assert (await them.engine.info()).version == 0
        got = await running
        assert (got.ids.tolist(), set(got.versions.tolist())) == (whole(5, 60), {0})
        await them.engine.prepare_weights(manifest_of(1, folders[1]))
        await them.engine.commit_weights(1)
        got = await collect(them.engine, ask("r1", 5, max_new_tokens=5, ignore_eos=True))
        assert (got.ids.tolist(), got.versions.tolist()) == (whole(5, 5), [1] * 5)


@pytest.mark.parametrize("meant", ["r1", None])
@pytest.mark.parametrize("is_read", [True, False])
async def test_an_abort_ends_both_halves(meant: str | None, is_read: bool):
    async with pair() as them:
        if not is_read:
            them.prefills[0].hold.clear()
        running = later(them.engine, ask("r1", 5, max_new_tokens=100, ignore_eos=True))
        await until(lambda: bool(them.decodes[0].met if is_read else them.prefills[0].running))
        await until(lambda: bool(them.decodes[0].running))
        abort = asyncio.create_task(them.engine.abort(meant))
        await asyncio.sleep(0.05)
        them.prefills[0].hold.set()
        await abort
        got = await running
        assert got.finish == "abort"
        assert got.ids.tolist() == whole(5, len(got.ids))
        await until(them.is_idle)


async def test_a_request_that_is_left_leaves_both_servers():
    async with pair() as them:
        stream = them.engine.generate(ask("r1", 5, max_new_tokens=100, ignore_eos=True))
        them.decodes[0].tells_spans = True
        await anext(stream)
        await stream.aclose()
        await until(them.is_idle)


async def test_a_prompt_that_cannot_be_read_ends_the_request_on_both_sides():
    async with pair() as them:
        them.prefills[0].fails_next = "/generate"
        them.decodes[0].every_s = 0.02
        with pytest.raises(
            EngineError, match=r"prefill\.0 at .*: request 'r1' answered 500.*reads prompts for .*decode\.0"
        ):
            await collect(them.engine, ask("r1", 5, max_new_tokens=5))
        await until(them.is_idle)
        got = await collect(them.engine, ask("r2", 5, max_new_tokens=5, ignore_eos=True))
        assert got.ids.tolist() == whole(5, 5), "the next one is well"


async def test_a_cache_that_does_not_come_is_an_error_and_no_abort():
    async with pair() as them:
        them.clients[0].bootstrap_port = 1  # as of a server that has ended
        with pytest.raises(EngineError, match=r"decode\.0 at .*: was given up: KVTransferError"):
            await collect(them.engine, ask("r1", 5, max_new_tokens=5))
        await until(them.is_idle)


# -- processes ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def launched(folder: Path, logs: Path) -> AsyncIterator[tuple[PairedSglang, dict[GroupKind, LaunchedSglang]]]:
    made: dict[GroupKind, LaunchedSglang] = {}
    kinds: tuple[GroupKind, GroupKind] = ("prefill", "decode")
    for kind in kinds:
        launch = SglangLaunch(
            python=sys.executable, model_path=str(folder), table={}, log_path=logs / f"{kind}.log", dtype="float32",
            seed=1, env=stand_in_environment(light=True), num_devices=0, max_running=8, kind=kind,
        )  # fmt: skip
        made[kind] = LaunchedSglang(launch, options(f"rollout/3/{kind}.0"))
    engine = PairedSglang([made["prefill"]], [made["decode"]])
    try:
        async with asyncio.timeout(DEADLINE_S):
            await engine.start()
            yield engine, made
    finally:
        await engine.close()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_server_that_is_killed_in_mid_request_fails_the_engine_and_takes_the_others_along(
    victim: GroupKind, folders, tmp_path
):
    async with launched(folders[0], tmp_path) as (engine, made):
        got = await collect(engine, ask("r0", 5, max_new_tokens=12, ignore_eos=True))
        assert got.ids.tolist() == whole(5, 12)
        pids = [one.memory_pids()[0] for one in made.values()]
        lost = asyncio.create_task(engine.until_lost())
        running = [later(engine, ask(f"r{at}", 5, max_new_tokens=100, ignore_eos=True)) for at in range(1, 5)]
        await asyncio.sleep(0.05)
        os.kill(made[victim].memory_pids()[0], signal.SIGKILL)
        for ended in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(ended, EngineError) or (isinstance(ended, Result) and ended.ids.tolist() == whole(5, 100))
        with pytest.raises(EngineError, match=rf"rollout/3/{victim}\.0: its server .* ended while it served"):
            await lost
        with suppress(EngineError):
            await engine.info()
    for pid in pids:
        await until_gone(pid)
