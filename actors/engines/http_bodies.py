"""Bodies of the embedded engine's HTTP routes: untrusted JSON to requests, deltas to answers in SGLang's format.

SGLang's fields are known by name. A field that asks for something the embedded engine cannot do is refused unless it
holds its neutral value: ignoring a penalty silently would answer another question.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import orjson
from aiohttp import web

from ...core.errors import RequestRefused
from ...core.messages import SamplingParams
from ...core.protocols import Delta, GenerateRequest
from ...core.samples import F32, I32, FinishReason
from .sglang.wire import finish_reason, spans_of

T = TypeVar("T")

MAX_REQUESTS = 4096
"""Sequences one call may ask for."""
DEFAULT_NEW_TOKENS = 128


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`; names and defaults are SGLang's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    sampling_seed: int | None = None
    # of text only, which is decoded from the ids for people to read
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    stop: str | list[str] | None = None
    # refused unless neutral
    stop_regex: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    logit_bias: Any = None
    custom_params: Any = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole body; names and defaults are SGLang's."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    return_text_in_logprobs: bool = False
    log_metrics: bool = True
    priority: int | None = None
    extra_key: str | list[str] | None = None
    """Parts SGLang's prefix cache; there is none here that outlives a request."""
    # refused unless neutral
    top_logprobs_num: int | None = None
    token_ids_logprob: Any = None
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None


NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_new_tokens",
    "min_new_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
