"""SGLang's words for a generation, as seen in 0.5.17 and 0.5.23: what our server says and our client understands.

    {"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens",
     "weight_version", "weight_versions": [{"version", "start", "end"}], "output_token_logprobs": [[logp, id, text]]}}

A stream is `data: <that object>` lines and `data: [DONE]`; `output_ids` and log-probs of each chunk are cumulative, or
only the new ones when the server was started to stream incrementally. 0.5.23 sends the version spans with the last
chunk, 0.5.17 never; our server sends them with every chunk.

`attach_fault` says whether what answers at an address is a server that a run can attach to: answers in, a fault in
words out. Two routes are enough: `/model_info` (it answers while the server is paused too) and `/server_info`. The
client of a server (`http_client.py`) and the preflight check ask them.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, cast

import msgspec
import numpy as np
import orjson

from ....core.config.servers import guesser
from ....core.errors import EngineError, RequestRefused
from ....core.messages import EngineUsage, SamplingParams
from ....core.protocols import Delta, GenerateRequest
from ....core.samples import F32, I32, NO_VERSION, U8, ExpertChoices, FinishReason

DONE = b"[DONE]"
DATA = b"data:"
MAX_LINE_BYTES = 256 << 20
ABORTED = 499
"""Code of the error by which SGLang ends a request that was aborted before its scheduler had it."""
MAX_INT32 = (1 << 31) - 1
"""Tokens and their stamps are of that type."""
REFUSED, BUSY = 400, 503
"""Codes by which a server says that it gave up a request by itself."""
MAX_QUOTED = 120
AT_REST = SamplingParams()
EMPTY: Mapping[str, Any] = {}
ALWAYS_SAID = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids", "ignore_eos")
LEFT_OUT_AT_REST = ("min_p", "min_new_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty", "stop")
"""Sampling parameters that are called alike on both sides, and said only where they mean something."""


def version_number(text: object) -> int:
    """The version a label means; NO_VERSION for a label that is no number of a version ("default")."""
    try:
        number = int(str(text))
    except ValueError:
        return NO_VERSION
    return number if 0 <= number <= MAX_INT32 else NO_VERSION


def whole_number(facts: Mapping[str, Any], *names: str) -> int:
    """The first of these facts that is a number above 0 that int32 holds, else 0."""
    values = (facts.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and 0 < value <= MAX_INT32), 0)


class TokenSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of a generation that one weight version produced."""

    version: str
    start: int
    end: int


def versions_of(spans: Sequence[TokenSpan], num_tokens: int, place: str) -> I32:
    """int32 [num_tokens]. Raises EngineError if the spans do not cover the tokens without gaps."""
    versions = np.full(num_tokens, NO_VERSION, dtype=np.int32)
    covered = 0
    for span in spans:
        if not 0 <= span.start <= min(covered, span.end):
            raise EngineError(f"{place}: weight_versions {list(spans)} leave a gap", remedy="the server is not SGLang")
        versions[span.start : span.end] = version_number(span.version)
        covered = max(covered, span.end)
    if covered < num_tokens:
        raise EngineError(
            f"{place}: weight_versions cover {covered} of {num_tokens} tokens", remedy="the server is not SGLang"
        )
    return versions


class _Reason(msgspec.Struct, frozen=True):
    type: FinishReason
    matched: Any = None
    """Token or stop string that ended it."""
    message: Any = ""
    status_code: Any = None


class _Meta(msgspec.Struct, frozen=True):
    completion_tokens: int
    """Of the generation so far, whichever way the chunk counts."""
    finish_reason: _Reason | None = None
    weight_version: Any = ""
    weight_versions: list[TokenSpan] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    prompt_tokens: Any = 0
    cached_tokens: Any = 0
    spec_verify_ct: Any = 0
    spec_num_proposed_drafts: Any = 0
    spec_num_correct_drafts: Any = 0
    routed_experts: Any = None


class _Chunk(msgspec.Struct, frozen=True):
    """One object of a stream, with the fields that count."""

    output_ids: list[Annotated[int, msgspec.Meta(ge=-MAX_INT32, le=MAX_INT32)]]
    meta_info: _Meta


