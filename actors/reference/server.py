"""Servers of one reference model, over HTTP.

`ReferenceServer` is one of them: its vocabulary is checked before its first answer is used, and it gets no calls for a
while after it failed. `ReferenceServers` asks the one with the fewest open calls among those that did not fail lately.
If it fails, the others are asked once each; then all again after a pause, until the tries are used up.

`ServedReference` gives finished samples their reference log-probs; failures are handled by the same policy as those of
rewards. A sample whose servers fail loses its group; failures in a row are an outage, and samples wait (`[reward]` sets
how many and for how long).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from msgspec.structs import replace

from ...core.clock import Clock
from ...core.config import RewardSettings
from ...core.errors import ConfigError, MyxaError, ReferenceFailed, UserCodeError
from ...core.protocols import Tokenizer
from ...core.samples import F32, Prompt, Sample
from ..http_client import AnswerTooLong, NoAnswer, client_session, post_bounded
from ..rewards.call import CallFailed
from ..rewards.guard import CallGuard, Reference
from .wire import BadAnswer, Probes, WantedScores, in_response, question, scores_in, wanted_of

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
    probes: Probes
    model_path: str
    """Of the policy, for messages."""


class ReferenceServer:
    """Used from one loop."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.num_asked = 0
        self.rests_until_s = 0.0
        """On the loop's clock: it failed, others are better asked."""
        self._num_failed = 0
        self._is_known = False

    async def logprobs(self, access: Access, wanted: WantedScores) -> F32:
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
            now_s = asyncio.get_running_loop().time()
            if now_s >= self.rests_until_s:  # else a call that was begun before: it is the same failure
                self.rests_until_s = now_s + min(2.0**self._num_failed, MAX_REST_S)
                self._num_failed += 1
            raise
        finally:
            self.num_asked -= 1
        self._worked()
        return found

    def _worked(self) -> None:
        self._num_failed, self.rests_until_s = 0, 0.0

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

    async def _ask(
        self, access: Access, wanted: WantedScores, *, with_texts: bool = False
    ) -> tuple[F32, list[str | None]]:
        is_known = self._is_known and int(wanted.ids.max()) <= int(access.probes.wanted.ids.max())
        body = question(wanted, with_texts=with_texts, is_checked=not is_known)
        raw = await self._post(access, body, len(wanted.ids))
        try:
            return scores_in(raw, wanted)
        except BadAnswer as bad:
            raise NoScore(f"{self.url} {bad}") from bad

    async def _post(self, access: Access, body: bytes, num_tokens: int) -> bytes:
        try:
            status, raw = await post_bounded(
                access.session, f"{self.url}/generate", body, access.headers,
                within_s=access.timeout_s, max_bytes=num_tokens * BYTES_PER_TOKEN + SPARE_BYTES, name=self.url,
            )  # fmt: skip
        except (NoAnswer, AnswerTooLong) as no:
            raise NoScore(str(no)) from no
        if status == 200:
            return raw
        text = f"{self.url} answered {status}: {raw[:SHOWN_BYTES].decode(errors='replace')}"
        if status in NO_KEY:
            raise ConfigError(f"{WHERE}: {text}", remedy="algo.ref_key_env: name the variable that holds its key")
        raise (Refused if status in REFUSALS else NoScore)(text)


MIN_TRIES = 3
CALLS_PER_SERVER = 32
"""At a time, of one rollout actor."""
PAUSE_S = 0.5
"""Before all servers are asked again, doubled each time, half as long or longer by chance."""
MAX_PAUSE_S = 10.0
KEEPALIVE_S = 2.0
"""An idle connection is not used again after so long: uvicorn closes it after 5 s."""


