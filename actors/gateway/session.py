"""The conversations of one rollout, as a client tells them: which tokens each request continues.

A client sends its whole history with each request. As long as that is what was said here, the prompt of the next turn
is the recorded tokens, verbatim, and the rest as the chat template writes it. A history that differs continues from the
last turn of the model's that it still holds, or is a conversation of its own. Each line of turns is an `Episode`, so
each is a sample, and tokens that lines share are learnt once.

A turn is drawn to its end, whether or not its client waits. A client that asks the same again, because the connection
broke, gets that turn; one that still waits for it, or has got it, gets another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, Literal, cast

import msgspec
from msgspec.structs import replace

from ...algos.rewards.outcome import LARGEST
from ...core.errors import DataError, PromptTooLong, RequestRefused, TemplateError, UserCodeError
from ...core.messages import SamplingParams
from ...core.protocols import Delta, Tokenizer
from ...core.samples import Message, Prompt, Sample
from ...core.sampling import sampling_fault
from ..workflows.episode import Episode, Turn
from ..workflows.turn_renderer import ANSWER, QUESTION, begins_in_thought, between
from .turn_text import ToolForm, TurnText, cut_at, form_of, read_turn, without_begun

_log = logging.getLogger(__name__)
HALF = "\N{REPLACEMENT CHARACTER}"
"""What half a character decodes to."""
MAX_KEPT_REQUESTS = 64
"""Whose turns are remembered for clients that ask again; those that have been delivered are forgotten first."""
MAX_KEPT_CONVERSATIONS = 256
BYTES_A_TOKEN, BYTES_BESIDE = 32, 64 << 10
"""Of a request: at most so many for each token of the context, and beside them."""

FaultKind = Literal["invalid", "auth", "not-found", "too-large", "too-long", "busy", "engine"]


class RequestFault(Exception):
    """A request is not answered; each dialect has its own form for that."""

    def __init__(self, kind: FaultKind, text: str, *, param: str | None = None, code: str = "") -> None:
        """`param`: the field that is wrong. `code`: a dialect's own, which its clients react to."""
        super().__init__(text)
        self.kind: FaultKind = kind
        self.text = text
        self.param = param
        self.code = code