_chunks = msgspec.json.Decoder(_Chunk)
_ABORTED_CHUNK = _Chunk([], _Meta(0, _Reason("abort")))


@dataclass(eq=False)
class HeldTokens:
    """Turns the bytes of one stream, cumulative or incremental, into deltas whose version stamps are certain. Spans
    come at the latest with the last chunk, so tokens wait for them. A server without spans announces one version per
    answer: if it is the one known when the request was sent, all tokens have it; otherwise they all get the smaller of
    the two, which is never newer than the truth, so that a staleness bound holds. Where experts are to be told, all
    tokens wait for the end, with which those come."""

    place: str
    sent_version: int
    choices: ExpertChoices | None = None
    """It has the experts of tokens."""
    unrouted: tuple[int, int] = (0, 0)
    """First and end of the request's own tokens whose experts are asked for."""
    _: KW_ONLY
    is_paired: bool = False
    """Another server drew the first token, not before `sent_version`."""
    is_certain: bool = False
    """The request names an adapter, so all its tokens are of that version, whatever the server says of its weights."""

    def __post_init__(self) -> None:
        self._rest = b""
        self._ids: I32 = np.zeros(0, dtype=np.int32)
        self._logprobs: F32 = np.zeros(0, dtype=np.float32)
        self._num_sent = 0
        self.usage = EngineUsage()
        """Once it has ended."""
        self.finish, self.why = "", ""
        """How it ended, and what the server said of that."""
        self._begin = b""
        self.is_over = False
        """It has ended, and the server has booked that: SGLang 0.5.17 does not for what was aborted in its queue, and
        tells no length of its prompt."""

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def cut_words(self) -> str:
        """Of a stream that ended before its finish reason."""
        sent = f", it begins with {begin!r}" if (begin := _quoted(self._begin.decode(errors="replace"))) else ""
        return (
            f"the stream ended after {self.num_tokens} tokens without a finish reason{'' if self.num_tokens else sent}"
        )

    def feed(self, data: bytes) -> Iterator[Delta]:
        """What can be passed on after these bytes. Raises RequestRefused or EngineError for an error that the server
        reports inside the stream; EngineError when tokens, log-probs or stamps are missing."""
        for chunk in self.chunks(data):
            delta = self._add(chunk)
            if delta is not None:
                yield delta

    def chunks(self, data: bytes) -> Iterator[_Chunk]:
        """The objects that end in these bytes; raises as `feed`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise EngineError(
                f"{self.place}: a line of the stream is longer than {MAX_LINE_BYTES} bytes",
                remedy="lower max_new_tokens, or start the server with incremental streaming output",
            )
        if len(self._begin) < MAX_QUOTED:
            self._begin += data[:MAX_QUOTED]
        for line in lines:
            payload = line[len(DATA) :].strip()
            if line.startswith(DATA) and payload != DONE:
                chunk = self._read(payload)
                if reason := chunk.meta_info.finish_reason:
                    if reason.type == "abort" and reason.status_code in (REFUSED, BUSY):
                        raise self._error(reason.status_code, reason.message)
                    self.finish, self.why = reason.type, str(reason.message)
                    self.is_over = reason.type != "abort" or bool(chunk.meta_info.prompt_tokens)
                yield chunk

    def _error(self, code: object, message: object) -> EngineError:
        kind = RequestRefused if code == REFUSED else EngineError
        return kind(f"{self.place}: {_quoted(str(message))}", remedy="see the server's log")

    def _read(self, payload: bytes) -> _Chunk:
        if payload.startswith(b'{"error"'):
            with suppress(msgspec.MsgspecError):
                error: Any = msgspec.json.decode(payload)["error"]
                fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {"message": error}
                if fields.get("code") == ABORTED:
                    return _ABORTED_CHUNK
                raise self._error(fields.get("code"), fields.get("message"))
        try:
            chunk = _chunks.decode(payload)
            pairs = chunk.meta_info.output_token_logprobs or []
            if any(pair[1] != i for pair, i in zip(reversed(pairs), reversed(chunk.output_ids), strict=False)):
                raise ValueError("log-probs belong to other tokens than output_ids")
        except (msgspec.MsgspecError, ValueError, RecursionError) as err:
            shown = payload[:200].decode(errors="replace")
            raise EngineError(
                f"{self.place}: not an answer of SGLang's /generate ({type(err).__name__}: {err}): {shown}",
                remedy="engine.attach must name the address of an SGLang server (0.5.17 or later)",
            ) from err
        if any(pair[0] is None for pair in pairs):
            raise EngineError(
                f"{self.place}: a log-prob after {self.num_tokens} tokens is null: the logits are not finite",
                remedy="the weights hold NaN or overflow: look at the trainer's gradient norm, lower the learning rate",
            )
        return chunk

    def _add(self, chunk: _Chunk) -> Delta | None:
        meta, reason = chunk.meta_info, chunk.meta_info.finish_reason
        pairs = meta.output_token_logprobs or []
        logprobs = [pair[0] for pair in pairs]
        ids = chunk.output_ids
        if reason is not None and reason.type == "abort":  # in its queue: of all tokens SGLang 0.5.17 tells the last
            ids = [pair[1] for pair in pairs] or ids
        new_ids = self._new(ids, meta.completion_tokens, "output_ids")
        new_logprobs = self._new(logprobs, meta.completion_tokens, "output_token_logprobs")
        self._ids = np.concatenate([self._ids, np.asarray(new_ids, dtype=np.int32)])
        self._logprobs = np.concatenate([self._logprobs, np.asarray(new_logprobs, dtype=np.float32)])
        if reason is None and self.choices is not None:
            return None
        if self.is_certain:
            versions = np.full(len(self._ids), self.sent_version, dtype=np.int32)
        elif meta.weight_versions is not None:
            first = [TokenSpan(version=str(self.sent_version), start=0, end=1)] if self.is_paired else []
            versions = versions_of([*first, *meta.weight_versions], len(self._ids), self.place)
            if self.is_paired:
                versions[:1] = np.minimum(versions[:1], self.sent_version)
        elif reason is not None:
            version = min(self.sent_version, version_number(meta.weight_version))
            versions = np.full(len(self._ids), version, dtype=np.int32)
        else:
            return None
        if reason is not None:
            self.usage = _usage(meta)
            self._check_prompt(self.usage.prompt_tokens, reason)
        new = slice(self._num_sent, len(self._ids))
        experts = self._experts(meta, reason) if self.choices is not None and reason is not None else None
        if self.choices is not None and experts is None:  # tokens without their experts are drawn again
            new = slice(0)
        self._num_sent = len(self._ids)
        matched = reason.matched if reason is not None and reason.type == "stop" else None
        if reason is not None and reason.type == "stop" and matched is None and len(self._ids):
            matched = int(self._ids[-1])
        return Delta(
            output_ids=self._ids[new],
            logprobs=self._logprobs[new],
            versions=versions[new],
            experts=experts,
            finish=reason and reason.type,
            matched=matched if isinstance(matched, int) else None,
            matched_text=matched if isinstance(matched, str) else "",
        )

    def _check_prompt(self, num_read: int, reason: _Reason) -> None:
        """Raises EngineError if the server says that it read another prompt."""
        num_sent = self.unrouted[1]
        if num_read and num_sent and num_read != num_sent and reason.type != "abort":
            raise EngineError(
                f"{self.place}: the server read a prompt of {num_read} tokens, {num_sent} were sent",
                remedy="start it without --allow-auto-truncate",
            )

    def _experts(self, meta: _Meta, reason: _Reason) -> U8 | None:
        """Those of the tokens asked for; None where the request was aborted before its server had them. Raises
        EngineError for what the model's routers cannot have chosen."""
        assert self.choices is not None
        if reason.type == "abort" and not len(self._ids):
            return None  # of a prompt that is not through, slots of the cache hold what others left
        first, end = self.unrouted
        try:
            return routed_experts(meta.routed_experts, self.choices, end - first + len(self._ids) - 1)
        except ValueError as err:
            if reason.type == "abort":
                return None
            raise EngineError(
                f"{self.place}: routed_experts, of {len(self._ids)} tokens after {end} from token {first} on: {err}",
                remedy="start SGLang (0.5.17 or later) with --enable-return-routed-experts and the run's model, or set "
                "megatron.routing_replay = true",
            ) from err

    def _new(self, values: Sequence[Any], num_tokens: int, field: str) -> Sequence[Any]:
        """Cumulative lists have all tokens (a server may even be ahead of its count), incremental ones the new."""
        num_seen = len(self._logprobs)
        if len(values) >= num_tokens >= num_seen:
            return values[num_seen:num_tokens]
        if num_tokens == num_seen:  # SGLang repeats the last token when it aborts an incremental stream
            return ()
        if len(values) == num_tokens - num_seen:
            return values
        raise EngineError(
            f"{self.place}: a chunk has {len(values)} {field} after {num_seen} tokens and counts {num_tokens}",
            remedy="the server must return log-probs of every token; it may be of an unknown version",
        )