class ReferenceServers:
    """Used from one loop."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        tokenizer: Tokenizer,
        model_path: str,
        timeout_s: float,
        key: str = "",
        pause_s: float = PAUSE_S,
    ) -> None:
        """`tokenizer`, `model_path`: the policy's. `timeout_s`: for one answer. `key`: sent as bearer; empty: none."""
        self._servers = [ReferenceServer(url) for url in urls]
        self._probes = Probes.of(tokenizer)
        self._model_path = model_path
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._pause_s = pause_s
        self._room = asyncio.Semaphore(CALLS_PER_SERVER * len(self._servers))
        self._access: Access | None = None
        self._is_closed = False

    async def logprobs(self, wanted: WantedScores) -> F32:
        """float32 [wanted tokens]. Raises NoScore that says what each server answered last, Refused, ConfigError. Takes
        at most `timeout_s` and a pause for each try, once there is room: those before take no longer each."""
        async with self._room:
            return await self._with_patience(wanted)

    async def _with_patience(self, wanted: WantedScores) -> F32:
        failed: dict[str, str] = {}
        num_tries = max(MIN_TRIES, len(self._servers))
        pause_s, asked = self._pause_s, set[ReferenceServer]()
        for number in range(1, num_tries + 1):
            now_s = asyncio.get_running_loop().time()
            left = [server for server in self._servers if server not in asked]
            server = min(left, key=lambda server: (server.rests_until_s > now_s, server.num_asked))
            asked.add(server)
            try:
                return await server.logprobs(self._open(), wanted)
            except Refused:
                raise
            except NoScore as no:
                failed[server.url] = str(no)
            if len(asked) == len(self._servers) and number < num_tries:
                asked.clear()
                await asyncio.sleep(min(pause_s, MAX_PAUSE_S) * random.uniform(0.5, 1.5))
                pause_s *= 2
        raise NoScore(f"{'; '.join(failed.values())}; in {num_tries} tries")

    def _open(self) -> Access:
        if self._is_closed:
            raise NoScore("asked after the servers were given up")
        if self._access is None:
            session = client_session(keepalive_s=KEEPALIVE_S)
            self._access = Access(session, self._headers, self._timeout_s, self._probes, self._model_path)
        return self._access

    async def close(self) -> None:
        self._is_closed = True
        if self._access is not None:
            await self._access.session.close()


def key_from(environment: Mapping[str, str], name: str) -> str:
    """The key that the variable holds; empty without a name. Raises ConfigError if it is not set."""
    if name and not environment.get(name):
        raise ConfigError(
            f'algo.ref_key_env = "{name}": that variable is not set where the rollout actors run',
            remedy="set it in the environment of `myxa up`",
        )
    return environment.get(name, "") if name else ""


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
        """The sample with its reference log-probs. Raises ReferenceFailed, and UserCodeError for a sample that was
        drawn at another temperature than the servers' log-probs are of."""
        wanted = wanted_of(sample)
        if wanted is None:
            return sample
        if sample.temperature not in (0.0, SERVED_AT):
            raise UserCodeError(
                f"workflow drew a sample at temperature {sample.temperature:g} (group {prompt.group_id}, sample "
                f"{sample.index}), and the reference log-probs of algo.ref_urls are those at temperature {SERVED_AT:g}",
                remedy="draw at temperature 1, or keep the reference model in the trainer: algo.ref_path",
            )
        logprobs = await self._asked(wanted, f"group {prompt.group_id}, sample {sample.index}", prompt.group_id)
        return replace(sample, reference_logprobs=in_response(sample, wanted, logprobs))

    async def _asked(self, wanted: WantedScores, place: str, group_id: int) -> F32:
        try:
            return await self._guard.called(group_id, lambda: self._answer(wanted))
        except CallFailed as no:
            remedy = REFUSED if no.is_refusal else REMEDY
            raise ReferenceFailed(f"the reference model of algo.ref_urls {no} ({place})", remedy=remedy) from no
        except MyxaError as error:
            raise ReferenceFailed(error.message, remedy=error.remedy) from error

    async def _answer(self, wanted: WantedScores) -> F32:
        started_s = self._clock.monotonic()
        try:
            found = await self._servers.logprobs(wanted)
        except Refused as no:
            raise CallFailed(f"refused: {no}", is_refusal=True) from no
        except NoScore as no:
            raise CallFailed(f"could not be asked: {no}") from no
        self._num_calls += 1
        self._call_s += self._clock.monotonic() - started_s
        return found

    def gauges(self) -> dict[str, float]:
        """What the monitor shows of it; seconds are the mean of calls since the last time."""
        values = super().gauges()
        if self._num_calls:
            values["reference/s_mean"] = self._call_s / self._num_calls
        self._num_calls, self._call_s = 0, 0.0
        return values

    async def close(self) -> None:
        await self._servers.close()
