"""SGLang's HTTP routes (0.5.17 to 0.5.23) on an embedded engine: a server on the CPU whose tokens count.

    python -m tests.harness.engine_server DIR --port 0       prints its address

The contract (`tests/engines/contract*.py`) holds for it as for a real one. Unlike SGLang it swaps weights between two
steps, so an update needs no pause; the order pause(in_place) -> update -> continue works on both. Weights that come by
broadcast (gloo) are collected beside those that serve, and answers to buckets carry the digest of what was received. A
call has one prompt, as token ids, and one sample; with `max_new_tokens` 0 its tokens are scored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import sys
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from aiohttp import web
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.append(str(Path(__file__).resolve().parents[2]))  # as a program it begins without
from tests.harness.fake_sglang import SglangRoutes, serving

from myxa.actors.engines.embedded.core import EmbeddedOptions, EngineCore
from myxa.actors.engines.embedded.engine import EmbeddedEngine
from myxa.actors.engines.embedded.model import DecoderWeights
from myxa.actors.engines.sglang.wire import ALWAYS_SAID, LEFT_OUT_AT_REST
from myxa.actors.models.hf_folder import open_weights, read_config
from myxa.actors.models.tokenizer import FolderTokenizer, load_tokenizer
from myxa.actors.torch_store import find_store
from myxa.actors.weights.channels.process_group import ChannelGroup
from myxa.actors.weights.channels.staging import buffer_mark, join_marks, padded_bytes
from myxa.core.daemon_thread import in_daemon_thread
from myxa.core.errors import EngineError, MyxaError, RequestRefused
from myxa.core.messages import SamplingParams, TensorSpec
from myxa.core.protocols import Delta, GenerateRequest, NamedArray
from myxa.core.samples import F32, I32

GROUP_S = 120.0
"""Deadline of joining a weight group, and of one reception."""
BODY_FIELDS = {
    "rid", "input_ids", "sampling_params", "return_logprob", "stream", "extra_key", "logprob_start_len",
    "return_text_in_logprobs",
}  # fmt: skip
SAMPLING_FIELDS = {*ALWAYS_SAID, *LEFT_OUT_AT_REST, "sampling_seed", "logit_bias"}
Body = dict[str, Any]


def asked(body: Body) -> GenerateRequest:
    """Of a body of `/generate`. Raises RequestRefused for what it does not know."""
    said: Body = body.get("sampling_params") or {}
    if unknown := (body.keys() - BODY_FIELDS) | (said.keys() - SAMPLING_FIELDS):
        raise RequestRefused(f"/generate: {unknown} are unknown here", remedy="see tests/harness/engine_server.py")
    if any((said.get("logit_bias") or {}).values()):
        raise RequestRefused("/generate: logit_bias is not supported", remedy="leave it out")
    known: Body = {name: said[name] for name in (*ALWAYS_SAID, *LEFT_OUT_AT_REST) if said.get(name) is not None}
    known |= {name: tuple(known.get(name, ())) for name in ("stop", "stop_token_ids")}
    sampling = SamplingParams(**{"max_new_tokens": 128, **known}, seed=said.get("sampling_seed"))
    ids = np.asarray(body["input_ids"], dtype=np.int32)
    return GenerateRequest(request_id=body.get("rid") or uuid.uuid4().hex, input_ids=ids, sampling=sampling)


class OwnAttention:
    """Causal attention inside one sequence; keys and values are forgotten."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


async def scores(engine: EmbeddedEngine, ids: I32, first: int) -> F32:
    """Log-probs, float32 [T - first], of tokens `first` to the last, each given those before it, at temperature 1 under
    the weights that serve."""
    if not 0 <= ids.min() <= ids.max() < (await engine.info()).vocab_size:
        raise RequestRefused("a token id is outside the vocabulary", remedy="send others")
    if first >= len(ids):
        return np.zeros(0, np.float32)

    @torch.inference_mode()
    def score(core: EngineCore) -> F32:
        fed, targets = torch.tensor(ids[:-1].astype(np.int64)), torch.tensor(ids[first:].astype(np.int64))
        rows = torch.arange(first - 1, len(ids) - 1)
        hidden = core.decoder.hidden(core.weights, fed, torch.arange(len(fed)), OwnAttention(), rows)
        logprobs = core.decoder.logits(core.weights, hidden).log_softmax(dim=-1)
        return logprobs.gather(-1, targets[:, None])[:, 0].numpy()

    return await engine.call(score)