CLIENT_NAMES: Mapping[str, str] = {"max_new_tokens": "max_tokens"}


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a client asks for, whatever its dialect."""

    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    may_call: bool = True
    """Tool calls in the answer are read as such."""
    max_calls: int | None = None
    """The client gets no more of a turn's calls."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of SamplingParams that the client says."""
    client_names: Mapping[str, str] = field(default_factory=lambda: CLIENT_NAMES)
    """What the client calls those that have another name there."""
    text: str | Sequence[int] | None = None
    """In place of messages: the prompt itself or its token ids, without a chat template."""
    fingerprint: bytes = b""
    """Equal for requests that ask for the same."""
    is_retry: bool = False
    """Its client says that it asks again: it has not got the answer, whatever left here."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn of the model."""

    id: str
    text: TurnText
    finish: Literal["stop", "length"]
    num_prompt: int
    """Tokens before the turn."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the moment of sampling, natural logarithms, one a token."""
    versions: tuple[int, int]
    """Oldest and newest weight version of its tokens."""
    call_ids: tuple[str, ...] = ()
    stop: str = ""
    """The stop string that ended it; the text goes up to there."""

    def message(self) -> Message:
        """As a client sends it back."""
        calls = tuple(
            {"id": number, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for number, call in zip(self.call_ids, self.text.calls, strict=True)
        )
        extra = {"reasoning_content": self.text.reasoning} if self.text.reasoning else {}
        return Message(role="assistant", content=self.text.content, tool_calls=calls, extra=extra)


class GrowingText:
    """The text of a turn under way. New tokens are decoded with those of the piece before, not from the beginning: what
    a token says may depend on its neighbours, not on those far away. Pieces end where characters do."""

    def __init__(self, episode: Episode, decode: Callable[[Sequence[int]], str]) -> None:
        self._episode = episode
        self._decode = decode
        self._parts: Sequence[Delta] = ()
        self._num_parts = 0
        self._ids: list[int] = []
        self._num_again = 0
        """Tokens that come a second time, in another stream of the same turn."""
        self._piece = self._end = 0
        """Where the last piece begins, and ends."""
        self._text = ""
        """Up to that end."""

    def read(self) -> str:
        """All of it so far."""
        parts = self._episode.under_way
        if parts is not self._parts:
            self._parts, self._num_parts, self._num_again = parts, 0, len(self._ids)
        for part in parts[self._num_parts :]:
            ids: list[int] = part.output_ids.tolist()
            self._ids += ids[self._num_again :]
            self._num_again = max(0, self._num_again - len(ids))
        self._num_parts = len(parts)
        num_decoded = len(self._decode(self._ids[self._piece : self._end]))
        new_text = self._decode(self._ids[self._piece :])[num_decoded:]
        if not new_text or new_text.endswith(HALF):
            return self._text + new_text.rstrip(HALF)
        self._text += new_text
        self._piece, self._end = self._end, len(self._ids)
        return self._text


class ComingTurn:
    """A turn under way. Several clients may read it; it comes to its end without any."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        """Tokens before the turn."""
        self.is_delivered = False
        """A client has all of it."""
        self.is_awaited = True
        """A client waits for it, as far as is known."""
        self.place: _Place | None = None
        """Of a turn of a chat that has ended."""
        self.read: Callable[[], TurnText] = TurnText
        self._answer: Answer | BaseException | None = None
        self._is_over = asyncio.Event()
        self._news: asyncio.Event | None = None
        """A client waits for more."""

    def mark_delivered(self) -> None:
        self.is_delivered = True
        if self.place is not None:
            self.place.is_delivered = True

    def end(self, outcome: Answer | BaseException) -> None:
        self._answer = outcome
        self._is_over.set()
        self.notify()

    def notify(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    async def parts(self) -> AsyncIterator[TurnText | Answer]:
        """The text so far, each time that there is more of it, and the answer last. Raises RequestFault."""
        seen: TurnText | None = None
        while self._answer is None:
            if (text := self.read()) != seen:
                seen = text
                yield seen
            else:
                self._news = self._news or asyncio.Event()
                await self._news.wait()
        yield self._outcome()

    async def answer(self) -> Answer:
        """Raises RequestFault."""
        await self._is_over.wait()
        return self._outcome()

    def _outcome(self) -> Answer:
        if isinstance(self._answer, Answer):
            return self._answer
        assert self._answer is not None
        raise self._answer


@dataclass(slots=True, eq=False)
class _Line:
    """A sample in the making: turns of the model one behind the other."""

    episode: Episode
    prompt: Prompt
    num_turns: int = 0
    is_busy: bool = False
    """A turn of it is drawn, or was refused behind its reply: others branch off before that."""
    last: int = 0
    """Which of the session's turns was its last one."""
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """Of its turns, by the ids of their answers; in their order."""


@dataclass(slots=True, eq=False)
class _Place:
    """The end of a turn of the model."""

    line: _Line
    num_turns: int
    """Of the line, up to there."""
    thoughts: tuple[str, ...]
    """Of the conversation's turns of the model, up to there."""
    is_delivered: bool = False
    """A client has got the turn."""


@dataclass(frozen=True, slots=True)
class _History:
    """What of a request was said here."""

    num_messages: int
    places: Sequence[_Place]
    """Where they end; several, where turns differ by their thoughts alone."""
    digest: bytes
    """Of the whole conversation."""
    thoughts: tuple[str, ...]
    """In all of its turns of the model."""


class AgentSession:
    """The conversations of one rollout. See the module's head. Used by one loop."""

    def __init__(self, episode: Episode, tokenizer: Tokenizer) -> None:
        self._root = episode
        self._tokenizer = tokenizer
        self._sampling = episode.sampling
        self._form: ToolForm | None = tool_form(tokenizer)
        self._ends = frozenset(tokenizer.eos_token_ids)
        self._lines: list[_Line] = []
        self._places: dict[bytes, list[_Place]] = {}
        """By the digest of the conversation up to there."""
        self._coming: dict[bytes, ComingTurn] = {}
        self._drawing: set[asyncio.Task[None]] = set()
        self._num_turns = 0
        self._is_closed = False
        self._name = secrets.token_hex(12)
        self._numbers = itertools.count()
        self.fault: BaseException | None = None
        """Why the rollout cannot continue: the engine failed, or had to stop."""
        self.interrupted = asyncio.Event()
        """Set with `fault`."""
        self.conversations: dict[str, tuple[Message, ...]] = {}
        """Up to an answer, by the id that the Responses dialect gave it."""
        self.counts = Counter[str]()
        """turns; continued, forked, edited (a turn of the model's came back changed), repeated requests."""

    @property
    def num_drawing(self) -> int:
        """Turns under way."""
        return len(self._drawing)

    def new_id(self) -> str:
        """Of a request, an answer or a call. No secret; the system is asked for randomness once a session, since each
        question gives the interpreter away to the engine's thread."""
        return f"{self._name}{next(self._numbers):08x}"

    def _new_call_id(self) -> str:
        """Mistral's templates take nine letters and no other ids."""
        return f"{next(self._numbers):09x}" if self._form == "mistral" else f"call_{self.new_id()}"

    @property
    def context_length(self) -> int:
        return self._root.context_length

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)

    def check_size(self, num_bytes: int) -> None:
        """Raises RequestFault for one too large for any prompt: others would wait while it is made tokens of."""
        most = BYTES_BESIDE + BYTES_A_TOKEN * self.context_length
        if num_bytes > most:
            raise self._too_long(f"the request has {num_bytes} bytes, the context is for {most} at most")

    def _too_long(self, reason: str) -> RequestFault:
        """In OpenAI's words, by which LiteLLM and agents know that they have to shorten the conversation."""
        head = f"this model's maximum context length is {self.context_length} tokens"
        return RequestFault("too-long", f"{head}: {reason}", param="messages")

    def num_tokens(self, request: TurnRequest) -> int:
        """Of the prompt, if nothing of it was said here. Raises RequestFault."""
        try:
            messages = self._templated(request)
            return len(self._tokenizer.render(messages, add_generation_prompt=True, tools=request.tools))
        except (DataError, TemplateError) as error:
            raise RequestFault("invalid", f"{error.message}: {error.remedy}", param="messages") from error

    def _templated(self, request: TurnRequest) -> tuple[Message, ...]:
        """The messages as the template takes them: its form of calls, no thoughts or later system messages if it writes
        none."""
        messages = request.messages
        if not writes_later_systems(self._tokenizer):
            messages = _with_one_system(messages)
        if not writes_thoughts(self._tokenizer, bool(request.tools)):
            messages = tuple(replace(message, extra={}) for message in messages)
        if not _render_call(self._tokenizer)[1]:
            return messages
        return tuple(replace(message, tool_calls=tuple(map(as_text, message.tool_calls))) for message in messages)

    # -- asking

    def ask(self, request: TurnRequest) -> ComingTurn:
        """Begin the turn that answers this request, or find the one that does. Raises RequestFault."""
        if self._is_closed:
            raise RequestFault("auth", "the session of this key has ended")
        if self.fault is not None:
            raise RequestFault("busy", f"this rollout was interrupted: {self.fault}")
        if self._form is None and request.tools and request.may_call:
            reason = "the model's chat template writes tool calls in a form that is not read here"
            remedy = 'say tool_choice = "none", and read them in the text'
            raise RequestFault("invalid", f"{reason}: {remedy}", param="tools")
        coming = self._coming.get(request.fingerprint)
        if coming is not None and (request.is_retry or not (coming.is_delivered or coming.is_awaited)):
            self.counts["repeated"] += 1
            coming.is_awaited = True
            return coming
        params = self._params(request)
        line, history = self._find_line(request, params)
        line.is_busy = True
        fingerprints = sorted(self._coming, key=lambda fingerprint: not self._coming[fingerprint].is_delivered)
        for fingerprint in fingerprints[: max(0, len(fingerprints) - MAX_KEPT_REQUESTS)]:
            del self._coming[fingerprint]
        coming = self._coming[request.fingerprint] = ComingTurn(line.episode.num_tokens)
        task = asyncio.ensure_future(self._draw_turn(line, history, request, params, coming))  # noqa: TID251 -- ended by close
        self._drawing.add(task)
        task.add_done_callback(self._drawing.discard)
        return coming

    def _params(self, request: TurnRequest) -> SamplingParams:
        params = replace(self._sampling, **request.sampling)
        limit = min(params.max_new_tokens, self._sampling.max_new_tokens)
        params = params.for_rest(num_done=0, limit=limit)
        if wrong := sampling_fault(params):
            name = request.client_names.get(wrong.field, wrong.field)
            raise RequestFault("invalid", f"{name} {wrong.fault}: {wrong.remedy}", param=name)
        return params

    def _find_line(self, request: TurnRequest, params: SamplingParams) -> tuple[_Line, _History | None]:
        """The line that the turn belongs to, with all tokens before it, and the conversation so far."""
        try:
            if request.text is not None:
                return self._begin_line(replace(self._root.prompt, messages=(), tools=()), request.text), None
            history, messages = self._find_history(request), self._templated(request)
            new_messages = messages[len(messages) - len(request.messages) + history.num_messages :]
            if history.places and not new_messages:
                reason = "the last message is the model's own turn, which has ended: append one"
                raise RequestFault("invalid", reason, param="messages")
            if not history.places or new_messages[-1].role == "assistant":  # a turn that its client began
                prompt = replace(self._root.prompt, messages=messages, tools=request.tools)
                return self._begin_line(prompt, None), history
            place = max(history.places, key=lambda place: place.is_delivered)
            ids = place.line.episode.reply_ids(new_messages, place.num_turns)
            if ids is None:
                raise self._too_long("the conversation leaves no room for an answer")
            line = self._continue_line(place, params)
            line.episode.append_reply(new_messages, ids)
        except PromptTooLong as error:
            raise self._too_long(error.message) from error
        except (DataError, TemplateError, UserCodeError) as error:
            raise RequestFault("invalid", f"{error.message}: {error.remedy}", param="messages") from error
        return line, history

    def _find_history(self, request: TurnRequest) -> _History:
        digest, thoughts = _digest(b"", request.tools), list[str]()
        history = _History(0, (), digest, ())
        for number, message in enumerate(request.messages, 1):
            before, digest = digest, _digest(digest, _canonical(message))
            if message.role == "assistant":
                if digest not in self._places:
                    message = _with_thought_apart(message)
                    digest = _digest(before, _canonical(message))
                thoughts.append(str(message.extra.get("reasoning_content", "")).strip())
                places = self._places.get(digest, ())
                if matches := [place for place in places if _thoughts_agree(thoughts, place.thoughts)]:
                    history = _History(number, matches, digest, matches[-1].thoughts)
        self.counts["edited"] += len(thoughts) > len(history.thoughts) and bool(self._places)
        all_thoughts = (*history.thoughts, *thoughts[len(history.thoughts) :])
        return _History(history.num_messages, history.places, digest, all_thoughts)

    def _begin_line(self, prompt: Prompt, text: str | Sequence[int] | None) -> _Line:
        root = self._root
        is_own = text is None and (prompt.messages, prompt.tools) == (root.prompt.messages, root.prompt.tools)
        if is_own and not any(line.episode is root for line in self._lines):
            episode = root
        else:
            episode = root.session(prompt.messages, prompt.tools) if text is None else root.text(text)
        self._lines.append(_Line(episode, prompt))
        return self._lines[-1]

    def _continue_line(self, place: _Place, params: SamplingParams) -> _Line:
        """The line that continues from there: the same one if nothing follows and its turns were drawn as this one."""
        line = place.line
        is_last = line.num_turns == place.num_turns and not line.is_busy
        if is_last and line.episode.temperature == params.temperature:
            self.counts["continued"] += 1
            return line
        self.counts["forked"] += 1
        line = _Line(line.episode.branch(place.num_turns), line.prompt)
        self._lines.append(line)
        return line

    async def _draw_turn(
        self, line: _Line, history: _History | None, request: TurnRequest, params: SamplingParams, coming: ComingTurn
    ) -> None:
        episode = line.episode
        form: ToolForm | None = self._form if request.may_call and request.tools else None
        read_text = partial(
            read_turn, form=form, begins_inside=begins_in_thought(self._tokenizer, episode.token_ids),
            texts=text_parameters(request.tools), is_plain=request.text is not None,
        )  # fmt: skip
        growing = GrowingText(episode, lambda ids: self.decode(self._without_end(ids)))

        def text_so_far() -> TurnText:
            text = without_begun(cut_at(growing.read(), params.stop)[0], params.stop)
            return read_text(text, is_whole=False)

        coming.read, episode.on_tokens = text_so_far, coming.notify
        try:
            turn = await episode.generate(params)
            text, stop = cut_at(self.decode(self._without_end(turn.token_ids)), params.stop)
            turn_text = read_text(text)
            turn_text = dataclasses.replace(turn_text, calls=turn_text.calls[: request.max_calls])
            answer = self._make_answer(turn, episode.last_turn, turn_text, num_prompt=coming.num_prompt, stop=stop)
            self._keep(line, history, answer, coming)
        except asyncio.CancelledError:
            coming.end(RequestFault("busy", "the session has ended"))
            raise
        except (UserCodeError, RequestRefused) as error:
            coming.end(RequestFault("invalid", f"{error.message}: {error.remedy}"))
        except Exception as error:  # noqa: BLE001 -- raised where the rollout is awaited
            self.fault = error
            self.interrupted.set()
            coming.end(RequestFault("engine", f"the engine could not answer: {error}"))
        else:
            line.is_busy = False
            coming.end(answer)
        finally:
            episode.on_tokens = None

    def _make_answer(self, turn: Turn, drawn: Delta, text: TurnText, *, num_prompt: int, stop: str) -> Answer:
        return Answer(
            id=self.new_id(),
            text=text,
            finish="length" if turn.finish == "length" else "stop",
            num_prompt=num_prompt,
            token_ids=turn.token_ids,
            logprobs=tuple(drawn.logprobs.tolist()),
            versions=(int(drawn.versions.min(initial=2**31 - 1)), int(drawn.versions.max(initial=-1))),
            call_ids=tuple(call.id or self._new_call_id() for call in text.calls),
            stop=stop,
        )

    def _keep(self, line: _Line, history: _History | None, answer: Answer, coming: ComingTurn) -> None:
        self._num_turns += 1
        self.counts["turns"] += 1
        line.num_turns, line.last = line.num_turns + 1, self._num_turns
        line.rewards[answer.id] = 0.0
        if history is not None:
            digest = _digest(history.digest, _canonical(answer.message()))
            coming.place = _Place(line, line.num_turns, (*history.thoughts, answer.text.reasoning.strip()))
            self._places.setdefault(digest, []).append(coming.place)

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        """Without the token that ends the turn."""
        return ids[:-1] if ids and ids[-1] in self._ends else ids

    # -- its end

    def reward_turn(self, answer_id: str, reward: float) -> None:
        """Say what a turn earned; said again, the last counts. Raises RequestFault for an answer of another session."""
        for line in self._lines:
            if answer_id in line.rewards:
                line.rewards[answer_id] = checked_reward(reward)
                self.counts["turn_rewards"] += 1
                return
        reason = f"no answer {answer_id} was given in this session: take the id from myxa.answers of an answer"
        raise RequestFault("not-found", reason, param="answer")

    async def close(self) -> None:
        """End the turns under way; none begins from now on."""
        self._is_closed = True
        for task in tuple(self._drawing):
            task.cancel()
        if self._drawing:
            await asyncio.wait(set(self._drawing))

    def remember(self, number: str, conversation: tuple[Message, ...]) -> None:
        """For requests that continue the answer of that id."""
        self.conversations[number] = conversation
        while len(self.conversations) > MAX_KEPT_CONVERSATIONS:
            del self.conversations[next(iter(self.conversations))]

    def samples(self, reward: float | None = None) -> tuple[Sample, ...]:
        """Of all lines that have a turn, that with the newest one last. `reward`: of the rollout, on the last one;
        None: the sum of what its turns earned, if that was said of any."""
        lines = sorted((line for line in self._lines if line.num_turns), key=lambda line: line.last)
        has_turns = bool(self.counts["turn_rewards"])
        samples = [
            line.episode.sample(turn_rewards=tuple(line.rewards.values()) if has_turns else None) for line in lines
        ]
        if any(sample.temperature == 0 < self._sampling.temperature for sample in samples):
            _warn_of_greedy_client()
        if samples:
            total = sum(sum(line.rewards.values()) for line in lines) if has_turns else None
            samples = [replace(sample, reward=None) for sample in samples]
            samples[-1] = replace(samples[-1], reward=total if reward is None else reward)
        return tuple(samples)


