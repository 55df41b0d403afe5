"""Any server that speaks SGLang's HTTP (SGLang 0.5.17 or later, or our own) as an `Engine`.

Knows aiohttp and the wire format. Weights travel by folders that the server can read:

    prepare_weights   checks the folder (the bytes are already where they will be read)
    commit_weights    pause_generation -> update_weights_from_disk(weight_version) -> continue_generation -> verify

The pause comes first because SGLang's update otherwise waits until all running requests have ended.

Version stamps are the server's; tokens are held back until theirs is certain (`sglang_wire.HeldTokens`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import orjson

from ...core.errors import EngineError, RequestRefused
from ...core.messages import SamplingParams, WeightManifest
from ...core.protocols import Delta, EngineInfo, GenerateRequest, PauseMode
from .sglang_wire import DONE, Chunk, HeldTokens, Lines, parse_chunk, version_number

RID_END = "~"
"""Ends every request id on the wire: SGLang aborts by prefix, and "r1" must not abort "r10"."""
MAX_LINE_BYTES = 256 << 20
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """Settings of the client."""

    vocab_size: int
    """Of the model folder; SGLang does not tell."""
    context_length: int = 0
    """Longest prompt plus answer; 0: what the server says, if it does."""
    max_running: int = 256
    """Requests worth sending at once, if the server does not say."""
    pause_mode: PauseMode = "in_place"
    """How running requests meet a commit."""
    start_s: float = 600.0
    """How long `start` waits for a server that is still loading."""
    call_s: float = 120.0
    """Deadline of control calls; a weight update reads a whole model."""
    stall_s: float = 600.0
    """Longest silence of a stream, pauses included."""
    name: str = "sglang"


JSON_HEADERS = {"Content-Type": "application/json"}


class _Open:
    """A request whose stream has not ended."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.has_arrived = asyncio.Event()
        """The server answered, with a stream or with a refusal."""
        self.is_aborted = False
        self.answer: aiohttp.ClientResponse | None = None


