"""The reward `judge`: a language model says a score, over OpenAI's API or as a model of the run's own.

    {"model": ..., "messages": [{"role": "user", "content": template}], ...}  ->  "... Score: 0.5"  ->  0.5

The policy may try to talk the judge into a score: its answer stands between marks that it cannot write, since they hold
a digest of it; only what the judge itself says is searched for a score.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast
from weakref import WeakValueDictionary

import msgspec
from pydantic import ValidationError

from ...algos.rewards.extraction import after_thought
from ...algos.rewards.outcome import RewardOutcome
from ...core.completions import Completion
from ...core.config.data import JUDGE_FIELDS, JudgeSettings
from ...core.errors import ConfigError
from ...core.suggestion import suggest
from ..http_client import NoAnswer, key_from, tried
from .call import Answers, CallFailed, Outcomes
from .remote import Posts, shown

Chat = Callable[[str, float, int], Awaitable[tuple[str | None, int]]]
"""From a text, the temperature and a number of tokens to what a model answers, and the tokens of both. Raises NoAnswer
for what may be over soon, CallFailed."""
FIELD = re.compile(r"\{(" + "|".join(JUDGE_FIELDS) + r")\}")
NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)", re.ASCII)
GOES_ON = re.compile(r"[.,]?\d|[eE][-+]?\d|\s*%|\s*(?:/|(?:out )?of)\s*(?P<high>\d+(?:\.\d+)?)", re.ASCII)
"""Behind a number: it is no score, but for one of the highest: 8/10."""


@dataclass(frozen=True, slots=True)
class Judges:
    """What rewards `judge` of a run are made of."""

    settings: JudgeSettings
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where keys of servers are."""
    models: Mapping[str, Chat] = field(default_factory=dict[str, Chat])
    """The run's own, by name."""

    def made(self, args: Mapping[str, Any], key: str, *, strips: bool) -> JudgeReward:
        """One with these keys of `[judge]` said otherwise. `key`: of the run file, that says so. Raises ConfigError."""
        of, posts = self.settings_with(args, key, self.models), None
        if of.url:
            bearer = key_from(self.environ, of.key_env, "judge.key_env")
            posts = Posts(f"{of.url.rstrip('/')}/chat/completions", timeout_s=of.timeout_s, max_calls=of.max_calls,
                          key=bearer)  # fmt: skip
        return JudgeReward(of, _over_http(posts, of.model) if posts else self.models[of.model], posts, strips=strips)

    def settings_with(self, args: Mapping[str, Any], key: str, known: Collection[str]) -> JudgeSettings:
        """`known`: models of the run's own. Raises ConfigError for keys, values, and where no model can be asked."""
        try:
            said = self.settings.model_dump(exclude_unset=True)
            of = JudgeSettings.model_validate({**said, **args}) if args else self.settings
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or next(iter(args))
            if first["type"] == "extra_forbidden":
                remedy = suggest(name, JudgeSettings.model_fields)
                raise ConfigError(f'{key}.{name}: reward "judge" takes no such argument', remedy=remedy) from None
            raise ConfigError(f"{key}.{name}: {first['msg']}", remedy="see [judge]") from None
        if of.url or of.model in known:
            return of
        if not of.model:
            raise ConfigError('judge.url: is empty, and reward "judge" asks a model', remedy="set it, or judge.model")
        near = suggest(of.model, known)
        raise ConfigError(f'judge.model = "{of.model}": is none of [models]', remedy=f"{near}; or set judge.url")


def _over_http(posts: Posts, model: str) -> Chat:
    async def chat(text: str, temperature: float, max_tokens: int) -> tuple[str | None, int]:
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        raw = await posts.post(msgspec.json.encode(asked))
        try:
            answer: Any = msgspec.json.decode(raw)
            said, usage = answer["choices"][0]["message"]["content"], answer.get("usage")
            tokens = usage["total_tokens"] if usage else 0
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
            raise NoAnswer(f"answered with no chat completion: {shown(raw)!r}") from error
        return said if isinstance(said, str) else None, tokens if isinstance(tokens, int) else 0

    return chat


