"""Servers of one reference model, over HTTP.

`ReferenceServers` asks the server with the fewest open calls among those that did not fail lately; if it fails, the
others once each, then all again after a pause, until the tries are used up. As SGLang's /generate is asked:

    {"input_ids": prompt + answer, "logprob_start_len": s, "return_logprob": true,
     "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
    ->  {"meta_info": {"input_token_logprobs": [[null, id, text], [log-prob, id, text], ...]}, ...}

The list begins with token s, which has no log-prob; those of the others are at temperature 1 in any case. Before a
server's first answer is used, `Probes` tests that a few ids, spread over the vocabulary, mean the same text there; one
without a tokenizer returns no texts, and is not tested. Failures are handled by the policy of rewards (`[reward]`).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np
from msgspec.structs import replace

from ...core.clock import Clock
from ...core.config import RewardSettings
from ...core.errors import ConfigError, MyxaError, ReferenceFailed, UserCodeError
from ...core.protocols import Tokenizer
from ...core.samples import F32, I32, Prompt, Sample
from ..http_client import AnswerTooLong, NoAnswer, client_session, post_bounded
from ..rewards.call import CallFailed
from ..rewards.guard import CallGuard, Reference

HIGHEST = 1e-3
"""A log-prob, as numbers of limited precision have it."""


class BadAnswer(Exception):
    """What came back cannot be log-probs of what was sent; the text says why."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Tokens to be scored."""

    ids: I32
    """int32 [T]: with all tokens before them."""
    start: int
    """The last token that is not to be scored."""


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class _Answer(msgspec.Struct):
    meta_info: _Meta


_answer = msgspec.json.Decoder(_Answer)


def score_request(sample: Sample) -> ScoreRequest | None:
    """From the first to the last token that the policy has drawn; None: there is none that has a token before it."""
    drawn = np.flatnonzero(sample.loss_mask)
    prompt_len = len(sample.prompt_ids)
    if not drawn.size or prompt_len + int(drawn[-1]) == 0:
        return None
    ids = np.concatenate([sample.prompt_ids, sample.response_ids[: int(drawn[-1]) + 1]])
    return ScoreRequest(ids.astype(np.int32, copy=False), max(prompt_len + int(drawn[0]) - 1, 0))


def in_response(sample: Sample, request: ScoreRequest, logprobs: F32) -> F32:
    """float32 [R]: each log-prob at its token's place, 0 where the policy drew none."""
    placed = np.zeros(len(sample.response_ids), dtype=np.float32)
    first = request.start + 1 - len(sample.prompt_ids)
    placed[first : first + len(logprobs)] = logprobs
    return np.where(sample.loss_mask != 0, placed, np.float32(0))


def request_body(request: ScoreRequest, *, with_texts: bool = False, is_checked: bool = False) -> bytes:
    """The body to send. `is_checked`: the server is to refuse ids that its model does not have. SGLang does not look at
    input ids, and an unknown one ends it; at ids that have a bias it looks first, and a bias of 0 changes nothing."""
    sampling: dict[str, Any] = {"max_new_tokens": 0, "temperature": 1.0}
    if is_checked:
        sampling["logit_bias"] = {str(int(request.ids.max())): 0.0}
    return msgspec.json.encode(
        {
            "input_ids": request.ids.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": request.start,
            "return_text_in_logprobs": with_texts,
            "stream": False,
        }
    )


def scores_in(raw: bytes, request: ScoreRequest) -> tuple[F32, list[str | None]]:
    """Log-prob and text of each token asked for, float32 [T - start - 1]. Raises BadAnswer."""
    try:
        answers = _answer.decode(raw).meta_info.input_token_logprobs
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadAnswer(f"answered with no log-probs of the prompt: {error}") from error
    ids = request.ids[request.start :].tolist()
    if len(answers) != len(ids):
        raise BadAnswer(f"answered with {len(answers)} log-probs for {len(ids)} tokens")
    values: list[float] = []
    highest = max(ids)
    for place, (sent, (value, token, _)) in enumerate(zip(ids, answers, strict=True)):
        if token != sent and not (token == 0 and sent == highest):  # SGLang writes 0 for the last of its vocabulary
            raise BadAnswer(f"answered of token id {token} at place {place}, where {sent} was sent")
        if place == 0:
            continue
        if value is None or not math.isfinite(value) or value > HIGHEST:
            raise BadAnswer(f"answered that the log-prob of token id {sent} at place {place} is {value}")
        values.append(value)
    return np.asarray(values, dtype=np.float32), [text for _, _, text in answers[1:]]


NUM_PROBES = 48
MOST_THAT_DIFFER = 0.25
"""Share of probes; tokenizers of one vocabulary write a few special or partial tokens differently."""
UNREADABLE = "\ufffd"
"""What a part of a character is decoded to."""


