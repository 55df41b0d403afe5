"""Raw calls to SGLang's routes, valid and not: what a server answers is compared with what a real one answered.

No call here ends SGLang 0.5.17. Those that do are an id outside the vocabulary, a torn safetensors file and a flush of
the cache under requests that a pause holds: our client sends none of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

GREEDY: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}


def generate(name: str, body: Any) -> tuple[str, str, str, Any]:
    """Every call has a request id of its own: SGLang aborts whatever has a stream's id two seconds after its end."""
    if isinstance(body, dict) and body.get("rid") == "probe":
        body = body | {"rid": name}
    return name, "POST", "/generate", body


def sampling(**wish: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2], "sampling_params": GREEDY | wish, "rid": "probe"}


def calls(models: Path) -> list[tuple[str, str, str, Any]]:
    """Name, method, path, body (a text is sent as it is)."""
    plain = sampling()
    first, second = str(models / "model0"), str(models / "model1")
    return [
        generate("one", plain),
        generate("one with log-probs", plain | {"return_logprob": True}),
        generate("one streamed", plain | {"return_logprob": True, "stream": True}),
        generate("a list of one", plain | {"input_ids": [[1, 2]], "rid": ["list of one"]}),
        generate("a batch", {"input_ids": [[1], [2]], "rid": ["a", "b"], "sampling_params": GREEDY}),
        generate("a batch with one rid", {"input_ids": [[1], [2]], "rid": "same", "sampling_params": GREEDY}),
        generate("a batch streamed", {"input_ids": [[1], [2]], "rid": ["a", "b"], "sampling_params": GREEDY, "stream": True}),
        generate("twins", {"input_ids": [[1], [2]], "rid": ["same", "same"], "sampling_params": GREEDY}),
        generate("two samples", sampling(n=2)),
        generate("text", {"text": "abc", "sampling_params": GREEDY, "rid": "probe"}),
        generate("no samples", sampling(n=0)), generate("no tokens", sampling(max_new_tokens=0)),
        generate("stop token", sampling(ignore_eos=False, stop_token_ids=list(range(320)))),
        generate("stop token, ignored", sampling(ignore_eos=True, stop_token_ids=list(range(320)))),
        generate("stop token outside", sampling(ignore_eos=False, stop_token_ids=[1000])),
        generate("neutral wishes", sampling(stop=[], frequency_penalty=0.0, repetition_penalty=1.0, min_p=0, logit_bias=None)),
        generate("nothing", ""), generate("half", "{"), generate("a list", "[1]"), generate("not utf-8", "\\udcff"),
        generate("NaN", '{"input_ids":[1],"sampling_params":{"temperature":NaN}}'),
        generate("no prompt", {"sampling_params": {}}), generate("empty prompt", plain | {"input_ids": []}),
        generate("empty prompt streamed", plain | {"input_ids": [], "stream": True}),
        generate("words for ids", plain | {"input_ids": ["a"]}),
        generate("ids and lists", plain | {"input_ids": [1, [2]]}),
        generate("too long", plain | {"input_ids": [1] * 600}),
        generate("too long streamed", plain | {"input_ids": [1] * 600, "stream": True}),
        generate("too long together", plain | {"input_ids": [1] * 500, "sampling_params": GREEDY | {"max_new_tokens": 100}}),
        generate("unknown sampling wish", sampling(tempratur=1)),
        generate("temperature of words", sampling(temperature="hot")),
        *(generate(f"{name} {value}", sampling(**{"temperature": 1, name: value}))
          for name, value in (("temperature", -1), ("top_p", 7), ("top_p", 0), ("top_k", 0), ("top_k", -3), ("max_new_tokens", -3))),
        generate("refused streamed", sampling(top_p=7) | {"stream": True}),
        generate("lists of unequal length", {"input_ids": [[1], [2]], "sampling_params": [{}]}),
        generate("an adapter", plain | {"lora_path": "x"}), ("get generate", "GET", "/generate", None),
        ("unknown route", "GET", "/nothing", None), ("health", "GET", "/health", None),
        ("health by generation", "GET", "/health_generate", None), ("model info", "GET", "/model_info", None),
        ("old model info", "GET", "/get_model_info", None), ("server info", "GET", "/server_info", None),
        ("flush", "GET", "/flush_cache", None), ("flush by post", "POST", "/flush_cache", {}),
        ("abort nobody", "POST", "/abort_request", {"rid": "nobody"}),
        ("abort of nothing", "POST", "/abort_request", {}),
        ("abort all", "POST", "/abort_request", {"abort_all": True}),
        ("abort without a body", "POST", "/abort_request", ""),
        ("continue without a pause", "POST", "/continue_generation", {}),
        ("continue without a body", "POST", "/continue_generation", ""),
        ("pause without a body", "POST", "/pause_generation", ""), ("pause of a list", "POST", "/pause_generation", []),
        ("pause in an unknown way", "POST", "/pause_generation", {"mode": "sleep"}),
        ("pause", "POST", "/pause_generation", {}),
        ("pause again", "POST", "/pause_generation", {"mode": "in_place"}),
        ("model info in a pause", "GET", "/model_info", None),
        ("update in a pause", "POST", "/update_weights_from_disk", {"model_path": second, "weight_version": "4", "flush_cache": False}),
        ("model info after an update", "GET", "/model_info", None), ("continue", "POST", "/continue_generation", {}),
        generate("generate after an update", plain | {"return_logprob": True}),
        ("update without a pause", "POST", "/update_weights_from_disk", {"model_path": first, "weight_version": "5", "flush_cache": False}),
        ("update without a version", "POST", "/update_weights_from_disk", {"model_path": first, "flush_cache": False}),
        ("model info of an older label", "GET", "/model_info", None),
        ("update from nowhere", "POST", "/update_weights_from_disk", {"model_path": str(models / "no"), "weight_version": "6"}),
        ("update from nothing", "POST", "/update_weights_from_disk", {"weight_version": "6"}),
        ("update to a number", "POST", "/update_weights_from_disk", {"model_path": first, "weight_version": 6}),
        ("relabel", "POST", "/update_weight_version", {"new_version": "0", "abort_all_requests": False}),
        ("relabel to nothing", "POST", "/update_weight_version", {}),
        ("model info at the end", "GET", "/model_info", None),
    ]  # fmt: skip