"""Fields that mean the same in `SamplingParams`, where they have a default if they are not said."""
NEUTRAL_SAMPLING: dict[str, object] = {
    **dict.fromkeys(("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "custom_params")),
}
NEUTRAL_BODY: dict[str, object] = {
    "return_hidden_states": False,
    "return_routed_experts": False,
    "top_logprobs_num": 0,
    **dict.fromkeys(
        (
            "token_ids_logprob",
            "input_embeds",
            "image_data",
            "audio_data",
            "video_data",
            "lora_path",
            "session_params",
            "custom_logit_processor",
        )
    ),
}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed body."""

    requests: tuple[GenerateRequest, ...]
    """Prompt by prompt, the `n` samples of each side by side."""
    rids: tuple[str, ...]
    """The caller's id of each request's prompt: by it the samples of a prompt are aborted together."""
    is_list: bool
    """Whether the answer is a list."""
    is_stream: bool
    wants_logprobs: bool
    score_from: tuple[int, ...]
    """Of each request: the token of its prompt after which all are scored; -1: none is."""
    wants_texts: bool
    """Whether each token with a log-prob comes with its text."""
    skips_special: bool
    trims_stop: bool
    """Whether texts leave out the token that ended them."""


def parse_generate(raw: bytes, encode: Callable[[str], list[int]], max_chars: int = 1 << 30) -> Call:
    """Read a body; texts are encoded with `encode`. Raises RequestRefused saying which field is wrong and why, for a
    text of more than `max_chars` characters too, before it is encoded."""
    try:
        body = msgspec.json.decode(raw, type=GenerateBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise RequestRefused(f"/generate: {err}", remedy="send the fields of SGLang's /generate") from err
    _refuse_unknown_wishes(body, NEUTRAL_BODY, "")
    prompts, is_batch = _prompts(body, encode, max_chars)
    if not prompts:
        raise RequestRefused("/generate: the batch is empty", remedy="send at least one prompt")
    sampling = [s or SamplingBody() for s in _as_list(body.sampling_params, len(prompts), "sampling_params")]
    rids = _rids(body.rid, len(prompts))
    wants = [bool(w) for w in _as_list(body.return_logprob, len(prompts), "return_logprob")]
    starts = _as_list(body.logprob_start_len, len(prompts), "logprob_start_len")
    requests: list[GenerateRequest] = []
    owners: list[str] = []
    score_from: list[int] = []
    for prompt, one, rid, is_wanted, start in zip(prompts, sampling, rids, wants, starts, strict=True):
        _refuse_unknown_wishes(one, NEUTRAL_SAMPLING, "sampling_params.")
        members = _members(prompt, one, rid)
        requests.extend(members)
        owners.extend([rid] * len(members))
        score_from.extend([_start(start, len(prompt)) if is_wanted else -1] * len(members))
        if len(requests) > MAX_REQUESTS:
            raise RequestRefused(
                f"/generate: the call asks for more than {MAX_REQUESTS} sequences", remedy="send several calls"
            )
    return Call(
        requests=tuple(requests),
        rids=tuple(owners),
        is_list=is_batch or len(requests) > 1,
        is_stream=body.stream,
        wants_logprobs=any(wants),
        score_from=tuple(score_from),
        wants_texts=body.return_text_in_logprobs,
        skips_special=sampling[0].skip_special_tokens is not False,
        trims_stop=not sampling[0].no_stop_trim,
    )


def _prompts(body: GenerateBody, encode: Callable[[str], list[int]], max_chars: int) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether the caller sent a batch."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestRefused("/generate: send either text or input_ids", remedy="exactly one of the two")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        _check_texts(texts, max_chars)
        return [encode(text) for text in texts], isinstance(body.text, list)
    ids = body.input_ids or []
    flat = [one for one in ids if isinstance(one, int)]
    nested = [one for one in ids if isinstance(one, list)]
    if flat and nested:
        raise RequestRefused("/generate: input_ids mixes ids and lists", remedy="send one prompt, or a list of prompts")
    return (nested, True) if nested else ([flat], False)


def _check_texts(texts: list[str], max_chars: int) -> None:
    if len(texts) > MAX_REQUESTS:
        raise RequestRefused(
            f"/generate: the call asks for more than {MAX_REQUESTS} sequences", remedy="send several calls"
        )
    longest = max(map(len, texts), default=0)
    if longest > max_chars:
        raise RequestRefused(
            f"/generate: a text has {longest} characters; the context of this engine holds {max_chars} at most, were "
            "each token the longest one",
            remedy="shorten the prompt",
        )


def _start(value: int | None, num_tokens: int) -> int:
    """As SGLang takes it."""
    if value is None or value == -1:
        return -1
    if not 0 <= value <= num_tokens:
        raise RequestRefused(
            f"/generate: logprob_start_len is {value}, the prompt has {num_tokens} tokens",
            remedy="use -1 (none) or the number of a token of the prompt, from 0",
        )
    return value


def _rids(value: str | list[str] | None, count: int) -> list[str]:
    """The request id of every prompt; the prompts of a batch with one id get numbers, as in SGLang."""
    if isinstance(value, str) and count > 1:
        return [f"{value}_{i}" for i in range(count)]
    rids = [rid or uuid.uuid4().hex for rid in _as_list(value, count, "rid")]
    twin, num = Counter(rids).most_common(1)[0] if rids else ("", 0)
    if num > 1:
        raise RequestRefused(f"/generate: rid {twin!r} is there more than once", remedy="send different ones")
    return rids


def _as_list(value: T | list[T] | None, count: int, name: str) -> list[T | None]:
    """One value for every prompt; a single one counts for all."""
    if isinstance(value, list):
        values = cast("list[T | None]", value)
        if len(values) != count:
            raise RequestRefused(f"/generate: {len(values)} {name} for {count} prompts", remedy="send one for each")
        return values
    return [value] * count


def _members(prompt: list[int], body: SamplingBody, rid: str) -> list[GenerateRequest]:
    """The `n` requests of one prompt. With a seed, sample j uses seed + j, for else all would be equal."""
    num = body.n or 1  # SGLang takes 0 for 1
    if not 1 <= num <= MAX_REQUESTS:
        raise RequestRefused(f"/generate: n is {num}", remedy=f"use 1 to {MAX_REQUESTS}")
    try:
        ids = np.asarray(prompt, dtype=np.int32)
    except OverflowError as err:
        raise RequestRefused("/generate: an input id does not fit into 32 bits", remedy="send token ids") from err
    return [
        GenerateRequest(
            request_id=rid if num == 1 else f"{rid}_{j}",
            input_ids=ids,
            sampling=_sampling(body, j),
        )
        for j in range(num)
    ]


def _sampling(body: SamplingBody, member: int) -> SamplingParams:
    said = {name: value for name in NUMBERS if (value := getattr(body, name)) is not None}
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        **({"max_new_tokens": DEFAULT_NEW_TOKENS} | said),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        stop=tuple(text for text in stop if text),
        ignore_eos=bool(body.ignore_eos),
        seed=None if body.sampling_seed is None else body.sampling_seed + member,
    )


def _refuse_unknown_wishes(body: msgspec.Struct, neutral: dict[str, object], prefix: str) -> None:
    for name, value in neutral.items():
        wish = getattr(body, name)
        if name == "logit_bias" and _biases_nothing(wish):
            continue
        if wish is not None and wish != value and wish not in ([], {}, ""):
            raise RequestRefused(
                f"/generate: {prefix}{name} is not supported by the embedded engine", remedy="leave it out"
            )


def _biases_nothing(wish: Any) -> bool:
    """A bias of 0 makes SGLang check ids before the model runs."""
    return isinstance(wish, dict) and all(bias == 0 for bias in cast("dict[str, object]", wish).values())


class Reply:
    """One generation in the making."""

    def __init__(
        self,
        request: GenerateRequest,
        rid: str,
        *,
        decode: Callable[[Sequence[int]], str],
        now_s: float,
        wants_logprobs: bool,
        trims_stop: bool = True,
        is_incremental: bool = False,
        text_of: Callable[[int], str] | None = None,
    ) -> None:
        """`is_incremental`: each answer holds the tokens since the last one, else all so far. `text_of`: a token's,
        sent with its log-prob."""
        self._rid = rid
        self._num_prompt = len(request.input_ids)
        self._decode = decode
        self._started_s = now_s
        self._wants_logprobs = wants_logprobs
        self._trims_stop = trims_stop
        self._is_incremental = is_incremental
        self._text_of = text_of
        self._given: list[list[Any]] = []
        """Log-prob, id and text of tokens of the prompt."""
        self._ids: I32 = np.zeros(0, dtype=np.int32)
        self._logprobs: F32 = np.zeros(0, dtype=np.float32)
        self._versions: I32 = np.zeros(0, dtype=np.int32)
        self._num_said = 0
        self._finish: FinishReason | None = None
        self._matched: int | str | None = None

    def add(self, delta: Delta) -> None:
        """More tokens."""
        self._ids = np.concatenate([self._ids, delta.output_ids])
        self._logprobs = np.concatenate([self._logprobs, delta.logprobs])
        self._versions = np.concatenate([self._versions, delta.versions])
        self._finish, self._matched = delta.finish, delta.matched_text or delta.matched

    def scored(self, ids: Sequence[int], logprobs: F32) -> None:
        """Tokens of the prompt, and the log-probs of all but the first of them."""
        self._given = self._with_texts([None, *logprobs.tolist()][: len(ids)], ids)

    def _with_texts(self, logprobs: Sequence[float | None], ids: Sequence[int]) -> list[list[Any]]:
        text_of = self._text_of
        return [[logprob, i, text_of and text_of(i)] for logprob, i in zip(logprobs, ids, strict=True)]

    @property
    def is_finished(self) -> bool:
        """Whether the last delta was added."""
        return self._finish is not None

    def answer(self, version: int, now_s: float) -> dict[str, Any]:
        """The object to send; `version` is what the engine serves, for answers without a token."""
        first = self._num_said if self._is_incremental else 0
        self._num_said = len(self._ids)
        ids: list[int] = self._ids[first:].tolist()
        spans = spans_of(self._versions)
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": finish_reason(self._finish, matched=self._matched, num_tokens=len(self._ids)),
            "prompt_tokens": self._num_prompt,
            "weight_version": spans[-1].version if spans else str(version),
            "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in spans],
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": len(self._ids),
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "dp_rank": None,
        }
        if self._wants_logprobs:
            meta["input_token_logprobs"] = self._given
            meta["output_token_logprobs"] = self._with_texts(self._logprobs[first:].tolist(), ids)
            meta["output_token_logprobs_length"] = len(self._ids)
        if self._finish is not None:
            meta["e2e_latency"] = now_s - self._started_s
        return {"text": self._text(ids), "output_ids": ids, "meta_info": meta}

    def _text(self, ids: list[int]) -> str:
        """Without the token or from the stop string on that ended it, unless asked not to. Where answers hold what is
        new only, the beginning of a stop string may have been said before."""
        if self._finish != "stop" or not self._trims_stop:
            return self._decode(ids)
        if not isinstance(self._matched, str):
            return self._decode(ids[:-1])
        before, found, _ = self._decode(ids).rpartition(self._matched)
        return before if found else ""


BODY_S = 60.0
"""Within which a body must have arrived."""
MAX_VERSION = 2**31 - 1
"""Stamps of tokens are int32."""


async def read_all(request: web.Request) -> bytes:
    """The bytes of its body. Raises RequestRefused for one that does not arrive in time."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise RequestRefused(
            f"{request.path}: the body did not arrive within {BODY_S:g} s", remedy="send it in one go"
        ) from None


async def read_body(request: web.Request, kind: type[T]) -> T:
    """The request's object. Raises RequestRefused for one of another form."""
    raw = await read_all(request)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise RequestRefused(f"{request.path}: {err}", remedy="see SGLang's documentation of this route") from err


def json_response(value: object, status: int = 200) -> web.Response:
    """An answer with that value."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def version_of(text: str) -> int:
    """A weight version. Raises RequestRefused for what is not a whole number."""
    try:
        version = int(text)
    except ValueError:
        version = -1
    if not 0 <= version <= MAX_VERSION:
        raise RequestRefused(
            f"weight version {text[:80]!r} is not a whole number up to {MAX_VERSION}", remedy="use 0, 1, 2, ..."
        )
    return version