@lru_cache
def _warn_of_greedy_client() -> None:
    """Once."""
    reason = "a client asks for temperature 0: the rollouts of a group are alike then, and nothing is learnt of them"
    _log.warning("%s; have it say no temperature", reason)


def checked_reward(reward: float) -> float:
    """Raises RequestFault for one that no sample can have."""
    if not abs(reward) <= LARGEST:
        raise RequestFault("invalid", f"reward is {reward:g}: send a finite number that float32 holds", param="reward")
    return reward


ASKED = Message(role="user", content="?")
PROBE = "Myxa4c17a9Probe"
CALLED: dict[str, Any] = {
    "type": "function", "id": "abcdefghi", "function": {"name": "look", "arguments": {"at": PROBE}},
}  # fmt: skip
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": ""}}},
    },
}


@lru_cache(maxsize=8)
def _render_call(tokenizer: Tokenizer) -> tuple[str, bool]:
    """A conversation with a call, as the template writes it; and whether it takes arguments as a text alone, as that of
    DeepSeek does."""
    for called in (CALLED, as_text(CALLED)):
        turn = Message(role="assistant", content="", tool_calls=(called,))
        with contextlib.suppress(DataError, TemplateError):
            text = tokenizer.render_text((ASKED, turn), add_generation_prompt=False, tools=(TOOL,))
            return text, called is not CALLED
    return "", False


