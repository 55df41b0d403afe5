"""SGLang's routes over a real socket: shapes of the answers, control, hostile bodies, clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from tests.engines.contract import ask, collect

from myxa.actors.engines.embedded.engine import EmbeddedOptions
from myxa.actors.engines.http_server import ServedEngine, serve
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.core.errors import EngineError, ModelError

OPTIONS = EmbeddedOptions(max_running=8, stream_interval=4, seed=5)
DEADLINE_S = 60.0


class Client:
    """HTTP without any knowledge of SGLang."""

    def __init__(self, session: aiohttp.ClientSession, served: ServedEngine) -> None:
        self._session = session
        self.served = served
        self._url = served.url

    async def get(self, path: str):
        async with self._session.get(self._url + path) as answer:
            return answer.status, await self._value(answer)

    async def post(self, path: str, body: object = None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._session.post(self._url + path, data=data) as answer:
            return answer.status, await self._value(answer)

    async def _value(self, answer: aiohttp.ClientResponse) -> Any:
        text = await answer.text()
        return json.loads(text) if answer.content_type == "application/json" else text

    async def events(self, body: object):
        """Objects of a stream."""
        async with self._session.post(self._url + "/generate", json=body) as answer:
            assert answer.content_type == "text/event-stream"
            lines = [line for line in (await answer.text()).split("\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@asynccontextmanager
async def client_of(folder: Path, **settings):
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(folder, options=OPTIONS, **settings) as served,
        aiohttp.ClientSession() as session,
    ):
        yield Client(session, served)
    assert not engine_threads()


def engine_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(OPTIONS.name)]


def sampling(**changes):
    return {"max_new_tokens": 10, "temperature": 0, "ignore_eos": True} | changes


async def test_batches_and_n_are_answered_with_lists_prompt_by_prompt(folders):
    async with client_of(folders[0]) as client:
        body = {
            "input_ids": [[1, 2, 3], [4, 5]],
            "sampling_params": [sampling(n=3, temperature=1, sampling_seed=1), sampling(max_new_tokens=2)],
            "rid": ["a", "b"],
        }
        status, answers = await client.post("/generate", body)
        assert status == 200
        assert [a["meta_info"]["id"] for a in answers] == ["a_0", "a_1", "a_2", "b"]
        assert [len(a["output_ids"]) for a in answers] == [10, 10, 10, 2]
        assert len({tuple(a["output_ids"]) for a in answers}) == 4
        _, again = await client.post("/generate", body)
        assert [a["output_ids"] for a in again] == [a["output_ids"] for a in answers]
        status, one = await client.post("/generate", {"text": ["x"], "sampling_params": sampling()})
        assert (status, len(one)) == (200, 1)


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_answers_over_http_are_those_of_the_core_token_by_token(is_incremental, folders, make_core, run_core):
    """Seeds, penalties and stop strings included."""
    decode = partial(load_tokenizer(folders[0]).decode, skip_special=False)
    wishes: list[dict[str, Any]] = [
        {"temperature": (1.0, 0.0, 0.8)[i % 3], "max_new_tokens": 3 + 5 * i} for i in range(9)
    ]
    wishes += [{"repetition_penalty": 1.7}, {"frequency_penalty": 0.9, "presence_penalty": -0.4}, {"min_p": 0.2}]
    wishes += [{"min_new_tokens": 30, "stop_token_ids": tuple(range(64))}, {"stop": ("a", "e", "never said")}]
    requests = [ask(f"r{i}", 4 + i, **({"max_new_tokens": 90, "seed": i} | wish)) for i, wish in enumerate(wishes)]
    wanted = run_core(make_core(folders[0], decode=decode), requests)
    assert list(wanted.values())[-1].matched_text in ("a", "e")
    options = replace(OPTIONS, max_running=16)
    async with serve(folders[0], options=options, is_incremental=is_incremental) as served:
        engine = SglangEngine(served.url, SglangOptions(vocab_size=320))
        await engine.start()
        found = await asyncio.gather(*(collect(engine, r) for r in requests))
        await engine.close()
    for got, exact in zip(found, wanted.values(), strict=True):
        assert np.array_equal(got.ids, exact.ids)
        assert np.abs(got.logprobs - exact.logprobs).max() <= 1e-5
        assert (got.finish, got.matched, got.matched_text) == (exact.finish, exact.matched, exact.matched_text)
        assert got.versions.tolist() == [0] * len(got.ids)


async def test_abort_by_name_as_prefix_of_a_call_and_of_all(folders):
    body = {"input_ids": [1], "sampling_params": sampling(max_new_tokens=127)}
    batch = {"input_ids": [[1]] * 3, "sampling_params": sampling(max_new_tokens=127), "rid": ["a", "a-1", "a-2"]}
    parallel = {"input_ids": [1], "sampling_params": sampling(max_new_tokens=127, n=3), "rid": "parent"}
    async with client_of(folders[0]) as client:
        for wish, bodies in (
            ({"abort_all": True}, [body | {"rid": f"job-{i}"} for i in range(3)]),
            ({"rid": "job"}, [body | {"rid": rid} for rid in ("job", "job-1", "job-2")]),
            ({"rid": "a"}, [batch]),
            ({"rid": "parent"}, [parallel]),
        ):
            running = asyncio.gather(*(client.post("/generate", one) for one in bodies))
            while (await client.get("/server_info"))[1]["internal_states"][0]["num_running_reqs"] < 3:
                await asyncio.sleep(0.001)
            assert (await client.post("/abort_request", wish))[0] == 200
            for _, answer in await running:
                for one in answer if isinstance(answer, list) else [answer]:
                    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                    assert one["meta_info"]["finish_reason"] == reason
        alive = asyncio.gather(client.post("/generate", body | {"rid": "job-1"}))
        while not (await client.get("/server_info"))[1]["internal_states"][0]["num_running_reqs"]:
            await asyncio.sleep(0.001)
        for nobody in ({"rid": "job"}, {"rid": ""}, {}):
            assert (await client.post("/abort_request", nobody))[0] == 200
        ((_, answer),) = await alive
        assert answer["meta_info"]["finish_reason"]["type"] == "length"


BAD_BODIES = [
    (b"", "truncated"), (b"{", "truncated"), (b"[1]", "Expected `object`"), (b"\xff", "malformed"),
    (b'{"text":"\xff\xfe"}', "utf-8"), (b'{"text":"\\ud800"}', "truncated"),
    (b'{"sampling_params":' + b'{"custom_params":' + b"[" * 5000 + b"]" * 5000 + b"}}", "recursion"),
    (b'{"text":"a","sampling_params":{"temperature":NaN}}', "malformed"),
    (b'{"text":"a","sampling_params":{"temperature":1e400}}', "out of range"),
    ({"text": "9" * 2_000}, "a text has 2000 characters"), ({"text": ["9"] * 5_000}, "more than 4096 sequences"),
    ({"input_ids": [1], "rid": "x" * 2_000}, "request_id has 2000 characters"),
    ({"input_ids": [1], "sampling_params": {"top_k": 2**63}}, "top_k is 9223372036854775808"),
    ({"input_ids": [1], "sampling_params": {"sampling_seed": 2**80}}, "seed has 81 bits"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [5] * 2_000}}, "2000 stop token ids"),
    ({"input_ids": [1], "sampling_params": {"stop": ["x"] * 65}}, "65 stop strings"),
    ({"input_ids": [1], "return_logprob": True, "logprob_start_len": -5}, "logprob_start_len is -5"),
    ({"sampling_params": {}}, "either text or input_ids"),
    ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
    ({"input_ids": []}, "prompt is empty"), ({"text": []}, "batch is empty"), ({"input_ids": ["a"]}, "input_ids"),
    ({"input_ids": [1, [2]]}, "mixes ids and lists"), ({"input_ids": [1 << 40]}, "32 bits"),
    ({"input_ids": [1, 320]}, "token id 320"), ({"input_ids": [0] * 200}, "context is 128"),
    ({"input_ids": [1], "colour": "red"}, "colour"),
    ({"input_ids": [1], "sampling_params": {"tempratur": 1}}, "tempratur"),
    ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature"),
    ({"input_ids": [1], "sampling_params": {"top_p": 7}}, "top_p is 7"),
    ({"input_ids": [1], "sampling_params": {"n": 10**9}}, "n is 1000000000"),
    ({"input_ids": [[1]] * 3000, "sampling_params": {"n": 3}}, "more than 4096 sequences"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "1 sampling_params for 2 prompts"),
    ({"input_ids": [[1], [2]], "rid": ["same", "same"], "sampling_params": sampling()}, "more than once"),
    ({"input_ids": [1], "sampling_params": {"frequency_penalty": 2.5}}, "frequency_penalty is 2.5"),
    ({"input_ids": [1], "sampling_params": {"stop": ["\ufffd"]}}, "half a character"),
    ({"input_ids": [1], "sampling_params": {"min_p": -0.5}}, "min_p is -0.5"),
    ({"input_ids": [1], "sampling_params": {"stop_regex": "x"}}, "stop_regex is not supported"),
    ({"input_ids": [1], "lora_path": "x"}, "lora_path is not supported"),
    ({"input_ids": [1], "top_logprobs_num": 3}, "top_logprobs_num is not supported"),
]  # fmt: skip


async def test_e03_bad_bodies_are_answered_with_400_and_a_reason(folders):
    async with client_of(folders[0]) as client:
        for body, says in BAD_BODIES:
            status, answer = await client.post("/generate", body)
            assert status == 400, (body, answer)
            assert says in answer["error"]["message"], (body, answer)
            assert answer["error"]["type"] == "invalid_request_error"
        neutral = sampling(stop=[], frequency_penalty=0.0, repetition_penalty=1.0, min_p=0, logit_bias=None)
        assert (await client.post("/generate", {"input_ids": [1], "sampling_params": neutral}))[0] == 200
        events = await client.events({"input_ids": [999], "stream": True})
        assert "token id 999" in events[-1]["error"]["message"]


async def test_e03_bad_control_calls_are_refused(folders, tmp_path):
    calls = [
        ("/pause_generation", {"mode": "sleep"}, "Invalid enum value"),
        ("/pause_generation", [], "Expected `object`"), ("/abort_request", b"", "truncated"),
        ("/continue_generation", b"", "truncated"), ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": str(folders[1]), "weight_version": "new"}, "not a whole number"),
        ("/update_weight_version", {"new_version": "x"}, "not a whole number"),
        ("/update_weight_version", {"new_version": "-1"}, "not a whole number"),
        ("/update_weight_version", {"new_version": str(2**40)}, "not a whole number"),
        ("/update_weight_version", {"new_version": "9" * 5000}, "not a whole number"),
        ("/abort_request", b'{"rid":"\xff"}', "utf-8"),
    ]  # fmt: skip
    async with client_of(folders[0]) as client:
        for path, body, says in calls:
            status, answer = await client.post(path, body)
            assert (status, says in answer["error"]["message"]) == (400, True), answer
        update = {"model_path": str(tmp_path), "weight_version": "1"}
        status, answer = await client.post("/update_weights_from_disk", update)
        assert (status, answer["success"]) == (400, False)
        assert str(tmp_path) in answer["message"]
        assert (await client.get("/model_info"))[1]["weight_version"] == "0"


async def test_e09_health_is_answered_while_long_prompts_are_encoded(folders):
    body = json.dumps({"text": ["9" * 1_900] * 200, "sampling_params": sampling()}).encode()
    async with client_of(folders[0]) as client:
        clock = asyncio.get_running_loop().time
        begun = clock()
        refused = asyncio.gather(client.post("/generate", body))
        silences = []
        while not refused.done():
            asked = clock()
            assert (await client.get("/health"))[0] == 200
            silences.append(clock() - asked)
        ((status, answer),) = await refused
        assert (status, "context is 128" in answer["error"]["message"]) == (400, True)
        assert len(silences) > 3
        assert max(silences) < (clock() - begun) / 2


async def test_e03_more_requests_than_may_wait_and_huge_bodies_are_refused_and_the_others_served(folders, monkeypatch):
    monkeypatch.setattr("myxa.actors.engines.http_server.MAX_LIVE", 4)
    monkeypatch.setattr("myxa.actors.engines.http_server.MAX_BODY_BYTES", 10_000)
    async with client_of(folders[0]) as client:
        status, answer = await client.post("/generate", {"input_ids": [[1]] * 5, "sampling_params": sampling()})
        assert (status, "4 may" in answer["error"]["message"]) == (503, True)
        status, answer = await client.post("/generate", b'{"text": "' + b"a" * 20_000 + b'"}')
        assert (status, answer["error"]["code"]) == (413, 413)
        assert (await client.post("/generate", {"input_ids": [1], "sampling_params": sampling()}))[0] == 200


async def test_e03_a_client_that_leaves_frees_its_rows(folders):
    body = json.dumps({"input_ids": [1], "sampling_params": sampling(max_new_tokens=127, n=8)}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with client_of(folders[0]) as client:
        for _ in range(4):
            _, writer = await asyncio.open_connection(client.served.host, client.served.port)
            writer.write(head + body)
            await writer.drain()
            while not (await client.get("/server_info"))[1]["internal_states"][0]["num_running_reqs"]:
                await asyncio.sleep(0.001)
            writer.close()
            await writer.wait_closed()
            while (await client.get("/server_info"))[1]["internal_states"][0]["num_running_reqs"]:
                await asyncio.sleep(0.001)
        assert (await client.post("/generate", {"input_ids": [1], "sampling_params": sampling()}))[0] == 200


async def test_a_taken_port_and_a_bad_folder_are_told_and_leave_nothing_running(folders, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with serve(folders[0], port=port, options=OPTIONS):
                pass
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        async with serve(tmp_path):
            pass
    assert not engine_threads()