class Reply:
    """One generation in the making."""

    def __init__(self, body: Body, request: GenerateRequest, text_of: Callable[[int], str], *, grows: bool) -> None:
        """`grows`: each answer holds all tokens so far, else those since the last one."""
        self._body, self._request, self._text_of, self._grows = body, request, text_of, grows
        self._given: list[Any] = []
        self._ids: I32 = np.zeros(0, np.int32)
        self._logprobs: F32 = np.zeros(0, np.float32)
        self._versions: I32 = np.zeros(0, np.int32)
        self._num_said = 0
        self._finish: Body | None = None

    def add(self, delta: Delta) -> None:
        self._ids = np.concatenate([self._ids, delta.output_ids])
        self._logprobs = np.concatenate([self._logprobs, delta.logprobs])
        self._versions = np.concatenate([self._versions, delta.versions])
        details: Mapping[str, Body] = {
            "stop": {"matched": delta.matched_text or delta.matched},
            "length": {"length": len(self._ids)},
            "abort": {"message": "Aborted", "status_code": None, "err_type": None},
        }
        self._finish = {"type": delta.finish, **details[delta.finish]} if delta.finish else None

    def scored(self, ids: Sequence[int], logprobs: F32) -> None:
        """Tokens of the prompt, and the log-probs of all but the first of them."""
        self._given = self._told([None, *logprobs.tolist()][: len(ids)], ids)
        self._finish = {"type": "length", "length": 0}

    def _told(self, logprobs: Sequence[float | None], ids: Sequence[int]) -> list[Any]:
        has_text = self._body.get("return_text_in_logprobs")
        return [[one, i, self._text_of(i) if has_text else None] for one, i in zip(logprobs, ids, strict=True)]

    def answer(self, version: int) -> Body:
        """The object to send; `version` is what the engine serves, for answers without a token."""
        first = 0 if self._grows else self._num_said
        self._num_said = len(self._ids)
        ids: list[int] = self._ids[first:].tolist()
        cuts = [0, *(np.flatnonzero(np.diff(self._versions)) + 1).tolist(), len(self._versions)]
        spans = [{"version": str(self._versions[a]), "start": a, "end": b} for a, b in pairwise(cuts) if b > a]
        meta: Body = {
            "id": self._request.request_id, "finish_reason": self._finish,
            "prompt_tokens": len(self._request.input_ids),
            "weight_version": spans[-1]["version"] if spans else str(version), "weight_versions": spans,
            "completion_tokens": len(self._ids), "cached_tokens": 0,
        }  # fmt: skip
        if self._body.get("return_logprob"):
            meta["input_token_logprobs"] = self._given
            meta["output_token_logprobs"] = self._told(self._logprobs[first:].tolist(), ids)
        return {"text": "".join(map(self._text_of, ids)), "output_ids": ids, "meta_info": meta}