def routed_experts(encoded: object, choices: ExpertChoices, num_tokens: int) -> U8:
    """What SGLang tells as `routed_experts`, base64 of int32 [num_tokens, layers, top_k] with zeros in layers without
    experts -> uint8 [num_tokens, bytes of a token]. The last token of an answer was not fed in and has none. Raises
    ValueError for anything else."""
    text = encoded if isinstance(encoded, str) else ""
    shape = (max(num_tokens, 0), choices.num_layers, choices.top_k)
    if len(text) != (expected := -(-4 * math.prod(shape) // 3) * 4):
        raise ValueError(f"{len(text)} characters, not the {expected} of [tokens, layers, top_k] = {list(shape)}")
    table = np.frombuffer(base64.b64decode(text, validate=True), "<i4").reshape(shape)
    ids = table[:, list(choices.layers)]
    if fault := choices.wrong_ids(ids):
        raise ValueError(fault)
    return choices.packed(ids)


def _usage(meta: _Meta) -> EngineUsage:
    fields = msgspec.structs.asdict(meta)
    steps = whole_number(fields, "spec_verify_ct")
    return EngineUsage(
        prompt_tokens=whole_number(fields, "prompt_tokens"),
        cached_tokens=whole_number(fields, "cached_tokens"),
        drafted_tokens=whole_number(fields, "spec_num_proposed_drafts"),
        accepted_tokens=whole_number(fields, "spec_num_correct_drafts"),
        verified_steps=steps,
        verified_tokens=meta.completion_tokens if steps else 0,
    )


def request_body(
    request: GenerateRequest, rid: str, version: int, *, tells_experts: bool = False, fields: Mapping[str, Any] = EMPTY
) -> bytes:
    """The request as SGLang wants it; `fields`: further ones. `extra_key` parts the prefix cache by the version known
    when it is sent: what older weights left in the cache is never taken up by a request that is to be answered by newer
    ones."""
    sampling = request.sampling
    params: dict[str, Any] = {name: getattr(sampling, name) for name in ALWAYS_SAID}
    for name in LEFT_OUT_AT_REST:
        if (value := getattr(sampling, name)) != getattr(AT_REST, name):
            params[name] = value
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.input_ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
        "extra_key": f"v{version}",
        **fields,
    }
    if tells_experts:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.num_routed}
    return orjson.dumps(body)