class JudgeReward:
    """One judge. Used from one loop."""

    def __init__(self, of: JudgeSettings, chat: Chat, posts: Posts | None = None, *, strips: bool = True) -> None:
        """`posts`: closed with it. `strips`: thoughts of the policy's are left out."""
        self._of = of
        self._chat = chat
        self._posts = posts
        self._strips = strips
        self._room = asyncio.Semaphore(of.max_calls)
        self._known = OrderedDict[bytes, float]()
        """By the digest of the text; the one that was used last is the last."""
        self._asking = WeakValueDictionary[bytes, asyncio.Lock]()
        """Of these texts: answers that are alike wait for one request."""
        self._counts = Counter[str](requests=0, tokens=0, cache_hits=0, parse_failures=0)

    async def ask(self, answers: Answers) -> Outcomes:
        return tuple([RewardOutcome(await self._score(self._question(one))) for one in answers])

    def gauges(self) -> dict[str, float]:
        """Since the actor began."""
        return {f"reward/judge_{name}": float(count) for name, count in self._counts.items()}

    async def close(self) -> None:
        if self._posts is not None:
            await self._posts.close()

    def _question(self, one: Completion) -> str:
        text = after_thought(one.text, begins_inside=one.begins_in_thought) or "" if self._strips else one.text
        mark = blake2b(text.encode(errors="replace"), digest_size=6).hexdigest()
        said = {"prompt": one.prompt, "label": one.label, "answer": f"<answer {mark}>\n{text}\n</answer {mark}>"}
        return FIELD.sub(lambda match: said[match[1]], self._of.template)

    async def _score(self, text: str) -> float:
        of, digest = self._of, blake2b(text.encode(errors="replace"), digest_size=16).digest()
        turn = self._asking.setdefault(digest, asyncio.Lock()) if of.cache else asyncio.Lock()
        async with turn, self._room:
            if digest in self._known:
                self._counts["cache_hits"] += 1
                self._known.move_to_end(digest)
                return self._known[digest]
            try:
                score = await tried(lambda: self._try(text), tries=of.tries, backoff_s=of.backoff_s)
            except NoAnswer as failed:
                raise CallFailed(str(failed)) from failed
            self._known[digest] = score
            while len(self._known) > of.cache:
                self._known.popitem(last=False)
            return score

    async def _try(self, text: str) -> float:
        self._counts["requests"] += 1
        said, num_tokens = await self._chat(text, self._of.temperature, self._of.max_tokens)
        self._counts["tokens"] += num_tokens
        score = score_in(said or "", self._of)
        if score is None:
            self._counts["parse_failures"] += 1
            raise NoAnswer(f"gave no score: {(said or '')[-200:]!r}")
        return score


def score_in(text: str, of: JudgeSettings) -> float | None:
    """The reward that a judge's answer says; None: it says none."""
    text = after_thought(text) or ""
    if of.json_field:
        found = _field_of_last_object(text, of.json_field)
    else:
        last = deque(re.finditer(of.pattern, text), maxlen=1)
        found = last[0][1] if last else None
        if last and not of.scores and not _is_whole(text, last[0], of.high):
            return None
    if found is None or isinstance(found, list | dict):
        return None
    said = (json.dumps(found) if isinstance(found, bool) else str(cast("object", found))).strip()
    if of.scores:
        return {name.casefold(): score for name, score in of.scores.items()}.get(said.casefold())
    if not NUMBER.fullmatch(said) or not of.low <= float(said) <= of.high:
        return None
    return (float(said) - of.low) / (of.high - of.low)


def _is_whole(text: str, match: re.Match[str], high: float) -> bool:
    """Whether the number that was found is all of it."""
    behind = GOES_ON.match(text, match.end(1))
    return not text[: match.start(1)].endswith((".", "\u2212", "\u2013")) and (
        behind is None or (behind["high"] is not None and float(behind["high"]) == high)
    )


def _field_of_last_object(text: str, name: str) -> object:
    decoder, found, at = json.JSONDecoder(), None, text.find("{")
    while at >= 0:
        try:
            one, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            found = one.get(name, found)
        at = text.find("{", end)
    return cast("object", found)