@dataclass(frozen=True, slots=True)
class Probes:
    """Tokens of the policy, and their texts."""

    request: ScoreRequest
    texts: tuple[str, ...]
    """Of all but the first."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Probes:
        """Spread evenly over its vocabulary."""
        ids = np.unique(np.linspace(0, tokenizer.vocab_size - 1, NUM_PROBES + 1).astype(np.int32))
        texts = tuple(tokenizer.decode([token], skip_special=False) for token in ids[1:].tolist())
        return cls(ScoreRequest(ids, 0), texts)

    def foreign(self, server_texts: Sequence[str | None]) -> str:
        """What shows that the server's texts of the same tokens are of another vocabulary; empty: nothing."""
        pairs = [
            (token, text, server_text)
            for token, text, server_text in zip(self.request.ids[1:].tolist(), self.texts, server_texts, strict=True)
            if server_text is not None and UNREADABLE not in text + server_text
        ]
        differ = [pair for pair in pairs if pair[1].strip() != pair[2].strip()]
        if len(differ) <= MOST_THAT_DIFFER * len(pairs):
            return ""
        token, text, server_text = differ[0]
        return (
            f"{len(differ)} of {len(pairs)} tokens mean another text there, such as {token}: "
            f"{server_text!r} instead of {text!r}"
        )


BYTES_PER_TOKEN = 512
"""Of an answer, texts included."""
SPARE_BYTES = 1 << 20
SHOWN_BYTES = 300
REFUSALS = frozenset({400, 413, 422})
"""The server is well, and cannot score these tokens."""
NO_KEY = frozenset({401, 403})
NO_ROUTE = frozenset({404, 405})
"""There is another program, or a path too many."""
WHERE = "algo.ref_urls"


class NoScore(Exception):
    """A server gave no log-probs; the text names it and says why."""


@dataclass(slots=True, eq=False)
class ReferenceServer:
    """One of them."""

    url: str
    num_open: int = 0
    """Calls."""
    rests_until_s: float = 0.0
    """On the loop's clock: it failed, others are better asked."""
    is_known: bool = False
    """Its vocabulary was looked at."""


MIN_TRIES = 3
CALLS_PER_SERVER = 32
"""At a time, of one rollout actor."""
REST_S = 10.0
PAUSE_S = 0.5
"""Before all servers are asked again, doubled each time, half as long or longer by chance."""
KEEPALIVE_S = 2.0
"""An idle connection is not used again after so long: uvicorn closes it after 5 s."""


@dataclass(eq=False)
class ReferenceServers:
    """Used from one loop."""

    urls: Sequence[str]
    _: KW_ONLY
    tokenizer: Tokenizer
    """The policy's."""
    model_path: str
    """The policy's."""
    timeout_s: float
    """For one answer."""
    key: str = ""
    """Sent as bearer; empty: none."""
    pause_s: float = PAUSE_S

    def __post_init__(self) -> None:
        self._servers = [ReferenceServer(url.rstrip("/")) for url in self.urls]
        self._probes = Probes.of(self.tokenizer)
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self._room = asyncio.Semaphore(CALLS_PER_SERVER * len(self._servers))
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def logprobs(self, request: ScoreRequest) -> F32:
        """float32 [tokens asked for], within `timeout_s` and a pause for each try, once there is room. Raises
        CallFailed that says what each server answered last, ConfigError for one that no run of this file can use."""
        failed: dict[str, str] = {}
        num_tries = max(MIN_TRIES, len(self._servers))
        pause_s, untried = self.pause_s, list[ReferenceServer]()
        loop = asyncio.get_running_loop()
        async with self._room:
            for number in range(num_tries):
                if number and not untried:
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                    pause_s *= 2
                untried = untried or list(self._servers)
                now_s = loop.time()
                server = min(untried, key=lambda server: (server.rests_until_s > now_s, server.num_open))
                untried.remove(server)
                try:
                    return await self._ask(server, request)
                except NoScore as no:
                    failed[server.url] = str(no)
                    server.rests_until_s = loop.time() + REST_S
        raise CallFailed(f"could not be asked: {'; '.join(failed.values())}; in {num_tries} tries")

    async def _ask(self, server: ReferenceServer, request: ScoreRequest) -> F32:
        server.num_open += 1
        try:
            if not server.is_known:
                await self._check_vocabulary(server)
            logprobs, _ = await self._answer(server, request)
        finally:
            server.num_open -= 1
        server.rests_until_s = 0.0
        return logprobs

    async def _check_vocabulary(self, server: ReferenceServer) -> None:
        try:
            _, texts = await self._answer(server, self._probes.request, with_texts=True)
        except CallFailed as error:
            raise self._wrong(server, f"does not know the tokens of {self.model_path}: {error}") from error
        if foreign := self._probes.foreign(texts):
            raise self._wrong(server, f"its vocabulary is not that of {self.model_path}: {foreign}")
        server.is_known = True

    def _wrong(self, server: ReferenceServer, why: str) -> ConfigError:
        return ConfigError(
            f"{WHERE}: {server.url}: {why}",
            remedy="name servers of a model of the same family, with a context for the longest sample and a token more",
        )

    async def _answer(
        self, server: ReferenceServer, request: ScoreRequest, *, with_texts: bool = False
    ) -> tuple[F32, list[str | None]]:
        """Raises NoScore, CallFailed for tokens that it refuses, ConfigError for a wrong key or address."""
        is_checked = not server.is_known or int(request.ids.max()) > int(self._probes.request.ids.max())
        try:
            status, raw, _ = await post_bounded(
                self._open(), f"{server.url}/generate",
                request_body(request, with_texts=with_texts, is_checked=is_checked), self._headers,
                within_s=self.timeout_s, max_bytes=len(request.ids) * BYTES_PER_TOKEN + SPARE_BYTES, name=server.url,
            )  # fmt: skip
            if status == 200:
                return scores_in(raw, request)
        except (NoAnswer, AnswerTooLong) as no:
            raise NoScore(str(no)) from no
        except BadAnswer as bad:
            raise NoScore(f"{server.url} {bad}") from bad
        text = f"{server.url} answered {status}: {raw[:SHOWN_BYTES].decode(errors='replace')}"
        if status in NO_KEY:
            raise ConfigError(f"{WHERE}: {text}", remedy="algo.ref_key_env: name the variable that holds its key")
        if status in NO_ROUTE and not server.is_known:
            raise ConfigError(f"{WHERE}: {text}", remedy="name addresses of SGLang servers, without /v1 behind them")
        if status in REFUSALS:
            raise CallFailed(f"refused: {text}", is_refusal=True)
        raise NoScore(text)

    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise CallFailed("could not be asked: the servers were given up")
        self._session = self._session or client_session(keepalive_s=KEEPALIVE_S)
        return self._session

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()