async def answers(url: str, probes: Sequence[tuple[str, str, str, Any]]) -> Mapping[str, dict[str, Any]]:
    """Name -> status, kind and text of each answer, asked one after the other."""
    found: dict[str, dict[str, Any]] = {}
    fresh = aiohttp.TCPConnector(force_close=True)  # SGLang closes a connection after an error of its own
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), connector=fresh) as session:
        for name, method, path, body in probes:
            raw = None if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
            if name == "not utf-8":
                raw = b"\xff\xfe"
            headers = {"Content-Type": "application/json"} if raw is not None else {}
            try:
                answer = await session.request(method, url + path, data=raw, headers=headers)
                text = (await answer.read()).decode()
            except aiohttp.ClientError as err:
                raise AssertionError(f"no answer to {name!r}: {path} {body}") from err
            found[name] = {"status": answer.status, "type": answer.headers.get("Content-Type", ""), "text": text}
    return found


def is_aborted(answer: Any) -> bool:
    return answer["meta_info"]["finish_reason"]["type"] == "abort"


async def aborted_children(url: str) -> list[str]:
    """How requests `job` and `job-1` end when each of these is aborted by name: "job", a prefix of both, nobody's."""
    body = {"input_ids": [1, 2], "sampling_params": GREEDY | {"max_new_tokens": 400}}
    ends: list[str] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:

        async def post(path: str, sent: Any) -> Any:
            async with session.post(url + path, json=sent) as answer:
                return await answer.json() if path == "/generate" else None

        for rids, wish in ((("job", "job-1"), "job"), (("job-1", "job-2"), "job"), (("job",), "")):
            tasks = [asyncio.get_running_loop().create_task(post("/generate", body | {"rid": rid})) for rid in rids]
            await asyncio.sleep(0.2)
            await post("/abort_request", {"rid": wish})
            await asyncio.sleep(0.2)
            how = ["ended" if task.done() and is_aborted(task.result()) else "ran on" for task in tasks]
            ends.append(f"{wish!r} of {','.join(rids)}: " + ",".join(how))
            await post("/abort_request", {"abort_all": True})
            await asyncio.gather(*tasks)
    return ends