MODEL_ROUTE, FACTS_ROUTE = "/model_info", "/server_info"
MODEL_FIELDS = ("model_path", "weight_version")
FACTS_FIELDS = ("model_path", "context_length", "internal_states", "max_running_requests", "max_total_num_tokens")
FIRST_VERSION = (0, 5)
"""Of SGLang, whose routes these are."""
ATTACH_REMEDY = "mend engine.attach, or start an SGLang server there"
KEY_REMEDY = (
    "set engine.key_env to the variable that holds the server's --admin-api-key, which its --api-key must be too"
)
LOSES_EXPERTS: tuple[tuple[Callable[[Mapping[str, Any]], bool], str], ...] = (
    (lambda facts: bool(guesser(facts)), "it guesses tokens ahead, and SGLang keeps no experts of those"),
    (lambda facts: facts.get("enable_hierarchical_cache") is True, "its cache comes back without experts"),
    (lambda facts: facts.get("pp_size", 1) not in (0, 1), "a pipeline stage tells only the experts of its own layers"),
)
"""Facts of servers that do not tell the experts of all tokens, and why."""
LOSES_REMEDY = "start it otherwise, or set megatron.routing_replay = true"
MOVED = (301, 302, 303)
"""A GET is sent on to another address, and a POST arrives there as a GET."""
LOADING = (500, 502, 503, 504)
"""A server that is loading, or a gateway in front of one."""


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """What a GET was answered with."""

    route: str
    status: int = 0
    """0: nothing that is HTTP."""
    body: bytes = b""
    error: str = ""
    """Why there is no status."""
    is_absent: bool = False
    """Nothing listens there, or it does not answer in time: it may come."""
    is_silent: bool = False
    """It does not answer in time."""

    @property
    def value(self) -> Mapping[str, Any]:
        """Its JSON object; empty for anything else."""
        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
        return cast("dict[str, Any]", value) if isinstance(value, dict) else {}

    @property
    def may_come(self) -> bool:
        return self.is_absent or self.status in LOADING

    def words(self) -> str:
        if not self.status:
            return f"GET {self.route}: {_quoted(self.error)}"
        text = _quoted(self.body[: 4 * MAX_QUOTED].decode("utf-8", "replace"))
        return f"GET {self.route} answered {self.status}{f': {text}' if text else ' with nothing'}"


