"""One server of the reference model: asked by POST over HTTP, checked for its vocabulary before its first answer is
believed, and left alone for a while after it failed.

Knows aiohttp and what is sent. Must not know other servers, or what becomes of a failure.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp

from ...core.errors import ConfigError
from ...core.samples import F32
from .vocabulary import Probes
from .wire import BadAnswer, Wanted, question, told_in

BYTES_PER_TOKEN = 512
"""Of an answer, texts included."""
SPARE_BYTES = 1 << 20
SHOWN_BYTES = 300
REFUSALS = frozenset({400, 413, 422})
"""The server is well, and cannot score these tokens."""
NO_KEY = frozenset({401, 403})
MAX_REST_S = 30.0
WHERE = "algo.ref_urls"


class NoScore(Exception):
    """A server gave no log-probs; the text names it and says why."""


class Refused(NoScore):
    """It is well, and does not take these tokens: to ask again is useless."""


@dataclass(frozen=True, slots=True)
class Access:
    """How servers are asked."""

    session: aiohttp.ClientSession
    headers: dict[str, str]
    timeout_s: float
    """For one answer."""
    probes: Probes
    model_path: str
    """Of the policy, for messages."""


class ReferenceServer:
    """Used from one loop."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.num_asked = 0
        """Calls under way."""
        self.rests_until_s = 0.0
        """On the loop's clock: it failed, others are better asked."""
        self._num_failed = 0
        self._is_known = False

    async def logprobs(self, access: Access, wanted: Wanted) -> F32:
        """Of the wanted tokens. Raises NoScore, and ConfigError for a server that no run of this file can use."""
        self.num_asked += 1
        try:
            if not self._is_known:
                await self._get_known(access)
            found, _ = await self._ask(access, wanted)
        except Refused:
            self._worked()
            raise
        except NoScore:
            self._failed()
            raise
        finally:
            self.num_asked -= 1
        self._worked()
        return found

    def _worked(self) -> None:
        self._num_failed, self.rests_until_s = 0, 0.0

    def _failed(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self.rests_until_s:  # else a call that was begun before: it is the same failure
            self.rests_until_s = now_s + min(2.0**self._num_failed, MAX_REST_S)
            self._num_failed += 1

    async def _get_known(self, access: Access) -> None:
        try:
            _, texts = await self._ask(access, access.probes.wanted, with_texts=True)
        except Refused as error:
            raise self._wrong(access, f"does not know the tokens of {access.model_path}: {error}") from error
        if foreign := access.probes.foreign(texts):
            raise self._wrong(access, f"its vocabulary is not that of {access.model_path}: {foreign}")
        self._is_known = True

    def _wrong(self, access: Access, why: str) -> ConfigError:
        return ConfigError(
            f"{WHERE}: {self.url}: {why}",
            remedy="name servers of a model of the same family, with a context for the longest sample and a token more",
        )

    async def _ask(self, access: Access, wanted: Wanted, *, with_texts: bool = False) -> tuple[F32, list[str | None]]:
        is_known = self._is_known and int(wanted.ids.max()) <= int(access.probes.wanted.ids.max())
        body = question(wanted, with_texts=with_texts, is_checked=not is_known)
        raw = await self._post(access, body, len(wanted.ids))
        try:
            return told_in(raw, wanted)
        except BadAnswer as bad:
            raise NoScore(f"{self.url} {bad}") from bad

    async def _post(self, access: Access, body: bytes, num_tokens: int) -> bytes:
        limit = num_tokens * BYTES_PER_TOKEN + SPARE_BYTES
        try:
            async with (
                asyncio.timeout(access.timeout_s),
                access.session.post(
                    f"{self.url}/generate", data=body, headers=access.headers, allow_redirects=False
                ) as answer,
            ):
                raw = bytearray()
                async for chunk in answer.content.iter_chunked(1 << 16):
                    raw += chunk
                    if len(raw) > limit:
                        raise NoScore(f"{self.url} answered with more than {limit} bytes")
                status = answer.status
        except TimeoutError as late:
            raise NoScore(f"{self.url} did not answer within {access.timeout_s:g} s") from late
        except aiohttp.ClientError as error:
            raise NoScore(f"{self.url} cannot be asked: {type(error).__name__}: {error}") from error
        if status == 200:
            return bytes(raw)
        text = f"{self.url} answered {status}: {bytes(raw[:SHOWN_BYTES]).decode(errors='replace')}"
        if status in NO_KEY:
            raise ConfigError(f"{WHERE}: {text}", remedy="algo.ref_key_env: name the variable that holds its key")
        raise (Refused if status in REFUSALS else NoScore)(text)
