"""The HTTP engine against servers that are late, dead, foreign or broken: never a hang, always a named culprit."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from aiohttp import web

from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.http_client import SglangHttp
from myxa.core.errors import EngineError, RequestRefused, WeightsRefused
from myxa.core.messages import WeightManifest

OPTIONS = SglangOptions(vocab_size=320, context_length=128, start_s=20, call_s=10, stall_s=10, name="rollout/3")
DEADLINE_S = 60


def event(ids, total, finish=None, **meta):
    value = {
        "output_ids": ids,
        "meta_info": {
            "id": "r",
            "completion_tokens": total,
            "finish_reason": finish,
            "weight_version": "default",
            "output_token_logprobs": [[-1.0, i, None] for i in ids],
            **meta,
        },
    }
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class Server:
    """A server whose every answer the test decides; it keeps the bodies it was sent."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.late: list[bytes] = []
        """What comes after the hold."""
        self.is_cut = False
        """Break the connection after the chunks instead of ending the stream."""
        self.hold = asyncio.Event()
        self.hold.set()
        self.loading = asyncio.Event()
        self.loading.set()
        """An update that waits for it takes long."""
        self.version = "default"
        self.stands = False
        self.is_deaf = False
        """Hear requests and answer none."""
        self.is_stubborn = False
        """Say yes to an update and go on with the old version."""
        self.update_answer: tuple[int, dict] | None = None
        self.pause_answer = 200
        self.bodies: list[tuple[str, dict]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"{}")
        self.bodies.append((request.path, body))
        if self.is_deaf:
            await asyncio.sleep(DEADLINE_S)
        if request.path.endswith("_generation"):
            if self.pause_answer != 200:
                return web.json_response({}, status=self.pause_answer)
            self.stands = request.path == "/pause_generation"
        if request.path == "/health" and self.stands:  # as SGLang: it is answered by generating a token
            await asyncio.sleep(DEADLINE_S)
        if request.path == "/generate":
            return await self.generate(request)
        if request.path == "/model_info":
            return web.json_response({"weight_version": self.version})
        if request.path == "/update_weights_from_disk":
            await self.loading.wait()
            status, answer = self.update_answer or (200, {"success": True})
            if answer.get("success") and not self.is_stubborn:
                self.version = body["weight_version"]
            return web.json_response(answer, status=status)
        return web.json_response({"context_length": None, "max_running_requests": None})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in self.chunks:
            await response.write(chunk)
        await self.hold.wait()
        for chunk in self.late:
            await response.write(chunk)
        if self.is_cut:
            assert request.transport is not None
            request.transport.abort()
        return response


