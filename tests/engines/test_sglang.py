"""The HTTP engine against servers that are late, dead, foreign or broken: never a hang, always a named culprit."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.engines.contract import ask, collect, later
from tests.harness.fake_sglang import FakeSglang, chunk, fake_sglang, serving
from tests.harness.manifests import manifest_of
from tests.harness.waiting import until

from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.http_client import SglangHttp
from myxa.core.errors import EngineError, RequestRefused, WeightsRefused

DEADLINE_S = 60


def options(**more: Any) -> SglangOptions:
    usual: dict[str, Any] = {"context_length": 128, "start_s": 20, "call_s": 10, "stall_s": 10, "name": "rollout/3"}
    return SglangOptions(vocab_size=320, **(usual | more))


@asynccontextmanager
async def connected(
    settings: SglangOptions | None = None, **habits: Any
) -> AsyncIterator[tuple[SglangEngine, FakeSglang]]:
    async with fake_sglang(**({"chunks": []} | habits)) as server, asyncio.timeout(DEADLINE_S):
        engine = SglangEngine(server.url, settings or options())
        try:
            await engine.start()
            yield engine, server
        finally:
            server.hold.set()
            await engine.close()


def ended(version: str, number: int = 5) -> list[bytes]:
    """A whole answer of one token."""
    return [chunk([number], 1, {"type": "length"}, weight_version=version)]


async def give(engine: SglangEngine, version: int, folder: Path) -> None:
    await engine.prepare_weights(manifest_of(version, folder))
    await engine.commit_weights(version)


async def test_facts_the_server_does_not_tell_come_from_the_settings():
    async with connected() as (engine, _):
        info = await engine.info()
        assert (info.context_length, info.max_running, info.version) == (128, 256, -1)
    with pytest.raises(EngineError, match=r"context length -- set engine\.context_length"):
        async with connected(SglangOptions(vocab_size=320)):
            pass


async def test_no_request_is_longer_than_the_server_reads_and_writes(caplog: pytest.LogCaptureFixture):
    """SGLang keeps seven tokens of its context, or those of its drafts, and has room for what its cache holds."""
    for facts, longest, is_told in (
        ({"context_length": 100, "max_req_input_len": 94}, 93, False),
        ({"context_length": 400, "max_req_input_len": 394}, 128, False),
        ({"context_length": 128, "max_req_input_len": 61, "page_size": 5}, 50, True),
        (
            {
                "context_length": 120,
                "max_req_input_len": 114,
                "model_path": "/m",
                "speculative_algorithm": "EAGLE",
                "speculative_draft_model_path": "/m",
                "speculative_eagle_topk": 4,
                "speculative_num_steps": 5,
                "speculative_num_draft_tokens": 8,
            },
            100,
            False,
        ),
    ):
        settings = options(context_length=128 if facts["context_length"] > 100 else 0)
        caplog.clear()
        async with connected(settings, facts=facts) as (engine, server):
            assert (await engine.info()).context_length == longest
            assert ("has room for 50 tokens" in caplog.text) is is_told
            server.chunks = ended("-1")
            await collect(engine, ask("r1", longest - 1, max_new_tokens=1))
            with pytest.raises(RequestRefused, match=f"the engine's context is {longest}"):
                await collect(engine, ask("r2", longest, max_new_tokens=1))


async def test_an_address_that_sends_on_is_refused_where_a_post_would_not_arrive():
    async with fake_sglang(chunks=ended("-1")) as server, asyncio.timeout(DEADLINE_S):
        for status in (301, 302, 308):

            async def send_on(request: web.Request, status: int = status) -> web.Response:
                return web.Response(status=status, headers={"Location": server.url + request.path})

            async with serving(send_on) as url:
                engine = SglangEngine(url, options())
                if status == 308:
                    await engine.start()
                    assert len((await collect(engine, ask("r1", 3, max_new_tokens=1))).ids) == 1
                else:
                    with pytest.raises(EngineError, match=rf"answered {status}: sends on to {server.url}.*write that"):
                        await engine.start()
                await engine.close()


async def test_what_is_sent_is_sglangs_and_every_stream_has_an_id_of_its_own():
    async with connected(chunks=[chunk([5], 1)]) as (engine, server):
        server.hold.clear()
        request = ask("r1", [1, 2], max_new_tokens=7, top_k=3, seed=9, stop_token_ids=(4,), temperature=0.5)
        stream = later(engine, request)
        while (await engine.info()).running < 1:
            await asyncio.sleep(0.001)
        await engine.abort("r1")
        await engine.abort("r10")
        await engine.abort()
        server.hold.set()
        await asyncio.gather(stream, return_exceptions=True)
        await asyncio.gather(later(engine, request), return_exceptions=True)
        sent = [s for s in server.calls if s[0] not in ("/health", "/server_info", "/model_info")]
    rids = [body.pop("rid") for path, body in sent if "rid" in body]
    assert all(re.fullmatch(r"r1~[0-9a-f]{8}\.[0-9]+~", rid) for rid in rids)
    assert rids[0] == rids[1] != rids[2], "an abort names the stream, and the next one has another name"
    sent.pop()
    assert sent == [
        ("/generate", {
            "input_ids": [1, 2], "return_logprob": True, "stream": True, "extra_key": "v-1",
            "sampling_params": {
                "temperature": 0.5, "top_p": 1.0, "top_k": 3, "max_new_tokens": 7, "stop_token_ids": [4],
                "ignore_eos": False, "sampling_seed": 9,
            },
        }),
        ("/abort_request", {}), ("/abort_request", {"abort_all": True}),
    ]  # fmt: skip


async def test_behind_a_router_requests_go_through_it_and_control_goes_to_the_server(folders):
    """As with sglang-router, another server may answer, which has not got the newest version yet."""
    async with (
        fake_sglang(chunks=ended("1")) as router,
        connected(options(generate_url=router.url)) as (engine, server),
    ):
        await give(engine, 2, folders[0])
        got = await collect(engine, ask("r1", 3, max_new_tokens=1))
        assert got.versions.tolist() == [1]
        assert router.paths() == ["/generate"] and "/generate" not in server.paths()


async def test_broken_streams_name_server_request_and_cause():
    cases: list[tuple[list[bytes], bool, type[EngineError], str]] = [
        ([chunk([5], 1)], False, EngineError, "ended after 1 tokens without a finish reason"),
        ([chunk([5], 1), chunk([5, 6], 2)], True, EngineError, "the stream broke after 2 tokens"),
        ([b"data: <html>\n\n"], False, EngineError, "not an answer of SGLang"),
        ([chunk([5], 1, output_token_logprobs=None)], False, EngineError, "0 output_token_logprobs"),
        ([b'data: {"error": {"message": "too long", "code": 400}}\n\n'], False, RequestRefused, "too long"),
        ([b'data: {"error": {"message": "oom", "code": 500}}\n\n'], False, EngineError, "oom"),
        ([b"data: [DONE]\n\n"], False, EngineError, "without a finish reason"),
    ]
    async with connected() as (engine, server):
        for server.chunks, server.is_cut, kind, says in cases:
            with pytest.raises(EngineError) as caught:
                await collect(engine, ask("r1", 3, max_new_tokens=5))
            assert type(caught.value) is kind
            for word in (says, "rollout/3", server.url, "'r1'"):
                assert word in str(caught.value)
            assert (await engine.info()).running == 0


async def test_a_silent_stream_is_given_up():
    async with connected(options(stall_s=0.3), chunks=[chunk([5], 1)]) as (engine, server):
        server.hold.clear()
        with pytest.raises(EngineError, match=r"broke after 1 tokens .*Timeout"):
            await collect(engine, ask("r1", 3, max_new_tokens=5))


async def test_an_address_where_nothing_listens_fails_in_time():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        engine = SglangEngine(url, options(start_s=0.3))
        with pytest.raises(EngineError, match=f"rollout/3 at {url}: no healthy answer within 0.3 s"):
            await engine.start()
        await engine.close()
        with pytest.raises(EngineError, match="not started, or closed"):
            await engine.info()


# -- weights -------------------------------------------------------------------------------------------------------


async def test_a_commit_pauses_loads_verifies_and_resumes_also_after_a_refusal(folders):
    async with connected() as (engine, server):
        await engine.prepare_weights(manifest_of(3, folders[0]))
        server.calls.clear()
        await engine.commit_weights(3)
        paths = ["/pause_generation", "/update_weights_from_disk", "/model_info", "/continue_generation"]
        assert server.paths() == paths
        assert server.calls[0][1] == {"mode": "in_place"}
        assert server.calls[1][1] == {"model_path": str(folders[0]), "weight_version": "3", "flush_cache": False}
        for server.update_answer, says in (
            ((200, {"success": False, "message": "shape"}), "refused weight version 4: shape"),
            ((400, {"success": False, "message": "disk"}), r"answered 400: .*disk"),
        ):
            with pytest.raises(WeightsRefused, match=says):
                await give(engine, 4, folders[0])
            assert server.paths()[-1] == "/continue_generation"
        assert (await engine.info()).version == 3


async def test_a_server_started_with_dummy_weights_reads_folders_all_the_same(folders):
    for started, told in (("dummy", "auto"), ("auto", None), ("flash_rl", None)):
        async with connected(facts={"context_length": 128, "load_format": started}) as (engine, server):
            await give(engine, 3, folders[0])
            ((_, body),) = server.asked("/update_weights_from_disk")
            assert body.get("load_format") == told


async def test_a_server_whose_weights_may_be_torn_serves_nothing_until_the_next_version(folders):
    """It is paused, and its health is silent."""
    rolled_back = {"success": False, "message": "Failed to update weights: no.\nRolling back to original weights."}
    async with connected(options(health_every_s=0.02, lost_after_s=0.1)) as (engine, server):
        for server.update_answer, says in (
            ((500, {}), "answered 500"),
            ((400, rolled_back), "refused weight version 4"),
        ):
            with pytest.raises(EngineError, match=says) as caught:
                await give(engine, 4, folders[0])
            assert not isinstance(caught.value, WeightsRefused), "SGLang reads the new folder again to roll back"
            assert server.is_paused
            with pytest.raises(EngineError, match="version 4 was being loaded and did not arrive whole"):
                await collect(engine, ask("r1", 3, max_new_tokens=5))
        await watched_without_health(engine, server)
        assert "/generate" not in server.paths()
        server.update_answer = None
        await give(engine, 5, folders[0])
        assert not server.is_paused
        server.chunks = ended("5")
        assert (await collect(engine, ask("r2", 3, max_new_tokens=1))).versions.tolist() == [5]


async def watched_without_health(engine: SglangEngine, server: FakeSglang) -> None:
    """A paused server answers no health check, and is not lost for that."""
    watch, since = asyncio.ensure_future(engine.until_lost()), len(server.calls)
    await until(lambda: server.paths(since).count("/model_info") >= 8)
    assert not watch.done()
    assert "/health" not in server.paths(since)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


async def test_a_request_that_begins_while_a_version_is_loaded_waits_for_it(folders):
    async with connected(chunks=ended("6")) as (engine, server):
        server.loading.clear()
        commit = asyncio.ensure_future(give(engine, 6, folders[0]))
        await until(lambda: server.paths()[-1] == "/update_weights_from_disk")
        answer = later(engine, ask("r1", 3, max_new_tokens=1))
        await asyncio.sleep(0.05)
        assert not answer.done() and "/generate" not in server.paths()
        server.loading.set()
        await commit
        assert (await answer).versions.tolist() == [6]


async def test_a_server_that_says_yes_and_serves_another_version_is_caught(folders):
    async with connected(version="2", is_stubborn=True) as (engine, server):
        with pytest.raises(EngineError, match="serves version 2 after version 3 was loaded"):
            await give(engine, 3, folders[0])
        assert "/continue_generation" not in server.paths()


async def test_weights_the_server_cannot_read_are_refused_at_prepare(tmp_path: Path):
    async with connected() as (engine, _):
        for wrong, says in (
            (manifest_of(1, "/proc/1/fd/3", "shm"), r"came by channel 'shm', this server takes \['disk'\]"),
            (manifest_of(1, "relative/path"), "no absolute path"),
            (manifest_of(1, tmp_path), "config.json is missing"),
        ):
            with pytest.raises(EngineError, match=says):
                await engine.prepare_weights(wrong)


async def test_a_server_left_paused_by_an_actor_that_died_serves_again_with_the_first_version(folders):
    """It died in a commit: what is in the server may be torn, and requests that it holds wait there."""
    async with connected(options(start_s=3), is_paused=True) as (engine, server):
        assert (await engine.info()).version == -1
        with pytest.raises(EngineError, match=r"rollout/3 at http.*was paused when this client came"):
            await collect(engine, ask("r1", 3, max_new_tokens=1))
        server.update_answer = (200, {"success": False, "message": "shape"})
        with pytest.raises(EngineError, match="refused weight version 3: shape; it was paused") as caught:
            await give(engine, 3, folders[0])
        assert not isinstance(caught.value, WeightsRefused), "the old weights are back, and they are of no version"
        assert server.is_paused and not {"/generate", "/continue_generation"} & set(server.paths())
        server.update_answer = None
        await give(engine, 4, folders[0])
        assert not server.is_paused
        server.chunks = ended("4")
        assert (await collect(engine, ask("r2", 3, max_new_tokens=1))).versions.tolist() == [4]


# -- silence and deadlines -----------------------------------------------------------------------------------------


async def test_a_server_that_hears_and_never_answers_is_lost():
    async with connected(options(health_every_s=0.05, lost_after_s=0.4)) as (engine, server):
        server.is_deaf = True
        with pytest.raises(EngineError, match="no healthy answer for"):
            async with asyncio.timeout(8):  # one look of the usual length would take longer
                await engine.until_lost()


@pytest.mark.filterwarnings("ignore:Sending a large body directly")
async def test_closing_does_not_wait_for_a_server_that_reads_nothing():
    """It hears the connection and then stands still, with more to read than the sockets hold."""
    connections: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def stand(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await connections.put(writer)

    standing = await asyncio.start_server(stand, "127.0.0.1", 0, limit=1)
    http = SglangHttp(f"http://127.0.0.1:{standing.sockets[0].getsockname()[1]}", name="x", call_s=30)
    http.open()
    call = asyncio.ensure_future(http.post("/update_weights_from_tensor", {"bytes": "x" * (32 << 20)}))
    async with asyncio.timeout(20):
        connection = await connections.get()
        await asyncio.sleep(0.1)
        await http.close()
        connection.transport.abort()
        with pytest.raises(EngineError):
            await call
        standing.close()
        await standing.wait_closed()
        await asyncio.sleep(0.1)