class EngineServer(SglangRoutes):
    """Routes of one engine."""

    def __init__(
        self, engine: EmbeddedEngine, tokenizer: FolderTokenizer, folder: Path, *, is_incremental: bool, key: str
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._folder = folder
        self._is_incremental = is_incremental
        self.key = key
        self._is_paused = False
        self.groups = WeightGroups(engine)
        self._init_weights_update_group = self.groups.join
        self._destroy_weights_update_group = self.groups.leave
        self._update_weights_from_distributed = self.groups.update
        self._live: list[str] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """A refusal of weights is SGLang's `{"success", "message"}`."""
        try:
            return await super().handle(request)
        except MyxaError as err:
            if "weight" in request.path and not isinstance(err, RequestRefused):
                return web.json_response({"success": False, "message": str(err)}, status=400)
            status = 400 if isinstance(err, RequestRefused) else 503
            return web.json_response({"error": {"message": str(err), "code": status}}, status=status)

    # -- generation

    async def _generate(self, request: web.Request, body: Body) -> web.StreamResponse:
        asks = asked(body)
        is_stream, version = body.get("stream", False), (await self._engine.info()).version
        grows = not (is_stream and self._is_incremental)
        reply = Reply(body, asks, lambda i: self._tokenizer.decode([i], skip_special=False), grows=grows)
        if is_stream:
            return await self._stream(request, asks, reply, version)
        start = body.get("logprob_start_len", -1)
        if start >= 0:
            logprobs = await scores(self._engine, asks.input_ids, min(start + 1, len(asks.input_ids)))
            reply.scored(asks.input_ids[start:].tolist(), logprobs)
        if asks.sampling.max_new_tokens:
            async with aclosing(self._grown(asks, reply)) as grown:
                async for _ in grown:
                    continue
        return web.json_response(reply.answer(version))

    async def _grown(self, request: GenerateRequest, reply: Reply) -> AsyncGenerator[None, None]:
        self._live.append(request.request_id)
        try:
            async with aclosing(self._engine.generate(request)) as deltas:
                async for delta in deltas:
                    reply.add(delta)
                    yield
        finally:
            self._live.remove(request.request_id)

    async def _stream(
        self, request: web.Request, asks: GenerateRequest, reply: Reply, version: int
    ) -> web.StreamResponse:
        """An error after the first byte is an event too, as in SGLang."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def say(event: Body) -> None:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        with suppress(ConnectionError):  # the client left; its row is free
            try:
                async with aclosing(self._grown(asks, reply)) as grown:
                    async for _ in grown:
                        await say(reply.answer(version))
            except MyxaError as err:
                await say({"error": {"message": str(err), "code": 400 if isinstance(err, RequestRefused) else 503}})
            await response.write(b"data: [DONE]\n\n")
        return response

    # -- questions

    async def _health(self, body: Body) -> web.Response:
        await self._engine.info()
        return web.Response()

    async def _model_info(self, body: Body) -> Body:
        return {
            "model_path": str(self._folder),
            "weight_version": str((await self._engine.info()).version),
            "model_type": read_config(self._folder).model_type,
        }

    async def _server_info(self, body: Body) -> Body:
        info = await self._engine.info()
        return {
            "model_path": str(self._folder), "context_length": info.context_length,
            "max_running_requests": info.max_running, "max_total_num_tokens": info.max_running * info.context_length,
            "incremental_streaming_output": self._is_incremental,
            "internal_states": [{"num_running_reqs": info.running, "is_paused": self._is_paused}],
        }  # fmt: skip

    async def _flush_cache(self, body: Body) -> None:
        """There is no cache that outlives its request; with requests about, SGLang refuses."""
        info = await self._engine.info()
        if info.running or info.waiting:
            raise RequestRefused("pending requests", remedy="wait")

    # -- control

    async def _abort_request(self, body: Body) -> None:
        """As in SGLang an unknown `rid` aborts nothing; a known one is a prefix too."""
        if body.get("abort_all"):
            await self._engine.abort()
        elif body.get("rid") in self._live:
            for rid in [rid for rid in self._live if rid.startswith(body["rid"])]:
                await self._engine.abort(rid)

    async def _pause_generation(self, body: Body) -> None:
        await self._engine.call(lambda core: core.pause(body.get("mode", "abort")))
        self._is_paused = True

    async def _continue_generation(self, body: Body) -> None:
        await self._engine.call(lambda core: core.resume())
        self._is_paused = False

    async def _update_weights_from_disk(self, body: Body) -> Body:
        version = int(body["weight_version"])
        await prepare_folder(self._engine, body["model_path"], version)
        await self._engine.commit_weights(version)
        return {"success": True, "message": f"Succeeded to update model weights. Weight version updated to {version}."}

    async def _update_weight_version(self, body: Body) -> Body:
        version = int(body["new_version"])
        if self.groups.has_news:
            await self.groups.serve(version)
        else:
            await self._engine.call(lambda core: setattr(core, "version", version))
        return {"success": True, "message": f"Weight version updated to {version}"}


async def prepare_folder(engine: EmbeddedEngine, folder: str | Path, version: int) -> None:
    """A model folder of the same shape, to be committed as `version`."""

    def load(weights: DecoderWeights) -> None:
        with open_weights(folder, weights.config) as tensors:
            weights.load(tensors, str(folder))

    await engine.prepare(version, load)


class WeightGroups:
    """The groups that a server has joined, and what has come through them. Blocking work is done in daemon threads: a
    sender that hangs costs a thread until GROUP_S."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self.groups: dict[str, ChannelGroup] = {}
        self._cancel_events: dict[str, threading.Event] = {}
        self._arrived: dict[str, NamedArray] = {}
        self._turn = asyncio.Lock()

    async def join(self, body: Body) -> Body:
        name, rank, size, address = (
            body[field] for field in ("group_name", "rank_offset", "world_size", "master_address")
        )
        if body["backend"] != "gloo" or name in self._cancel_events:
            raise EngineError(f"group {name!r} is there already, or not of gloo", remedy="join another one")
        cancel = self._cancel_events[name] = threading.Event()

        def build() -> ChannelGroup:
            host = urlsplit(f"tcp://{address}").hostname or ""  # SGLang puts the address into such a URL
            store = find_store(host, body["master_port"], size, GROUP_S)
            group = ChannelGroup.join(store, name, rank, size, torch.device("cpu"), GROUP_S, address=host)
            if cancel.is_set():
                group.abort()
            return group

        try:
            group = await in_daemon_thread(build, f"join {name}")
        except BaseException as err:
            self._drop(name)
            if not isinstance(err, RuntimeError | ValueError | OSError):
                raise
            raise EngineError(f"group {name!r} did not meet: {err}", remedy="is the sender alive?") from err
        if cancel.is_set():
            raise EngineError(f"group {name!r} was left while it met", remedy="join under another name")
        self.groups[name] = group
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def leave(self, body: Body) -> Body:
        """A group that still meets is left once it has met."""
        if not self._drop(body["group_name"]):
            raise EngineError(f"group {body['group_name']!r} does not exist", remedy="it was destroyed before")
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    def _drop(self, name: str) -> bool:
        """End it, and whatever is under way in it; whether it was there."""
        cancel, group = self._cancel_events.pop(name, None), self.groups.pop(name, None)
        if cancel is not None:
            cancel.set()
        if group is not None:
            group.abort()
        return cancel is not None

    async def update(self, body: Body) -> Body:
        """One request at a time, in the order in which they come, as SGLang's scheduler does."""
        name = body["group_name"]
        if name not in self.groups:
            raise EngineError(f"group {name!r} is not among {sorted(self.groups)}", remedy="join it first")
        group, cancel, specs = self.groups[name], self._cancel_events[name], specs_of(body)
        num_bytes = specs[-1].offset + specs[-1].num_bytes
        async with self._turn:
            buffer = torch.zeros(padded_bytes(num_bytes), dtype=torch.uint8)

            def work() -> str:
                group.broadcast(buffer[:num_bytes], cancel, GROUP_S)
                return join_marks([buffer_mark(buffer)])

            try:
                digest = await in_daemon_thread(work, f"receive {name}")
            except BaseException as err:  # its thread may still receive, and the result is dropped
                self._arrived.clear()
                self._drop(name)
                if not isinstance(err, RuntimeError | MyxaError):
                    raise
                raise EngineError(f"reception through {name!r} failed: {err}", remedy="join it again") from err
            raw = buffer.numpy().data
            for spec in specs:
                self._arrived[spec.name] = NamedArray(spec=spec, data=raw[spec.offset : spec.offset + spec.num_bytes])
        if "weight_version" in body:
            await self.serve(int(body["weight_version"]))
        return {"success": True, "message": "Succeeded to update parameter online.", "digest": digest}

    @property
    def has_news(self) -> bool:
        """Whether tensors have come that do not serve yet."""
        return bool(self._arrived)

    async def serve(self, version: int) -> None:
        """What has come becomes `version`. Raises EngineError, naming the weights, if it is not all."""
        async with self._turn:
            arrived, self._arrived = self._arrived, {}
            await self._engine.prepare(version, lambda weights: weights.load(arrived, f"weight version {version}"))
            await self._engine.commit_weights(version)

    def close(self) -> None:
        for name in list(self._cancel_events):
            self._drop(name)


def specs_of(body: Body) -> list[TensorSpec]:
    """Places in one flat buffer, in the order of the request."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
        num_bytes = getattr(torch, dtype).itemsize * math.prod(shape)
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(shape), offset=offset, num_bytes=num_bytes))
        offset += num_bytes
    return specs


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """A server that listens."""

    engine: EmbeddedEngine
    url: str


@asynccontextmanager
async def serve(
    folder: str | Path, port: int = 0, *, options: EmbeddedOptions | None = None, is_incremental: bool = False,
    key: str = "", access_log: logging.Logger | None = None, kind: type[EngineServer] = EngineServer,
) -> AsyncIterator[ServedEngine]:  # fmt: skip
    """Serve a model folder inside the block; port 0 takes any free one."""
    engine = EmbeddedEngine(folder, options)
    await engine.start()
    server = kind(engine, load_tokenizer(Path(folder)), Path(folder), is_incremental=is_incremental, key=key)
    try:
        async with serving(server.handle, port, access_log) as url:
            yield ServedEngine(engine, url)
            await engine.close()  # before the connections: whoever waits in a stream gets an error
    finally:
        await engine.close()
        server.groups.close()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    async with serve(options.folder, options.port, key=options.key) as served:
        print(f"serving {options.folder} at {served.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