@asynccontextmanager
async def connected(options: SglangOptions = OPTIONS, *, stands: bool = False):
    server = Server()
    server.stands = stands
    app = web.Application()
    app.router.add_route("*", "/{anything:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    engine = SglangEngine(server.url, options)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await engine.start()
            yield engine, server
    finally:
        server.hold.set()
        await engine.close()
        await runner.cleanup()


async def collect(engine, request, result):
    return result([delta async for delta in engine.generate(request)])


@pytest.mark.asyncio
async def test_facts_the_server_does_not_tell_come_from_the_settings(ask):
    async with connected() as (engine, _):
        info = await engine.info()
        assert (info.context_length, info.max_running, info.version) == (128, 256, -1)
    with pytest.raises(EngineError, match=r"context length -- set engine\.context_length"):
        async with connected(SglangOptions(vocab_size=320)):
            pass


@pytest.mark.asyncio
async def test_what_is_sent_is_sglangs_and_every_stream_has_an_id_of_its_own(ask, result):
    async with connected() as (engine, server):
        server.chunks = [event([5], 1)]
        server.hold.clear()
        request = ask("r1", [1, 2], max_new_tokens=7, top_k=3, seed=9, stop_token_ids=(4,), temperature=0.5)
        stream = asyncio.gather(collect(engine, request, result), return_exceptions=True)
        while (await engine.info()).running < 1:
            await asyncio.sleep(0.001)
        await engine.abort("r1")
        await engine.abort("r10")
        await engine.abort()
        await engine.pause("retract")
        await engine.resume()
        server.hold.set()
        await stream
        await asyncio.gather(collect(engine, request, result), return_exceptions=True)
        sent = [s for s in server.bodies if s[0] not in ("/health", "/server_info", "/model_info")]
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
        ("/abort_request", {}),
        ("/abort_request", {"abort_all": True}),
        ("/pause_generation", {"mode": "retract"}),
        ("/continue_generation", {"torch_empty_cache": False}),
    ]  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("chunks", "is_cut", "kind", "says"),
    [
        ([event([5], 1)], False, EngineError, "ended after 1 tokens without a finish reason"),
        ([event([5], 1), event([5, 6], 2)], True, EngineError, "the stream broke after 2 tokens"),
        ([b"data: <html>\n\n"], False, EngineError, "not an answer of SGLang"),
        ([event([5], 1, output_token_logprobs=None)], False, EngineError, "0 output_token_logprobs"),
        ([b'data: {"error": {"message": "too long", "code": 400}}\n\n'], False, RequestRefused, "too long"),
        ([b'data: {"error": {"message": "oom", "code": 500}}\n\n'], False, EngineError, "oom"),
        ([b"data: [DONE]\n\n"], False, EngineError, "without a finish reason"),
    ],
)
async def test_broken_streams_name_server_request_and_cause(chunks, is_cut, kind, says, ask, result):
    async with connected() as (engine, server):
        server.chunks, server.is_cut = chunks, is_cut
        with pytest.raises(EngineError) as caught:
            await collect(engine, ask("r1", 3, max_new_tokens=5), result)
        assert type(caught.value) is kind
        for word in (says, "rollout/3", server.url, "'r1'"):
            assert word in str(caught.value)
        assert (await engine.info()).running == 0


@pytest.mark.asyncio
async def test_a_silent_stream_is_given_up(ask, result):
    options = SglangOptions(vocab_size=320, context_length=128, stall_s=0.3)
    async with connected(options) as (engine, server):
        server.chunks = [event([5], 1)]
        server.hold.clear()
        with pytest.raises(EngineError, match=r"broke after 1 tokens .*Timeout"):
            await collect(engine, ask("r1", 3, max_new_tokens=5), result)


@pytest.mark.asyncio
async def test_nobody_at_the_address_is_told_in_time():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        engine = SglangEngine(url, SglangOptions(vocab_size=320, start_s=0.5))
        with pytest.raises(EngineError, match=f"sglang at {url}: no healthy answer within 0.5 s"):
            await engine.start()
        await engine.close()
        with pytest.raises(EngineError, match="not started, or closed"):
            await engine.info()


def manifest(version: int, location: str, channel: Literal["shm", "disk"] = "disk") -> WeightManifest:
    return WeightManifest(
        version=version, channel=channel, location=location, generation=0, num_bytes=0, tensors=(), digest="", host="h"
    )


@pytest.mark.asyncio
async def test_a_commit_pauses_loads_verifies_and_goes_on_also_after_a_refusal(tmp_path: Path, folders):
    async with connected() as (engine, server):
        await engine.prepare_weights(manifest(3, str(folders[0])))
        server.bodies.clear()
        await engine.commit_weights(3)
        assert [path for path, _ in server.bodies] == [
            "/pause_generation", "/update_weights_from_disk", "/model_info", "/continue_generation",
        ]  # fmt: skip
        assert server.bodies[0][1] == {"mode": "in_place"}
        assert server.bodies[1][1] == {"model_path": str(folders[0]), "weight_version": "3", "flush_cache": False}
        for answer, says in (
            ((200, {"success": False, "message": "shape"}), "refused weight version 4: shape"),
            ((400, {"success": False, "message": "disk"}), r"answered 400: .*disk"),
        ):
            server.update_answer = answer
            server.bodies.clear()
            await engine.prepare_weights(manifest(4, str(folders[0])))
            with pytest.raises(WeightsRefused, match=says):
                await engine.commit_weights(4)
            assert server.bodies[-1][0] == "/continue_generation"
        assert (await engine.info()).version == 3


