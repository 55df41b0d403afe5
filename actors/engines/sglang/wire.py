"""SGLang's words for a generation, as seen in 0.5.17 and 0.5.23: what our server says and our client understands.

    {"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens",
     "weight_version", "weight_versions": [{"version", "start", "end"}], "output_token_logprobs": [[logp, id, text]]}}

A stream is `data: <that object>` lines and `data: [DONE]`; `output_ids` and log-probs of each chunk are cumulative, or
only the new ones when the server was started to stream incrementally. 0.5.23 sends the version spans with the last
chunk, 0.5.17 never; our server sends them with every chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

import msgspec
import numpy as np
import orjson

from ....core.errors import EngineError, RequestRefused
from ....core.messages import EngineUsage, SamplingParams
from ....core.protocols import Delta, GenerateRequest
from ....core.samples import F32, I32, NO_VERSION, FinishReason

DONE = b"[DONE]"
DATA = b"data:"
FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class TokenSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of a generation that one weight version produced."""

    version: str
    start: int
    end: int


class StreamChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One object of a stream, or a whole answer, with the fields that count."""

    output_ids: list[int]
    logprobs: list[float]
    num_tokens: int
    """Tokens of the generation so far, whichever way the chunk counts."""
    weight_version: str
    spans: list[TokenSpan] | None
    finish: FinishReason | None
    usage: EngineUsage
    """Of the generation so far."""
    matched: int | str | None
    """Token or stop string that ended it."""
    reason: str


AT_REST = SamplingParams()
LEFT_OUT_AT_REST = ("min_p", "min_new_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty", "stop")
"""Sampling parameters that are called alike on both sides, and said only where they mean something."""
ABORTED = 499
"""Code of the error by which SGLang ends a request that was aborted before its scheduler had it."""
ABORTED_CHUNK = StreamChunk(
    output_ids=[],
    logprobs=[],
    num_tokens=0,
    weight_version="",
    spans=None,
    finish="abort",
    usage=EngineUsage(),
    matched=None,
    reason="",
)


def version_number(text: object) -> int:
    """The version a label means; NO_VERSION for a label that is no number ("default")."""
    try:
        return int(str(text))
    except ValueError:
        return NO_VERSION


def whole_number(facts: Mapping[str, Any], *names: str) -> int:
    """The first of these facts that is a whole number, else 0."""
    return next((value for name in names if isinstance(value := facts.get(name), int)), 0)


def spans_of(versions: I32) -> list[TokenSpan]:
    """Runs of equal versions."""
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [TokenSpan(version=str(int(versions[a])), start=a, end=b) for a, b in pairwise(cuts) if b > a]


def versions_of(spans: Sequence[TokenSpan], num_tokens: int, place: str) -> I32:
    """int32 [num_tokens]. Raises EngineError if the spans do not cover the tokens without gaps."""
    versions = np.full(num_tokens, NO_VERSION, dtype=np.int32)
    covered = 0
    for span in spans:
        if span.start > covered or span.end < span.start:
            raise EngineError(f"{place}: weight_versions {list(spans)} leave a gap", remedy="the server is not SGLang")
        versions[span.start : span.end] = version_number(span.version)
        covered = max(covered, span.end)
    if covered < num_tokens:
        raise EngineError(
            f"{place}: weight_versions cover {covered} of {num_tokens} tokens", remedy="the server is not SGLang"
        )
    return versions


def finish_reason(finish: FinishReason | None, *, matched: int | str | None, num_tokens: int) -> dict[str, Any] | None:
    """The object of `meta_info.finish_reason`."""
    if finish is None:
        return None
    details: dict[FinishReason, dict[str, Any]] = {
        "stop": {"matched": matched},
        "length": {"length": num_tokens},
        "abort": {"message": "Aborted", "status_code": None, "err_type": None},
    }
    return {"type": finish, **details[finish]}


def parse_chunk(raw: bytes, place: str) -> StreamChunk:
    """Read one object. Raises EngineError naming `place` if it is not what SGLang sends."""
    try:
        value: Any = msgspec.json.decode(raw)
        meta = value["meta_info"]
        reason: dict[str, Any] = meta.get("finish_reason") or {}
        pairs = cast("list[list[Any]]", meta.get("output_token_logprobs") or [])
        ids = [int(i) for i in value["output_ids"]]
        spans = meta.get("weight_versions")
        if any(int(pair[1]) != i for pair, i in zip(reversed(pairs), reversed(ids), strict=False)):
            raise ValueError("log-probs belong to other tokens than output_ids")
        return StreamChunk(
            output_ids=ids,
            logprobs=[float(pair[0]) for pair in pairs],
            num_tokens=int(meta["completion_tokens"]),
            weight_version=str(meta.get("weight_version", "")),
            spans=None if spans is None else msgspec.convert(spans, list[TokenSpan]),
            finish=FINISHES[reason["type"]] if reason else None,
            usage=_usage(meta),
            matched=reason["matched"] if isinstance(reason.get("matched"), int | str) else None,
            reason=str(reason.get("message", "")),
        )
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, IndexError, AttributeError) as err:
        shown = raw[:200].decode(errors="replace")
        raise EngineError(
            f"{place}: not an answer of SGLang's /generate ({type(err).__name__}: {err}): {shown}",
            remedy="engine.attach must name the address of an SGLang server (0.5.17 or later)",
        ) from err


def _usage(meta: Mapping[str, Any]) -> EngineUsage:
    steps = whole_number(meta, "spec_verify_ct")
    return EngineUsage(
        prompt_tokens=whole_number(meta, "prompt_tokens"),
        cached_tokens=whole_number(meta, "cached_tokens"),
        drafted_tokens=whole_number(meta, "spec_draft_token_num"),
        accepted_tokens=whole_number(meta, "spec_accept_token_num"),
        verified_steps=steps,
        verified_tokens=whole_number(meta, "completion_tokens") if steps else 0,
    )


class UsageTally:
    """Sums over the generations of one server."""

    def __init__(self) -> None:
        self.total = EngineUsage()

    def add(self, more: EngineUsage) -> None:
        """One more is over."""
        self.total += more


class HeldTokens:
    """Turns the chunks of one stream, cumulative or incremental, into deltas whose version stamps are certain.

    Spans come at the latest with the last chunk, so tokens wait for them. A server without spans announces one version
    per answer: if it is the one known when the request was sent, all tokens have it; otherwise they all get the smaller
    of the two, which is never newer than the truth, so that a staleness bound holds.
    """

    def __init__(self, place: str, sent_version: int, on_end: Callable[[EngineUsage], None] | None = None) -> None:
        """`on_end` gets what the server says of the generation with its last chunk."""
        self._place = place
        self._on_end = on_end
        self._sent_version = sent_version
        self._ids: I32 = np.zeros(0, dtype=np.int32)
        self._logprobs: F32 = np.zeros(0, dtype=np.float32)
        self._num_sent = 0

    @property
    def num_tokens(self) -> int:
        """Received so far."""
        return len(self._ids)

    def add(self, chunk: StreamChunk) -> Delta | None:
        """What can be passed on now. Raises EngineError when tokens, log-probs or stamps are missing."""
        ids = self._new(chunk.output_ids, chunk.num_tokens, "output_ids")
        logprobs = self._new(chunk.logprobs, chunk.num_tokens, "output_token_logprobs")
        self._ids = np.concatenate([self._ids, np.asarray(ids, dtype=np.int32)])
        self._logprobs = np.concatenate([self._logprobs, np.asarray(logprobs, dtype=np.float32)])
        if chunk.finish is not None and self._on_end is not None:
            self._on_end(chunk.usage)
        if chunk.spans is not None:
            versions = versions_of(chunk.spans, len(self._ids), self._place)
        elif chunk.finish is not None:
            version = min(self._sent_version, version_number(chunk.weight_version))
            versions = np.full(len(self._ids), version, dtype=np.int32)
        else:
            return None
        new = slice(self._num_sent, len(self._ids))
        self._num_sent = len(self._ids)
        return Delta(
            output_ids=self._ids[new],
            logprobs=self._logprobs[new],
            versions=versions[new],
            finish=chunk.finish,
            matched=self._matched_token(chunk),
            matched_text=chunk.matched if chunk.finish == "stop" and isinstance(chunk.matched, str) else "",
        )

    def _matched_token(self, chunk: StreamChunk) -> int | None:
        if chunk.finish != "stop" or not len(self._ids) or isinstance(chunk.matched, str):
            return None
        return int(self._ids[-1]) if chunk.matched is None else chunk.matched

    def _new(self, values: Sequence[Any], num_tokens: int, what: str) -> Sequence[Any]:
        """Cumulative lists have all tokens (a server may even be ahead of its count), incremental ones the new."""
        num_seen = len(self._logprobs)
        if len(values) >= num_tokens >= num_seen:
            return values[num_seen:num_tokens]
        if num_tokens == num_seen:  # SGLang repeats the last token when it aborts an incremental stream
            return ()
        if len(values) == num_tokens - num_seen:
            return values
        raise EngineError(
            f"{self._place}: a chunk has {len(values)} {what} after {num_seen} tokens and counts {num_tokens}",
            remedy="the server must return log-probs of every token; it may be of an unknown version",
        )


class Lines:
    """Cuts a byte stream into the payloads of its `data:` lines."""

    def __init__(self, max_bytes: int, place: str) -> None:
        self._rest = b""
        self._max_bytes = max_bytes
        self._place = place

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads completed by these bytes. Raises EngineError for a line longer than allowed."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._max_bytes:
            raise EngineError(
                f"{self._place}: a line of the stream is longer than {self._max_bytes} bytes",
                remedy="lower max_new_tokens, or start the server with incremental streaming output",
            )
        return [line[len(DATA) :].strip() for line in lines if line.startswith(DATA)]


def read_chunk(payload: bytes, place: str) -> StreamChunk:
    """Read a payload. Raises RequestRefused or EngineError for an error the server reports inside the stream."""
    if payload.startswith(b'{"error"'):
        with suppress(msgspec.MsgspecError):
            error: Any = msgspec.json.decode(payload)["error"]
            if error.get("code") == ABORTED:
                return ABORTED_CHUNK
            kind = RequestRefused if error.get("code") == 400 else EngineError
            raise kind(f"{place}: {error.get('message')}", remedy="see the server's log")
    return parse_chunk(payload, place)


def request_body(request: GenerateRequest, rid: str, version: int) -> bytes:
    """The request as SGLang wants it. `extra_key` parts the prefix cache by the version known when it is sent: what
    older weights left in the cache is never taken up by a request that is to be answered by newer ones."""
    sampling: SamplingParams = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    for name in LEFT_OUT_AT_REST:
        if (value := getattr(sampling, name)) != getattr(AT_REST, name):
            params[name] = value
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    body = {
        "rid": rid,
        "input_ids": request.input_ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
        "extra_key": f"v{version}",
    }
    return orjson.dumps(body)