def as_text(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are JSON in a text."""
    function = call["function"]
    arguments: object = function["arguments"]
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {**call, "function": {**function, "arguments": text}}


def tool_form(tokenizer: Tokenizer) -> ToolForm | None:
    """None: the template writes calls in a form that is not read here. Hermes' where it writes none."""
    written, _ = _render_call(tokenizer)
    form = form_of(written)
    for end in tokenizer.eos_token_ids:
        written = written.rstrip().removesuffix(tokenizer.decode([end], skip_special=False))
    probe = {"at": PROBE}
    calls = read_turn(written, form).calls
    is_read = form == "llama" or PROBE not in written or probe in (call.arguments for call in calls)
    return form if is_read else None


def text_parameters(tools: Sequence[dict[str, Any]]) -> dict[tuple[str, str], bool]:
    """Functions and their parameters that are texts, by their schemas: whether they may be null instead."""
    nullable: dict[tuple[str, str], bool] = {}
    for tool in tools:
        function = _table(tool.get("function"))
        for key, schema in _table(_table(function.get("parameters")).get("properties")).items():
            types = _types(_table(schema))
            if types - {"null"} == {"string"}:
                nullable[str(function.get("name")), key] = "null" in types
    return nullable


def _types(schema: dict[str, Any]) -> set[str]:
    """Of JSON, that a schema names."""
    choices = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    types = [
        *_list(schema.get("type")),
        *(kind for choice in choices for kind in _list(_table(choice).get("type", "any"))),
    ]
    return set(map(str, types))


def _list(value: object) -> list[object]:
    """One value is a list of itself, none an empty one."""
    return cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]