@pytest.mark.asyncio
async def test_a_server_whose_weights_may_be_torn_is_not_let_go_on(ask, result, folders):
    """An update that ends in an error nobody planned: what is in the server has no version, and serves none."""
    async with connected() as (engine, server):
        server.update_answer = (500, {})
        await engine.prepare_weights(manifest(4, str(folders[0])))
        with pytest.raises(EngineError, match="answered 500"):
            await engine.commit_weights(4)
        assert server.bodies[-1][0] == "/update_weights_from_disk"
        with pytest.raises(EngineError, match="version 4 was being loaded and did not arrive whole"):
            await collect(engine, ask("r1", 3, max_new_tokens=5), result)
        assert all(path != "/generate" for path, _ in server.bodies)
        server.update_answer = None
        await engine.prepare_weights(manifest(5, str(folders[0])))
        await engine.commit_weights(5)
        assert server.bodies[-1][0] == "/continue_generation"
        server.chunks = [event([5], 1, {"type": "length"}, weight_version="5")]
        assert (await collect(engine, ask("r2", 3, max_new_tokens=1), result)).versions.tolist() == [5]


@pytest.mark.asyncio
async def test_a_request_that_begins_while_a_version_is_loaded_waits_for_it(ask, result, folders):
    async with connected() as (engine, server):
        server.chunks = [event([5], 1, {"type": "length"}, weight_version="6")]
        server.loading.clear()
        await engine.prepare_weights(manifest(6, str(folders[0])))
        commit = asyncio.ensure_future(engine.commit_weights(6))
        while server.bodies[-1][0] != "/update_weights_from_disk":
            await asyncio.sleep(0.01)
        answer = asyncio.ensure_future(collect(engine, ask("r1", 3, max_new_tokens=1), result))
        await asyncio.sleep(0.1)
        assert not answer.done()
        assert all(path != "/generate" for path, _ in server.bodies)
        server.loading.set()
        await commit
        assert (await answer).versions.tolist() == [6]


@pytest.mark.asyncio
async def test_a_server_that_says_yes_and_serves_another_version_is_caught(folders):
    async with connected() as (engine, server):
        server.version, server.is_stubborn = "2", True
        await engine.prepare_weights(manifest(3, str(folders[0])))
        with pytest.raises(EngineError, match="serves version 2 after version 3 was loaded"):
            await engine.commit_weights(3)
        assert "/continue_generation" not in [path for path, _ in server.bodies]


@pytest.mark.asyncio
async def test_weights_the_server_cannot_read_are_refused_at_prepare(tmp_path: Path):
    async with connected() as (engine, _):
        for wrong, says in (
            (manifest(1, "/proc/1/fd/3", channel="shm"), r"came by channel 'shm', this server takes \['disk'\]"),
            (manifest(1, "relative/path"), "no absolute path"),
            (manifest(1, str(tmp_path)), "with safetensors"),
        ):
            with pytest.raises(EngineError, match=says):
                await engine.prepare_weights(wrong)


@pytest.mark.asyncio
async def test_tokens_without_spans_get_the_version_known_when_they_were_asked_for(ask, result, folders):
    """SGLang 0.5.17 tells one version per answer; a token is never stamped newer than it is."""
    async with connected() as (engine, server):
        await engine.prepare_weights(manifest(3, str(folders[0])))
        await engine.commit_weights(3)
        server.chunks = [event([5], 1), event([5, 6], 2, {"type": "length"}, weight_version="3")]
        got = await collect(engine, ask("same", 3, max_new_tokens=5), result)
        assert got.versions.tolist() == [3, 3]
        server.chunks[1] = event([5, 6], 2, {"type": "length"}, weight_version="4")
        got = await collect(engine, ask("newer", 3, max_new_tokens=5), result)
        assert got.versions.tolist() == [3, 3]
        assert np.allclose(got.logprobs, -1.0)


@pytest.mark.asyncio
async def test_a_server_that_stands_is_not_lost_though_its_health_is_silent():
    options = SglangOptions(vocab_size=320, context_length=128, health_every_s=0.02, lost_after_s=0.1)
    async with connected(options) as (engine, server):
        await engine.pause("in_place")
        watch = asyncio.gather(engine.until_lost())
        asked = len(server.bodies)
        while [path for path, _ in server.bodies[asked:]].count("/model_info") < 8:
            await asyncio.sleep(0.01)
        assert not watch.done()
        assert "/health" not in [path for path, _ in server.bodies[asked:]]
        await engine.resume()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