class SglangEngine:
    """A client of one server."""

    def __init__(self, url: str, options: SglangOptions) -> None:
        self._url = url.rstrip("/")
        self._options = options
        self._session: aiohttp.ClientSession | None = None
        self._context_length = options.context_length
        self._max_running = 0
        self._version = -1
        self._prepared: WeightManifest | None = None
        self._committing = asyncio.Lock()
        self._is_paused = False
        self._open: list[_Open] = []

    @property
    def _place(self) -> str:
        return f"{self._options.name} at {self._url}"

    # -- life

    async def start(self) -> EngineInfo:
        """Wait until the server answers. Raises EngineError naming its address when it does not in time."""
        if self._session is not None:
            raise EngineError(f"{self._place}: was started before", remedy="build a new one")
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), raise_for_status=False)
        try:
            async with asyncio.timeout(self._options.start_s):
                await self._until_healthy()
        except TimeoutError as err:
            await self.close()
            raise EngineError(
                f"{self._place}: no healthy answer within {self._options.start_s:g} s",
                remedy="start the server, or mend engine.url",
            ) from err
        facts = await self._get("/server_info")
        self._context_length = self._context_length or _whole(facts, "context_length", "max_model_len")
        self._max_running = _whole(facts, "max_running_requests") or self._options.max_running
        if self._context_length < 1:
            raise EngineError(
                f"{self._place}: the server does not tell its context length", remedy="set engine.context_length"
            )
        return await self.info()

    async def _until_healthy(self) -> None:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with self._http().get(f"{self._url}/health", timeout=aiohttp.ClientTimeout(total=10)) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            raise EngineError(f"{self._place}: not started, or closed", remedy="await start() first")
        return self._session

    async def close(self) -> None:
        """Close all connections; the server frees the rows of requests that were running. Never raises."""
        if self._session is not None:
            for one in self._open:
                if one.answer is not None:
                    one.answer.close()  # wakes its reader, which closing the session does not
            await self._session.close()

    # -- requests

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream tokens; see `core.protocols.Engine`.

        Raises RequestRefused when the server refuses the request, EngineError when it fails, is gone or falls silent.
        """
        place = f"{self._place}: request {request.request_id!r}"
        self._check(request, place)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._options.call_s, sock_read=self._options.stall_s)
        tokens = HeldTokens(place, self._version)
        lines = Lines(MAX_LINE_BYTES, place)
        mine = _Open(request.request_id)
        self._open.append(mine)
        try:
            async with self._http().post(f"{self._url}/generate", data=_body(request), timeout=timeout) as answer:
                mine.answer = answer
                mine.has_arrived.set()
                if answer.status != 200:
                    raise await self._refused(answer, place)
                async for data in answer.content.iter_any():
                    for payload in lines.feed(data):
                        if payload == DONE:
                            break
                        delta = tokens.add(_chunk(payload, place))
                        if delta is not None:
                            yield delta
                            if delta.finish is not None:
                                return
                    if mine.is_aborted:  # the abort came before the request was known to the scheduler
                        await self._post("/abort_request", {"rid": request.request_id + RID_END})
        except (aiohttp.ClientError, TimeoutError) as err:
            raise EngineError(
                f"{place}: the stream broke after {tokens.num_tokens} tokens ({type(err).__name__}: {err})",
                remedy="see the server's log",
            ) from err
        finally:
            mine.has_arrived.set()
            self._open.remove(mine)
        raise EngineError(
            f"{place}: the stream ended after {tokens.num_tokens} tokens without a finish reason",
            remedy="see the server's log; it may have been stopped",
        )

    def _check(self, request: GenerateRequest, place: str) -> None:
        """What the server would not say clearly, or not at all."""
        ids = request.input_ids
        if not request.request_id or not ids.size:
            raise RequestRefused(f"{place}: the prompt or the request id is empty", remedy="send at least one token")
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self._options.vocab_size:
            raise RequestRefused(
                f"{place}: token ids {lowest}..{highest} are not within the vocabulary [0, {self._options.vocab_size})",
                remedy="encode the prompt with the tokenizer of the server's model",
            )
        limit = request.sampling.max_new_tokens
        if limit < 1 or ids.size + limit > self._context_length:
            raise RequestRefused(
                f"{place}: {ids.size} prompt tokens and max_new_tokens {limit} do not fit the server's context of "
                f"{self._context_length}",
                remedy=f"ask for 1 to {max(self._context_length - ids.size, 0)} tokens",
            )

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all; their streams end with finish "abort"."""
        meant = [one for one in self._open if request_id in (None, one.request_id)]
        for one in meant:
            one.is_aborted = True
        await self._arrived(meant)
        body = {"abort_all": True} if request_id is None else {"rid": request_id + RID_END}
        await self._post("/abort_request", body)

    async def pause(self, mode: PauseMode) -> None:
        """Stand still; see `core.protocols.Engine`."""
        await self._arrived(self._open)
        await self._post("/pause_generation", {"mode": mode})
        self._is_paused = True

    async def _arrived(self, streams: Sequence[_Open]) -> None:
        """Wait until the server has these requests: what it has not seen it can neither abort nor pause."""
        try:
            async with asyncio.timeout(self._options.call_s):
                for one in list(streams):
                    await one.has_arrived.wait()
        except TimeoutError as err:
            raise EngineError(
                f"{self._place}: did not answer {len(streams)} requests within {self._options.call_s:g} s",
                remedy="see the server's log",
            ) from err

    async def resume(self) -> None:
        """Go on after a pause."""
        await self._post("/continue_generation", {})
        self._is_paused = False

    # -- weights

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        """Check that the version is a folder the server can be told of. Raises EngineError otherwise."""
        place = f"{self._place}: weight version {manifest.version}"
        if manifest.channel != "disk":
            raise EngineError(
                f"{place} came by channel {manifest.channel!r}, this server loads folders only",
                remedy='publish through the "disk" channel for attached servers',
            )
        folder = Path(manifest.location)
        is_local = urlsplit(self._url).hostname in LOCAL_HOSTS
        if not folder.is_absolute() or (is_local and not any(folder.glob("*.safetensors"))):
            raise EngineError(
                f"{place}: {folder} is no absolute path of a folder with safetensors",
                remedy="the run directory must lie where the server can read it",
            )
        self._prepared = manifest

    async def commit_weights(self, version: int) -> None:
        """Have the server load the prepared folder, and make sure that it announces the version."""
        async with self._committing:
            manifest = self._prepared
            if manifest is None or manifest.version != version:
                has = "nothing" if manifest is None else f"version {manifest.version}"
                raise EngineError(
                    f"{self._place}: version {version} cannot be committed, {has} is prepared",
                    remedy="call prepare_weights with its manifest first",
                )
            self._prepared = None
            was_paused = self._is_paused
            if not was_paused:
                await self.pause(self._options.pause_mode)
            try:
                await self._load(manifest)
            finally:
                if not was_paused:
                    await self.resume()

    async def _load(self, manifest: WeightManifest) -> None:
        body = {"model_path": manifest.location, "weight_version": str(manifest.version), "flush_cache": False}
        answer = await self._post("/update_weights_from_disk", body)
        if not answer.get("success"):
            raise EngineError(
                f"{self._place}: refused weight version {manifest.version}: {answer.get('message')}",
                remedy="see the server's log",
            )
        served = await self._served_version()
        if served != manifest.version:
            raise EngineError(
                f"{self._place}: serves version {served} after version {manifest.version} was loaded",
                remedy="nobody else may update this server; restart it",
            )

    # -- questions

    async def info(self) -> EngineInfo:
        """Current state; `running` counts this client's requests that the server has, `waiting` those on their way.
        `version` is -1 while the server has a name instead of a number."""
        num_arrived = sum(one.has_arrived.is_set() for one in self._open)
        return EngineInfo(
            kind="sglang",
            vocab_size=self._options.vocab_size,
            context_length=self._context_length,
            max_running=self._max_running,
            version=await self._served_version(),
            running=num_arrived,
            waiting=len(self._open) - num_arrived,
        )

    async def _served_version(self) -> int:
        self._version = version_number((await self._get("/model_info")).get("weight_version"))
        return self._version

    async def _get(self, path: str) -> Mapping[str, Any]:
        return await self._call("GET", path, None)

    async def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._call("POST", path, orjson.dumps(body))

    async def _call(self, method: str, path: str, body: bytes | None) -> Mapping[str, Any]:
        place = f"{self._place}: {method} {path}"
        timeout = aiohttp.ClientTimeout(total=self._options.call_s)
        try:
            async with self._http().request(
                method, self._url + path, data=body, headers=JSON_HEADERS, timeout=timeout
            ) as answer:
                raw = await answer.read()
                if answer.status >= 400:
                    raise EngineError(
                        f"{place} answered {answer.status}: {raw[:500].decode(errors='replace')}",
                        remedy="see the server's log",
                    )
        except (aiohttp.ClientError, TimeoutError) as err:
            raise EngineError(
                f"{place} failed within {self._options.call_s:g} s: {type(err).__name__}: {err}",
                remedy="is the server alive and reachable?",
            ) from err
        with suppress(msgspec.MsgspecError):
            value: Any = msgspec.json.decode(raw)
            if isinstance(value, dict):
                return value  # pyright: ignore[reportUnknownVariableType] -- JSON
        return {}  # some routes answer with plain text

    async def _refused(self, answer: aiohttp.ClientResponse, place: str) -> EngineError:
        text = (await answer.content.read(2000)).decode(errors="replace")
        kind = RequestRefused if answer.status in (400, 413, 422) else EngineError
        return kind(f"{place}: the server answered {answer.status}: {text}", remedy="see the server's log")


def _chunk(payload: bytes, place: str) -> Chunk:
    """Read a payload. Raises RequestRefused or EngineError for an error the server reports inside the stream."""
    if payload.startswith(b'{"error"'):
        with suppress(msgspec.MsgspecError):
            error: Any = msgspec.json.decode(payload)["error"]
            kind = RequestRefused if error.get("code") == 400 else EngineError
            raise kind(f"{place}: {error.get('message')}", remedy="see the server's log")
    return parse_chunk(payload, place)


def _body(request: GenerateRequest) -> aiohttp.BytesPayload:
    sampling: SamplingParams = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    body = {
        "rid": request.request_id + RID_END,
        "input_ids": request.input_ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
    }
    return aiohttp.BytesPayload(orjson.dumps(body), content_type="application/json")


def _whole(facts: Mapping[str, Any], *names: str) -> int:
    """The first of these facts that is a whole number, else 0."""
    return next((value for name in names if isinstance(value := facts.get(name), int)), 0)