def _table(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


@lru_cache(maxsize=8)
def writes_thoughts(tokenizer: Tokenizer, has_tools: bool) -> bool:
    """Whether the chat template takes messages with `reasoning_content`."""
    with contextlib.suppress(DataError, TemplateError):
        turn = Message(role="assistant", content=".", extra={"reasoning_content": "."})
        tokenizer.render_text((ASKED, turn), add_generation_prompt=False, tools=(TOOL,) if has_tools else ())
        return True
    return False


@lru_cache(maxsize=8)
def writes_later_systems(tokenizer: Tokenizer) -> bool:
    """Whether the chat template writes a system message where it stands, if that is not the first place."""
    system = Message(role="system", content=ANSWER)
    with contextlib.suppress(TemplateError):
        render = partial(tokenizer.render_text, add_generation_prompt=True)
        between(render, (system,), "", (system, QUESTION))
        return True
    return False


def _with_one_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Those behind the first one are joined to it, later ones are a user's."""
    head = list(itertools.takewhile(lambda message: message.role == "system", messages))
    joined = [replace(head[0], content="\n\n".join(message.content for message in head))] if head else []
    for message in messages[len(head) :]:
        is_later = message.role == "system"
        joined.append(
            replace(message, role="user", content=f"<system>{message.content}</system>") if is_later else message
        )
    return tuple(joined)


def _digest(before: bytes, message: object) -> bytes:
    return blake2b(before + msgspec.json.encode(message, order="sorted"), digest_size=16).digest()


def _thoughts_agree(thoughts: Sequence[str], recorded: Sequence[str]) -> bool:
    """Whether a client tells the thoughts that were; it may leave any out."""
    return all(not thought or thought == record for thought, record in zip(thoughts, recorded, strict=True))


def _with_thought_apart(message: Message) -> Message:
    """Some clients put the thought that they got beside the words before them."""
    turn = read_turn(message.content, None)
    extra = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
    return replace(message, content=turn.content, extra={**extra, **message.extra})


def _canonical(message: Message) -> object:
    """What a message says, however a client writes it: thoughts and the ids of calls may be left out."""
    if message.role != "assistant":
        return message.role, message.content, message.name, message.tool_call_id
    calls = [call.get("function", call) for call in message.tool_calls]
    return (
        message.role,
        message.content.strip(),
        [(function.get("name"), _decoder.decode(msgspec.json.encode(function.get("arguments")))) for function in calls],
    )


def _number(text: str) -> float:
    """As any language writes it: JavaScript has no 1.0."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


_decoder = msgspec.json.Decoder(object, float_hook=_number)


def task_of(prompt: Prompt) -> dict[str, Any]:
    """What an agent gets of its row."""
    return {
        "messages": [message.as_template_sees() for message in prompt.messages],
        "tools": list(prompt.tools),
        "label": prompt.label,
        "metadata": prompt.metadata,
    }