LEFT = SglangOptions(vocab_size=320, context_length=128, start_s=3, call_s=10, stall_s=10, name="rollout/3")


@pytest.mark.asyncio
async def test_a_server_left_paused_by_an_actor_that_died_goes_on_with_the_first_version(ask, result, folders):
    """It died in a commit: what is in the server may be torn, and requests that it holds wait there."""
    async with connected(LEFT, stands=True) as (engine, server):
        assert (await engine.info()).version == -1
        with pytest.raises(EngineError, match=r"rollout/3 at http.*was paused when this client came"):
            await collect(engine, ask("r1", 3, max_new_tokens=1), result)
        await engine.resume()
        server.update_answer = (200, {"success": False, "message": "shape"})
        await engine.prepare_weights(manifest(3, str(folders[0])))
        with pytest.raises(EngineError, match="refused weight version 3: shape; it was paused") as caught:
            await engine.commit_weights(3)
        assert not isinstance(caught.value, WeightsRefused), "the old weights are back, and they are of no version"
        assert server.stands
        assert all(path not in ("/generate", "/continue_generation") for path, _ in server.bodies)
        server.update_answer = None
        await engine.prepare_weights(manifest(4, str(folders[0])))
        await engine.commit_weights(4)
        assert not server.stands
        server.chunks = [event([5], 1, {"type": "length"}, weight_version="4")]
        assert (await collect(engine, ask("r2", 3, max_new_tokens=1), result)).versions.tolist() == [4]
        assert (await engine.info()).version == 4


@pytest.mark.asyncio
async def test_a_server_that_stands_because_its_weights_are_torn_is_not_lost_and_no_resume_releases_it(folders):
    options = SglangOptions(vocab_size=320, context_length=128, health_every_s=0.02, lost_after_s=0.1)
    async with connected(options) as (engine, server):
        await engine.pause("in_place")
        server.update_answer = (500, {})
        await engine.prepare_weights(manifest(4, str(folders[0])))
        with pytest.raises(EngineError, match="answered 500"):
            await engine.commit_weights(4)
        await engine.resume()
        assert server.stands, "an operator's resume does not let a mixture generate"
        watch = asyncio.gather(engine.until_lost())
        asked = len(server.bodies)
        while [path for path, _ in server.bodies[asked:]].count("/model_info") < 8:
            await asyncio.sleep(0.01)
        assert not watch.done()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        server.update_answer = None
        await engine.prepare_weights(manifest(5, str(folders[0])))
        await engine.commit_weights(5)
        assert not server.stands


@pytest.mark.asyncio
async def test_a_server_that_hears_and_never_answers_is_lost():
    options = SglangOptions(vocab_size=320, context_length=128, health_every_s=0.05, lost_after_s=0.4)
    async with connected(options) as (engine, server):
        server.is_deaf = True
        with pytest.raises(EngineError, match="no healthy answer for"):
            async with asyncio.timeout(8):  # one look of the usual length would take longer
                await engine.until_lost()


@pytest.mark.asyncio
async def test_a_version_that_was_never_loaded_excuses_no_older_stamp(ask, result, folders):
    """A trainer that went back: the commit of its older version ended before the server was told to load anything."""
    async with connected() as (engine, server):
        await engine.prepare_weights(manifest(7, str(folders[0])))
        await engine.commit_weights(7)
        server.hold.clear()
        server.late = [event([5], 1, {"type": "length"}, weight_version="5")]
        job = asyncio.ensure_future(collect(engine, ask("r1", 3, max_new_tokens=2), result))
        while (await engine.info()).running < 1:
            await asyncio.sleep(0.01)
        await engine.prepare_weights(manifest(5, str(folders[0])))
        server.pause_answer = 500
        with pytest.raises(EngineError, match="pause_generation answered 500"):
            await engine.commit_weights(5)
        server.hold.set()
        with pytest.raises(EngineError, match="answered with weight version 5 after it was given 7"):
            await job


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:Sending a large body directly")
async def test_closing_does_not_wait_for_a_server_that_reads_nothing(ask):
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
        await asyncio.sleep(0.2)
        await http.close()
        connection.transport.abort()
        with pytest.raises(EngineError):
            await call
        standing.close()
        await standing.wait_closed()
        await asyncio.sleep(0.1)