def _quoted(text: str) -> str:
    """A stranger's words on one line, without what a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MAX_QUOTED]


def attach_fault(
    model: ServerAnswer, facts: ServerAnswer, model_type: str = "", *, tells_experts: bool = False
) -> tuple[str, str]:
    """Why a run cannot attach to a server that answered so, and the remedy; both empty: it can, as far as one sees.
    `model_type`: of the run's model folder. `tells_experts`: it must."""
    for answer, fields in ((model, MODEL_FIELDS), (facts, FACTS_FIELDS)):
        if answer.status in (401, 403):
            return f"{answer.words()}: it asks for another key", KEY_REMEDY
        if answer.status in MOVED:
            return f"{answer.words()}, and what is posted does not follow", "write that address in engine.attach"
        if answer.may_come:
            return answer.words(), "start the server, or mend engine.attach"
        if answer.status != 200 or not any(name in answer.value for name in fields):
            hint = "; if it speaks https, write https:// in engine.attach" if not answer.status else ""
            return f"{answer.words()}: this is no SGLang server{hint}", ATTACH_REMEDY
    version = str(facts.value.get("version", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1][:6]), int(numbers[2][:6])) < FIRST_VERSION:
        return f"it is SGLang {version[:MAX_QUOTED]}, older than 0.5", "start a newer one"
    theirs = model.value.get("model_type")
    if model_type and isinstance(theirs, str) and theirs and theirs != model_type:
        place = str(model.value.get("model_path", ""))[:MAX_QUOTED]
        return (
            f"it serves a model of type {theirs[:MAX_QUOTED]!r} ({place}), the run's is of type {model_type!r}",
            "start it with the run's model folder, or mend model.path",
        )
    if tells_experts and facts.value.get("enable_return_routed_experts") is not True:
        return (
            'it does not tell the experts of tokens, which megatron.routing_replay = "rollout" replays',
            "start SGLang (0.5.17 or later) with --enable-return-routed-experts, or set megatron.routing_replay = true",
        )
    why = next((cause for is_so, cause in LOSES_EXPERTS if is_so(facts.value)), "") if tells_experts else ""
    return (f'{why}, which megatron.routing_replay = "rollout" replays', LOSES_REMEDY) if why else ("", "")
