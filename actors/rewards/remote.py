"""The reward `remote`: a service judges, asked by POST over HTTP.

    one answer        {"prompt": ..., "response": ..., "label": ..., "metadata": {...}, ...}  ->  0.5 or {"reward": 0.5}
    scope = "group"   {"answers": [{...}, ...]}                                               ->  [0.5, {"reward": 1}]

A try without an answer, or with that of a busy or broken service (408, 429, 5xx), is repeated after a pause; any other
refusal is an error at once. The rewarder decides what a failure means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from ...algos.arguments import bind
from ...core.completions import Completion
from ...core.config.section import HTTP_URL, has_shell_variable
from ...core.errors import ConfigError
from ..http_client import MAX_PAUSE_S, AnswerTooLong, NoAnswer, client_session, post_bounded, tried
from .call import Answers, CallFailed, Outcomes, judged

MAX_ANSWER_BYTES = 1 << 20
KEEPALIVE_S = 2.0
"""An idle connection is not used again after so long: servers close them, some after 5 s."""
SHOWN_BYTES = 200
WORTH_REPEATING = frozenset({408, 425, 429})
JSON_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """The table `[reward.args]` of `fn = "remote"`."""

    url: str = ""
    tries: int = 3
    """How often one call is made at most."""
    backoff_s: float = 0.5
    """Pause before the second try, doubled for each further one, and up to half as long or longer by chance."""
    max_calls: int = 64
    """Calls of one rollout actor at a time; the others wait, and their time limit with them."""


def remote_options(args: Mapping[str, Any], key: str = "reward.args") -> RemoteOptions:
    """The arguments, checked. Raises ConfigError."""
    options = bind(RemoteOptions, args, key=key, what='reward "remote"')()
    if HTTP_URL.fullmatch(options.url) is None or has_shell_variable(options.url):
        raise ConfigError(
            f'{key}.url = "{options.url}": reward "remote" asks a service', remedy="http://host:port/path"
        )
    if options.tries < 1 or options.max_calls < 1 or options.backoff_s > MAX_PAUSE_S:
        raise ConfigError(
            f"{key}: tries and max_calls must be at least 1, backoff_s from 0 to {MAX_PAUSE_S:g}",
            remedy="leave them out for the defaults",
        )
    return options


class Posts:
    """POSTs JSON to one address. Used from one loop."""

    def __init__(self, url: str, *, timeout_s: float, max_calls: int, key: str = "") -> None:
        """`timeout_s`: for each try. `key`: sent as bearer; empty: none."""
        self._url = url
        self._timeout_s = timeout_s
        self._max_calls = max_calls
        self._headers = JSON_HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def post(self, body: bytes) -> bytes:
        """The body of an answer with status 200. Raises NoAnswer for what may be over soon, else CallFailed."""
        url = self._url
        try:
            status, raw, retry_after_s = await post_bounded(
                self._connected(), url, body, self._headers,
                within_s=self._timeout_s, max_bytes=MAX_ANSWER_BYTES, name=url,
            )  # fmt: skip
        except AnswerTooLong as long:
            raise CallFailed(str(long)) from long
        message = f"{url} answered {status}: {shown(raw)}"
        if status in WORTH_REPEATING or status >= 500:
            busy = NoAnswer(message)
            busy.retry_after_s = retry_after_s
            raise busy
        if status != 200:
            raise CallFailed(message)
        return raw

    def _connected(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise CallFailed("was called after the rewarder was closed")
        if self._session is None:
            self._session = client_session(keepalive_s=KEEPALIVE_S, max_connections=self._max_calls, url=self._url)
        return self._session

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()


def shown(raw: bytes) -> str:
    """The beginning of an answer, for messages."""
    return raw[:SHOWN_BYTES].decode(errors="replace")


class RemoteReward:
    """One service. Used from one loop."""

    def __init__(self, options: RemoteOptions, *, timeout_s: float, takes_group: bool) -> None:
        """`timeout_s`: for each try."""
        self._options = options
        self._posts = Posts(options.url, timeout_s=timeout_s, max_calls=options.max_calls)
        self._takes_group = takes_group
        self._room = asyncio.Semaphore(options.max_calls)

    async def ask(self, answers: Answers) -> Outcomes:
        options, body = self._options, self._body(answers)
        async with self._room:
            try:
                value = await tried(lambda: self._try(body), tries=options.tries, backoff_s=options.backoff_s)
            except NoAnswer as failed:
                raise CallFailed(str(failed)) from failed
        return judged(value, len(answers) if self._takes_group else None)

    def gauges(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        await self._posts.close()

    def _body(self, answers: Answers) -> bytes:
        names = [name for name in Completion.__struct_fields__ if name not in ("text", "begins_in_thought")]
        bodies = [{"response": answer.text} | {name: getattr(answer, name) for name in names} for answer in answers]
        try:
            return msgspec.json.encode({"answers": bodies} if self._takes_group else bodies[0])
        except (TypeError, ValueError) as error:
            raise CallFailed(f"cannot be sent its answers: {error}") from error

    async def _try(self, body: bytes) -> Any:
        raw = await self._posts.post(body)
        try:
            return msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CallFailed(f"{self._options.url} answered with what is no JSON: {shown(raw)!r}") from error
