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
        settings, posts = self.settings_with(args, key, self.models), None
        if settings.url:
            bearer = key_from(self.environ, settings.key_env, "judge.key_env")
            url = f"{settings.url.rstrip('/')}/chat/completions"
            posts = Posts(url, timeout_s=settings.timeout_s, max_calls=settings.max_calls, key=bearer)
        return JudgeReward(
            settings, _over_http(posts, settings.model) if posts else self.models[settings.model], posts, strips=strips
        )

    def settings_with(self, args: Mapping[str, Any], key: str, model_names: Collection[str]) -> JudgeSettings:
        """`model_names`: of the run's own. Raises ConfigError for keys, values, and where no model can be asked."""
        try:
            values = self.settings.model_dump(exclude_unset=True)
            settings = JudgeSettings.model_validate({**values, **args}) if args else self.settings
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or next(iter(args))
            is_unknown = first["type"] == "extra_forbidden"
            cause = 'reward "judge" takes no such argument' if is_unknown else first["msg"]
            remedy = suggest(name, JudgeSettings.model_fields) if is_unknown else "see [judge]"
            raise ConfigError(f"{key}.{name}: {cause}", remedy=remedy) from None
        if settings.url or settings.model in model_names:
            return settings
        if not settings.model:
            raise ConfigError('judge.url: is empty, and reward "judge" asks a model', remedy="set it, or judge.model")
        near = suggest(settings.model, model_names)
        raise ConfigError(f'judge.model = "{settings.model}": is none of [models]', remedy=f"{near}; or set judge.url")


def _over_http(posts: Posts, model: str) -> Chat:
    async def chat(text: str, temperature: float, max_tokens: int) -> tuple[str | None, int]:
        request = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        raw = await posts.post(msgspec.json.encode(request))
        try:
            answer: Any = msgspec.json.decode(raw)
            content, usage = answer["choices"][0]["message"]["content"], answer.get("usage")
            tokens = usage["total_tokens"] if usage else 0
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
            raise NoAnswer(f"answered with no chat completion: {shown(raw)!r}") from error
        return content if isinstance(content, str) else None, tokens if isinstance(tokens, int) else 0

    return chat


class JudgeReward:
    """One judge. Used from one loop."""

    def __init__(self, settings: JudgeSettings, chat: Chat, posts: Posts | None = None, *, strips: bool = True) -> None:
        """`posts`: closed with it. `strips`: thoughts of the policy's are left out."""
        self._settings = settings
        self._chat = chat
        self._posts = posts
        self._strips = strips
        self._room = asyncio.Semaphore(settings.max_calls)
        self._scores = OrderedDict[bytes, float]()
        """By the digest of the text; the one that was used last is the last."""
        self._asking = WeakValueDictionary[bytes, asyncio.Lock]()
        """Of these texts: answers that are alike wait for one request."""
        self._counts = Counter[str](requests=0, tokens=0, cache_hits=0, parse_failures=0)

    async def ask(self, answers: Answers) -> Outcomes:
        return tuple([RewardOutcome(await self._score(self._question(answer))) for answer in answers])

    def gauges(self) -> dict[str, float]:
        """Since the actor began."""
        return {f"reward/judge_{name}": float(count) for name, count in self._counts.items()}

    async def close(self) -> None:
        if self._posts is not None:
            await self._posts.close()

    def _question(self, completion: Completion) -> str:
        text = completion.text
        if self._strips:
            text = after_thought(text, begins_inside=completion.begins_in_thought) or ""
        mark = blake2b(text.encode(errors="replace"), digest_size=6).hexdigest()
        values = {
            "prompt": completion.prompt,
            "label": completion.label,
            "answer": f"<answer {mark}>\n{text}\n</answer {mark}>",
        }
        return FIELD.sub(lambda match: values[match[1]], self._settings.template)

    async def _score(self, text: str) -> float:
        settings, digest = self._settings, blake2b(text.encode(errors="replace"), digest_size=16).digest()
        turn = self._asking.setdefault(digest, asyncio.Lock()) if settings.cache else asyncio.Lock()
        async with turn, self._room:
            if digest in self._scores:
                self._counts["cache_hits"] += 1
                self._scores.move_to_end(digest)
                return self._scores[digest]
            try:
                score = await tried(lambda: self._try(text), tries=settings.tries, backoff_s=settings.backoff_s)
            except NoAnswer as failed:
                raise CallFailed(str(failed)) from failed
            self._scores[digest] = score
            while len(self._scores) > settings.cache:
                self._scores.popitem(last=False)
            return score

    async def _try(self, text: str) -> float:
        self._counts["requests"] += 1
        reply, num_tokens = await self._chat(text, self._settings.temperature, self._settings.max_tokens)
        self._counts["tokens"] += num_tokens
        score = score_in(reply or "", self._settings)
        if score is None:
            self._counts["parse_failures"] += 1
            raise NoAnswer(f"gave no score: {(reply or '')[-200:]!r}")
        return score


def score_in(text: str, settings: JudgeSettings) -> float | None:
    """The reward that a judge's answer says; None: it says none."""
    text = after_thought(text) or ""
    if settings.json_field:
        score = _field_of_last_object(text, settings.json_field)
    else:
        matches = deque(re.finditer(settings.pattern, text), maxlen=1)
        score = matches[0][1] if matches else None
        if matches and not settings.scores and not _is_whole(text, matches[0], settings.high):
            return None
    if score is None or isinstance(score, list | dict):
        return None
    label = (json.dumps(score) if isinstance(score, bool) else str(cast("object", score))).strip()
    if settings.scores:
        return {name.casefold(): score for name, score in settings.scores.items()}.get(label.casefold())
    if not NUMBER.fullmatch(label) or not settings.low <= float(label) <= settings.high:
        return None
    return (float(label) - settings.low) / (settings.high - settings.low)


def _is_whole(text: str, match: re.Match[str], high: float) -> bool:
    """Whether the number that was found is all of it."""
    behind = GOES_ON.match(text, match.end(1))
    return not text[: match.start(1)].endswith((".", "\u2212", "\u2013")) and (
        behind is None or (behind["high"] is not None and float(behind["high"]) == high)
    )


def _field_of_last_object(text: str, name: str) -> object:
    decoder, value, start = json.JSONDecoder(), None, text.find("{")
    while start >= 0:
        try:
            table, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            value = table.get(name, value)
        start = text.find("{", end)
    return cast("object", value)