REMEDY = "start or mend the servers of algo.ref_urls; reward.max_error_rate says how many failures a run bears"
REFUSED = "serve a model over the policy's vocabulary, with a context longer than the longest sample by a token"
SERVED_AT = 1.0
"""Temperature of the log-probs that servers give for given tokens."""


class ServedReference(Reference):
    """One per rollout actor; `judged` may be called concurrently."""

    def __init__(self, servers: ReferenceServers, settings: RewardSettings, clock: Clock) -> None:
        """`settings`: what failures mean."""
        self._servers = servers
        self._clock = clock
        self._guard = CallGuard(settings, "the reference model of algo.ref_urls", "reference")
        super().__init__(self._guard)
        self._num_calls = 0
        self._call_s = 0.0
        """Seconds of calls that worked, since the last report."""

    async def judged(self, prompt: Prompt, sample: Sample) -> Sample:
        """Raises ReferenceFailed, UserCodeError for a sample at another temperature than the servers' log-probs."""
        request = score_request(sample)
        if request is None:
            return sample
        if sample.temperature not in (0.0, SERVED_AT):
            raise UserCodeError(
                f"workflow drew a sample at temperature {sample.temperature:g} (group {prompt.group_id}, sample "
                f"{sample.index}), and the reference log-probs of algo.ref_urls are those at temperature {SERVED_AT:g}",
                remedy="draw at temperature 1, or keep the reference model in the trainer: algo.ref_path",
            )
        try:
            logprobs = await self._guard.called(prompt.group_id, lambda: self._time_call(request))
        except CallFailed as no:
            place = f"group {prompt.group_id}, sample {sample.index}"
            remedy = REFUSED if no.is_refusal else REMEDY
            raise ReferenceFailed(f"the reference model of algo.ref_urls {no} ({place})", remedy=remedy) from no
        except MyxaError as error:
            raise ReferenceFailed(error.message, remedy=error.remedy) from error
        return replace(sample, reference_logprobs=in_response(sample, request, logprobs))

    async def _time_call(self, request: ScoreRequest) -> F32:
        started_s = self._clock.monotonic()
        logprobs = await self._servers.logprobs(request)
        self._num_calls += 1
        self._call_s += self._clock.monotonic() - started_s
        return logprobs

    def gauges(self) -> dict[str, float]:
        """What the monitor shows of it; seconds are the mean of calls since the last time."""
        values = super().gauges()
        if self._num_calls:
            values["reference/s_mean"] = self._call_s / self._num_calls
        self._num_calls, self._call_s = 0, 0.0
        return values

    async def close(self) -> None:
        await self._servers.close()
