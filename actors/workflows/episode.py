"""A rollout in the making: token in, token out, turn by turn.

An `Episode` owns the token stream of a sample. `branch` and `session` open further streams of the same rollout. Model
turns come from the engine with their log-probs and version stamps; replies are rendered by the chat template and carry
loss mask 0. Text is decoded for the workflow to look at and never encoded back.

Continuation: an episode may start with the tokens of an interrupted attempt. The workflow runs from its beginning, and
recorded turns are replayed without the engine as long as it repeats its steps; the first unfinished turn continues from
its last token (with seeded sampling: is generated again, with the same tokens). A reply that differs from the recorded
one ends the replay.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from msgspec.structs import replace

from ...algos.rewards.outcome import Unusable, number_of
from ...core.errors import EngineError, PromptTooLong, UserCodeError
from ...core.messages import SamplingParams
from ...core.protocols import Delta, GenerateRequest, Tokenizer
from ...core.samples import (
    F32,
    I32,
    NO_VERSION,
    FinishReason,
    LossPart,
    Message,
    Prompt,
    Sample,
    joined_experts,
    joined_kept,
)
from ...core.sampling import StopStrings, sampling_fault
from ...core.suggestion import suggest
from ..models.tokenizer import load_tokenizer
from .demonstrated import demonstrate
from .timeline import WaitKind, WaitNote, closed, waiting
from .turn_renderer import TurnRenderer


def unstamped(ids: Sequence[int] | I32, *, is_model: bool) -> Delta:
    """Tokens that no engine generated."""
    array = np.asarray(ids, dtype=np.int32)
    logprobs, versions = np.zeros(len(array), np.float32), np.full(len(array), NO_VERSION, np.int32)
    return Delta(output_ids=array, logprobs=logprobs, versions=versions, is_model=is_model)


NOTHING = unstamped((), is_model=True)


def split(sample: Sample) -> list[Delta]:
    """Cut a recorded sample into runs of equal loss mask. Experts of a reply are with the turn behind it, as they came:
    if the reply is another one now, both are left out."""
    mask, kept_rows, expert_rows = sample.loss_mask, sample.kept_rows, sample.experts
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    runs: list[Delta] = []
    num_routed = 0
    for a, b in pairwise(cuts):
        experts = None
        if b > a and mask[a] and expert_rows is not None:
            end = len(sample.prompt_ids) + b - 1
            experts, num_routed = expert_rows[num_routed:end], max(num_routed, min(end, len(expert_rows)))
        if b > a:
            run = Delta(
                output_ids=sample.response_ids[a:b],
                logprobs=sample.logprobs[a:b],
                versions=sample.versions[a:b],
                is_model=bool(mask[a]),
                kept=None if kept_rows is None else kept_rows[a:b],
                experts=experts,
            )
            runs.append(run)
    return runs


def joined(parts: Sequence[Delta]) -> Delta:
    """One run of tokens from its parts; of the model's, where there are none."""
    parts = [part for part in parts if part.output_ids.size]
    if not parts:
        return NOTHING
    ids, logprobs, versions = (parts[0].output_ids, parts[0].logprobs, parts[0].versions)
    if len(parts) > 1:
        ids = np.concatenate([part.output_ids for part in parts])
        logprobs = np.concatenate([part.logprobs for part in parts])
        versions = np.concatenate([part.versions for part in parts])
    return Delta(
        output_ids=ids.astype(np.int32, copy=False),
        logprobs=logprobs.astype(np.float32, copy=False),
        versions=versions.astype(np.int32, copy=False),
        kept=joined_kept([(part.kept, len(part.output_ids)) for part in parts]),
        experts=joined_experts([part.experts for part in parts]),
    )


SEED_BITS = 63
"""Servers keep seeds as signed 64-bit numbers."""
MAX_IDLE_ABORTS, ABORT_PAUSE_S = 20, 0.05
"""Aborts without a token between, and how much longer the pause is after each."""


def turn_seed(seed: int, draw: int, member: str, turn: int) -> int:
    digest = blake2b(f"{seed}/{draw}/{member}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


Generate = Callable[[GenerateRequest], AsyncIterator[Delta]]
Draw = Callable[[Sample, GenerateRequest, Delta, SamplingParams], Awaitable[tuple[Delta, FinishReason]]]
"""From what an episode has, what it asks for and the turn so far to the whole turn."""


class AskOther(Protocol):
    """As `Draw`, of a model of the run's own."""

    def __call__(
        self, so_far: Sample, request: GenerateRequest, start: Delta, params: SamplingParams, model: str
    ) -> Awaitable[tuple[Delta, FinishReason]]: ...


class Interrupted(Exception):
    """Generation was aborted on purpose (drain, pause); `partial` holds the samples of the rollout so far."""

    def __init__(self, partial: tuple[Sample, ...]) -> None:
        super().__init__(f"sample {partial[0].group_id}/{partial[0].index} was interrupted")
        self.partial = partial


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model turn."""

    text: str
    """Without special tokens."""
    token_ids: tuple[int, ...]
    finish: FinishReason


class ModelAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How an episode reaches the model."""

    generate: Generate
    sampling: SamplingParams
    context_length: int
    request_prefix: str = ""
    """Makes request ids unique over actors and attempts."""
    goes_on: Callable[[], bool] = lambda: False
    """Asked when the engine aborts a turn: True continues it at once with the tokens it has (weights were swapped with
    pause mode "abort"), False ends the episode with Interrupted (the actor drains)."""
    on_wait: Callable[[WaitNote], None] = lambda note: None
    """Told what the workflow waits for beside the model."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the run's own."""

    model_path: str
    chat_template_kwargs: dict[str, Any]
    date: str
    sampling: SamplingParams
    """Where a request says nothing."""
    context_length: int
    apply_chat_template: bool = True


@dataclass(frozen=True, slots=True)
class ReachedModel:
    """A model of the run's own, as a process reaches it."""

    spec: ModelSpec
    tokenizer: Tokenizer
    renderer: TurnRenderer
    access: ModelAccess

    @classmethod
    def of(cls, spec: ModelSpec, generate: Generate) -> ReachedModel:
        """Raises ModelError for a tokenizer that cannot be loaded."""
        tokenizer = load_tokenizer(spec.model_path, spec)
        access = ModelAccess(
            generate=generate, sampling=spec.sampling, context_length=spec.context_length, goes_on=lambda: True
        )
        return cls(spec, tokenizer, TurnRenderer(tokenizer), access)


def stops_of(texts: Sequence[str], tokenizer: Tokenizer) -> StopStrings:
    """The texts that end a turn."""
    return StopStrings(texts, lambda ids: tokenizer.decode(ids, skip_special=False))


async def draw_turn(
    generate: Generate,
    request: GenerateRequest,
    stops: StopStrings,
    under_way: list[Delta],
    on_tokens: Callable[[], None] | None = None,
) -> tuple[Delta, FinishReason]:
    """Stream one turn: its tokens, up to the end of a stop string, and why they end. `under_way`: what the turn has;
    grows. `on_tokens`: called each time. Raises EngineError for a stream that breaks off."""
    finish: FinishReason | None = None
    ids: list[int] = joined(under_way).output_ids.tolist() if stops else []
    stream = generate(request)
    try:
        async for delta in stream:
            under_way.append(delta)
            finish = delta.finish
            if on_tokens is not None:
                on_tokens()
            if stops:
                num_seen = len(ids)
                ids += delta.output_ids.tolist()
                if match := stops.match(ids, num_seen):
                    return joined(under_way).first(match.end), "stop"
    finally:
        await closed(stream)
    if finish is None:
        raise EngineError(
            f"the engine ended request {request.request_id} without saying why",
            remedy="restart the engine; its stream broke off",
        )
    return joined(under_way), finish


class Episode:
    """The token stream of one sample. See the module's head."""

    def __init__(
        self,
        *,
        prompt: Prompt,
        index: int,
        tokenizer: Tokenizer,
        model: ModelAccess,
        renderer: TurnRenderer | None = None,
        prompt_ids: I32 | None = None,
        recorded: Sequence[Sample] = (),
        parent: Episode | None = None,
        draw: Draw | None = None,
    ) -> None:
        """`renderer`, `prompt_ids`: for callers that make several episodes with one tokenizer, or of one prompt.
        `recorded`: of the whole rollout. `parent`: an episode of the rollout that this one belongs to. `draw`: in place
        of the engine's stream."""
        self._first = None if parent is None else parent._first or parent
        self._others: list[Episode] = []
        """All of its rollout, in the first one; an episode alone is in no cycle and goes with its last user."""
        self._branch = 0 if self._first is None else 1 + len(self._first._others)
        self._prompt = prompt
        self._index = index
        self._tokenizer = tokenizer
        self._model = model
        self._renderer = renderer or TurnRenderer(tokenizer)
        self._prompt_ids = self._renderer.prompt(prompt) if prompt_ids is None else prompt_ids
        context_length = model.context_length
        if len(self._prompt_ids) >= context_length:
            raise PromptTooLong(
                f"{'prompt' if parent is None else 'a conversation of the rollout'} of row {prompt.row} in "
                f"{prompt.source or 'the data'} has {len(self._prompt_ids)} tokens, "
                f"the engine's context is {context_length}",
                remedy="shorten or filter the row, or raise engine.context_length",
            )
        self._segments: list[Delta] = []
        self._under_way: list[Delta] = []
        self._turns: list[str] = []
        self._replies: list[tuple[Message, ...]] = []
        self._before = NOTHING
        """What the last token of the prompt belongs to, if this is a branch."""
        self._finish: FinishReason = "abort"
        self._draws = draw
        self._temperature: float | None = None
        self._recorded = {sample.branch: sample for sample in recorded} if parent is None else parent._recorded
        mine = self._recorded.get(self._branch)
        self._recorded_at = 1.0 if mine is None else mine.temperature
        self._replay: list[Delta] = []
        if mine is not None and np.array_equal(mine.prompt_ids, self._prompt_ids):
            self._replay = split(mine)
        self._is_drawing = False
        self.on_tokens: Callable[[], None] | None = None
        """Called each time that the turn under way has grown, if it comes from the engine."""
        if self._first is not None:
            self._first._others.append(self)

    @property
    def _rollout(self) -> list[Episode]:
        first = self._first or self
        return [first, *first._others]

    def __copy__(self) -> Episode:
        raise UserCodeError(
            "workflow: ctx.episode was copied: both would write into one stream of tokens",
            remedy="one episode is one stream of tokens; episode.branch() begins another one with the tokens so far",
        )

    def __deepcopy__(self, memo: object) -> Episode:
        return self.__copy__()

    def branch(self, num_turns: int | None = None) -> Episode:
        """A further sample of this rollout, which continues from here, or from the end of this episode's turn number
        `num_turns` (1: its first). The tokens up to there are its prompt: they are learnt once, in this episode."""
        segments = self._segments_to(num_turns)
        branch = self._open_episode(self._prompt, self._ids(segments))
        branch._before = (segments or [self._before])[-1]
        branch._finish = self._finish if len(segments) == len(self._segments) else "stop"
        left_out = [segment.is_model for segment in self._segments[len(segments) :]]
        branch._turns = self._turns[: len(self._turns) - left_out.count(True)]
        branch._replies = self._replies[: len(self._replies) - left_out.count(False)]
        return branch

    def _segments_to(self, num_turns: int | None) -> list[Delta]:
        ends = [end for end, segment in enumerate(self._segments, 1) if segment.is_model]
        if num_turns is not None and not 1 <= num_turns <= len(ends):
            raise self._misuse(f"has {len(ends)} turns, not {num_turns}", "count them from 1")
        return self._segments if num_turns is None else self._segments[: ends[num_turns - 1]]

    def _misuse(self, fault: str, remedy: str) -> UserCodeError:
        return UserCodeError(f"workflow: the episode of row {self._prompt.row} {fault}", remedy=remedy)

    def _check_texts(self, messages: Sequence[object]) -> None:
        for message in messages:
            content: object = getattr(message, "content", None)
            if not isinstance(message, Message) or not isinstance(content, str):
                subject = "a message whose content" if isinstance(message, Message) else "a message that"
                kind = type(content if isinstance(message, Message) else message).__name__
                raise self._misuse(f"got {subject} is of type {kind}", "give a Message whose content is a text")

    def session(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Episode:
        """A further sample of this rollout, of a conversation of its own: that of a sub-agent, or the history in short.
        Raises PromptTooLong, DataError as rows of the data do, UserCodeError for what is no message."""
        self._check_texts(messages)
        prompt = replace(self._prompt, messages=tuple(messages), tools=tuple(dict(tool) for tool in tools))
        return self._open_episode(prompt, self._renderer.prompt(prompt))

    def text(self, text: str | Sequence[int]) -> Episode:
        """A further sample of this rollout whose prompt is this text, or its token ids, alone. Raises as `session`."""
        ids = self._tokenizer.encode(text) if isinstance(text, str) else text
        if any(not 0 <= token < self._tokenizer.vocab_size for token in ids):
            raise self._misuse("got an id of no token", f"give ids from 0 to {self._tokenizer.vocab_size - 1}")
        return self._open_episode(replace(self._prompt, messages=(), tools=()), np.asarray(ids, np.int32))

    def _open_episode(self, prompt: Prompt, prompt_ids: I32) -> Episode:
        return Episode(
            prompt=prompt,
            index=self._index,
            tokenizer=self._tokenizer,
            model=self._model,
            renderer=self._renderer,
            prompt_ids=prompt_ids,
            parent=self,
            draw=self._draws,
        )

    @property
    def prompt(self) -> Prompt:
        return self._prompt

    @property
    def index(self) -> int:
        """Member number inside the group."""
        return self._index

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answers may have together."""
        return self._model.context_length

    @property
    def under_way(self) -> Sequence[Delta]:
        """The turn that comes, so far. Grows; asked for again it is another list."""
        return self._under_way

    @property
    def last_turn(self) -> Delta:
        """The tokens of the last turn of the model, with log-probs and versions."""
        return next((segment for segment in reversed(self._segments) if segment.is_model), NOTHING)

    @property
    def sampling(self) -> SamplingParams:
        """How turns are drawn that do not say otherwise."""
        return self._model.sampling

    @property
    def temperature(self) -> float | None:
        """That its turns are drawn at; None: it has none yet."""
        return self._temperature

    @property
    def token_ids(self) -> list[int]:
        return self._ids(self._segments).tolist()

    def _ids(self, segments: Sequence[Delta]) -> I32:
        """Of the prompt and these; those of the only part that has any are not copied."""
        parts = [self._prompt_ids, *(segment.output_ids for segment in segments)]
        filled = [part for part in parts if part.size]
        return filled[0] if len(filled) == 1 else np.concatenate(parts).astype(np.int32, copy=False)

    @property
    def num_tokens(self) -> int:
        return self._model.context_length - self.room

    @property
    def temperatures(self) -> dict[int, float]:
        """That the turns were drawn at; by the numbers of the rollout's samples."""
        return {episode._branch: episode._temperature for episode in self._rollout if episode._temperature is not None}

    @property
    def room(self) -> int:
        return self._model.context_length - len(self._ids(self._segments))

    async def generate(self, sampling: SamplingParams | None = None) -> Turn:
        """The model's next turn. Raises Interrupted when the engine had to abort, EngineError when it fails,
        UserCodeError when `sampling` has another temperature than the turns before, and while a turn is drawn."""
        if self._is_drawing:
            reason = "is asked for a turn while one is drawn"
            raise self._misuse(reason, "await one after the other; episode.branch() is a stream of its own")
        self._is_drawing = True
        try:
            return await self._generate(sampling or self._model.sampling)
        finally:
            self._is_drawing = False

    async def _generate(self, params: SamplingParams) -> Turn:
        if params is not self._model.sampling and (wrong := sampling_fault(params)):
            place = f"workflow: a turn of row {self._prompt.row} is asked for"
            raise UserCodeError(f"{place}, {wrong.field} {wrong.fault}", remedy=wrong.remedy)
        self._keep_to(params.temperature)
        done = self._next_recorded(is_model=True)
        if done is not None and (end := self._stopped_at(done, params)):
            return self._close_turn(done.first(end), "stop")
        start = NOTHING if done is None else done
        limit = min(params.max_new_tokens - len(start.output_ids), self.room - len(start.output_ids))
        if limit <= 0:
            return self._close_turn(start, "length")
        is_seeded = self._model.sampling.seed is not None
        if is_seeded:
            start, limit = NOTHING, limit + len(start.output_ids)
        segment, num_idle = start, 0
        while (remaining := limit + len(start.output_ids) - len(segment.output_ids)) > 0:
            before = start if is_seeded else segment
            segment, finish = await self._ask(before, params, limit if is_seeded else remaining)
            if finish != "abort":
                return self._close_turn(segment, finish)
            if not self._model.goes_on():
                self._segments.append(segment)
                self._finish, self._replay = "abort", []
                raise Interrupted(self.so_far())
            num_idle = num_idle + 1 if len(segment.output_ids) == len(before.output_ids) else 0
            if num_idle == MAX_IDLE_ABORTS:
                cause = f"the engine aborted a turn of row {self._prompt.row} {num_idle} times without a token between"
                raise EngineError(cause, remedy="see its log: does a policy of the server, or another client, abort?")
            await asyncio.sleep(max(num_idle - 1, 0) * ABORT_PAUSE_S)  # the first may be of a swap of weights
        return self._close_turn(segment, "length")

    def waits_for(self, kind: WaitKind, name: str = "") -> AbstractContextManager[None]:
        """Inside `with episode.waits_for("tool", "search"):` the rollout waits for that, as the trace, `myxa why` and
        metrics show. Kinds: "environment", "tool", "agent", "judge"; UserCodeError for another one. May be used by any
        thread, and in coroutines."""
        return waiting(self._model.on_wait, kind, name, self._branch)

    def _keep_to(self, temperature: float) -> None:
        """One sample has one temperature, since it is scored with it; tokens recorded at another one are not used."""
        if self._temperature is None:
            self._temperature = temperature
            if self._recorded_at != temperature:
                self._replay = []
        elif self._temperature != temperature:
            reason = f"is asked for a turn at temperature {temperature:g}, those before had {self._temperature:g}"
            raise self._misuse(reason, "draw all turns of a sample at one temperature")

    async def _ask(self, start: Delta, params: SamplingParams, limit: int) -> tuple[Delta, FinishReason]:
        """Stream one turn from the engine, going on from `start`."""
        request = GenerateRequest(
            request_id=f"{self._model.request_prefix}{self._prompt.group_id}.{self._member}.{len(self._turns)}",
            input_ids=self._ids([*self._segments, start]),
            sampling=replace(params.for_rest(num_done=len(start.output_ids), limit=limit), seed=self._seed(params)),
            source=self._prompt.source,
            row=self._prompt.row,
            index=self._index,
            branch=self._branch,
            turn=len(self._turns) + 1,
            num_routed=sum(len(segment.experts) for segment in (*self._segments, start) if segment.experts is not None),
        )
        turn, finish = await self._draw(request, start, params)
        if finish == "length" and self._stopped_at(turn, params):  # SGLang reports the limit where both are met
            finish = "stop"
        return turn, finish

    async def _draw(self, request: GenerateRequest, start: Delta, params: SamplingParams) -> tuple[Delta, FinishReason]:
        if self._draws is not None:
            return await self._draws(self.sample(), request, start, params)
        self._under_way = [start]
        turn, finish = await draw_turn(
            self._model.generate, request, self._stops(params), self._under_way, self.on_tokens
        )
        self._under_way = []
        return turn, finish

    @property
    def _member(self) -> str:
        return f"{self._index}b{self._branch}" if self._branch else f"{self._index}"

    def _seed(self, params: SamplingParams) -> int | None:
        """Of the turn that comes: the workflow's own, else made of the run's, if that draws by seeds."""
        run = self._model.sampling.seed
        if run is None or params.seed not in (None, run):
            return params.seed
        number = self._prompt.group_id if self._prompt.draw < 0 else self._prompt.draw
        return turn_seed(run, number, self._member, len(self._turns))

    def _stopped_at(self, done: Delta, params: SamplingParams) -> int:
        """Tokens after which a recorded turn is over; 0: it continues."""
        ids: list[int] = done.output_ids.tolist()
        if match := self._stops(params).match(ids):
            return match.end
        ends = frozenset(() if params.ignore_eos else (*self._tokenizer.eos_token_ids, *params.stop_token_ids))
        return len(ids) if ids and ids[-1] in ends else 0

    def _stops(self, params: SamplingParams) -> StopStrings:
        return stops_of(params.stop, self._tokenizer)

    def _next_recorded(self, *, is_model: bool) -> Delta | None:
        if not self._replay or self._replay[0].is_model is not is_model:
            self._replay = []
            return None
        return self._replay.pop(0)

    def _close_turn(self, segment: Delta, finish: FinishReason) -> Turn:
        self._segments.append(segment)
        self._finish = finish
        ids: list[int] = segment.output_ids.tolist()
        text = self._tokenizer.decode(ids)
        self._turns.append(text)
        return Turn(text=text, token_ids=tuple(ids), finish=finish)

    def reply(self, role: str, content: str, *, name: str = "", tool_call_id: str = "") -> bool:
        """Append a message that the model did not write (mask 0) and open the next model turn. Returns False, and ends
        the episode as "length", if it does not fit into the context. Raises UserCodeError without a model turn before
        it, TemplateError for a role that the chat template cannot append."""
        return self.reply_with(Message(role=role, content=content, name=name, tool_call_id=tool_call_id))

    def reply_with(self, *messages: Message) -> bool:
        """The same with several messages, such as the answers of all tools that the model called at once."""
        ids = self.reply_ids(messages)
        if ids is None:
            self._finish = "length"
            return False
        self.append_reply(messages, ids)
        return True

    def reply_ids(self, messages: Sequence[Message], num_turns: int | None = None) -> I32 | None:
        """Token ids int32 of these messages as a reply after this episode's turn number `num_turns`, the last one
        where it is None; None: they do not fit into the context. Raises as `reply`."""
        segments = self._segments_to(num_turns)
        before = segments[-1] if segments else self._before
        self._check_texts(messages)
        if not messages or before is NOTHING or not before.is_model:
            remedy = "call `await episode.generate()` first, and reply with all messages at once"
            raise self._misuse("got a reply without a model turn before it", remedy)
        ended_by = int(before.output_ids[-1]) if before.output_ids.size else None
        ids = self._renderer.reply(messages, ended_by=ended_by, tools=self._prompt.tools)
        num_before = len(self._prompt_ids) + sum(len(segment.output_ids) for segment in segments)
        return ids if num_before + len(ids) < self._model.context_length else None

    def append_reply(self, messages: Sequence[Message], ids: I32) -> None:
        """Append messages of which `reply_ids` told the ids, for this place."""
        recorded = self._next_recorded(is_model=False)
        if recorded is not None and not np.array_equal(recorded.output_ids, ids):
            self._replay = []
        self._segments.append(unstamped(ids, is_model=False))
        self._replies.append(tuple(messages))

    def sample(
        self,
        *,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        turn_rewards: Sequence[float] | None = None,
        loss: LossPart = "algo",
        loss_weight: float = 1.0,
    ) -> Sample:
        """The record of everything so far. `reward`: what the rollout is worth, for `reward.fn = "workflow"`, and for
        functions to look at; `turn_rewards`: what part of it each turn earned (without `reward`, the whole is their
        sum); `metadata`: what else a reward function should know, JSON values; `loss`, `loss_weight`: how it is learnt.
        Raises UserCodeError for `turn_rewards` of another number than the turns."""
        sample = self._sample(self._segments, self._finish)
        if turn_rewards is not None:
            try:
                turn_rewards = [number_of(value) for value in turn_rewards]
            except (Unusable, TypeError) as error:
                raise self._misuse(f"got turn_rewards {turn_rewards!r:.200}: {error}", "give finite numbers") from error
            if reward is None:
                reward = float(sum(turn_rewards))
        rewards = None if turn_rewards is None else self._token_rewards(turn_rewards, len(sample.response_ids))
        weights = None if loss_weight == 1.0 else np.full(len(sample.response_ids), loss_weight, np.float32)
        return replace(
            sample, reward=reward, token_rewards=rewards, loss=loss, loss_weights=weights, metadata=dict(metadata or {})
        )

    def _token_rewards(self, turn_rewards: Sequence[float], size: int) -> F32 | None:
        sizes = accumulate(len(segment.output_ids) for segment in self._segments)
        ends = [end for end, segment in zip(sizes, self._segments, strict=True) if segment.is_model]
        if len(turn_rewards) != len(ends):
            reason = f"has {len(ends)} turns and got {len(turn_rewards)} turn_rewards"
            raise self._misuse(reason, "give episode.sample(turn_rewards=...) one number for each of its turns")
        rewards = np.zeros(size, np.float32)
        for end, reward in zip(ends, turn_rewards, strict=True):
            rewards[max(end - 1, 0) :][:1] += reward
        return rewards

    def so_far(self) -> tuple[Sample, ...]:
        """The rollout: the record of everything so far, the tokens of turns under way included, and those that an
        earlier attempt recorded and this one has not come to yet. May be asked for at any moment."""
        unreached = (sample for branch, sample in self._recorded.items() if branch >= len(self._rollout))
        return (*(episode._so_far() for episode in self._rollout), *unreached)

    def _so_far(self) -> Sample:
        coming = [joined(self._under_way)] if self._under_way else self._replay
        return self._sample([*self._segments, *coming], "abort" if coming else self._finish)

    def _sample(self, segments: Sequence[Delta], finish: FinishReason) -> Sample:
        response, is_groups = joined(segments), self._prompt is self._rollout[0]._prompt
        mask = [np.full(len(segment.output_ids), segment.is_model, np.uint8) for segment in segments]
        return Sample(
            group_id=self._prompt.group_id,
            index=self._index,
            branch=self._branch,
            prompt_ids=self._prompt_ids,
            response_ids=response.output_ids,
            logprobs=response.logprobs,
            loss_mask=np.concatenate(mask) if mask else np.zeros(0, np.uint8),
            versions=response.versions,
            kept=None if response.kept is None else response.kept.ravel(),
            experts=response.experts,
            finish=finish,
            num_turns=len(self._turns),
            text=self._turns[-1] if self._turns else "",
            turns=tuple(self._turns),
            replies=tuple(self._replies),
            messages=() if is_groups else self._prompt.messages,
            tools=() if is_groups else self._prompt.tools,
            temperature=self._recorded_at if self._temperature is None else self._temperature,
        )

    def demonstration(self, turns: Sequence[Message], *, loss_weight: float = 1.0, is_whole: bool = False) -> Sample:
        """A sample of given turns, with the ids that the template writes of the whole: assistant's turns get loss mask
        1, all else 0. Learnt as in supervised fine-tuning. `is_whole`: with what the template writes behind the last
        turn. Raises PromptTooLong, DataError, TemplateError."""
        prompt = self._prompt
        shown = demonstrate(self._tokenizer, self._renderer, prompt.messages, turns, prompt.tools, is_whole=is_whole)
        if self._model.context_length < len(shown.ids):
            raise PromptTooLong(
                f"demonstration of row {self._prompt.row} has {len(shown.ids)} tokens with its prompt, "
                f"the context is {self._model.context_length}",
                remedy="shorten the row or raise engine.context_length",
            )
        self._prompt_ids = np.asarray(shown.ids[: shown.num_prompt], np.int32)
        response_ids, mask = shown.ids[shown.num_prompt :], shown.mask[shown.num_prompt :]
        cuts = [0, *(place for place in range(1, len(mask)) if mask[place] != mask[place - 1]), len(mask)]
        self._segments = [unstamped(response_ids[a:b], is_model=bool(mask[a])) for a, b in pairwise(cuts) if b > a]
        starts = [start for start, turn in enumerate(turns) if turn.role == "assistant"]
        self._turns = [turns[start].content for start in starts]
        self._replies = [tuple(turns[a + 1 : b]) for a, b in zip(starts, (*starts[1:], len(turns)), strict=True)]
        self._finish = "stop"
        return self.sample(loss="sft", loss_weight=loss_weight)


class Clients(Protocol):
    """SDKs' clients of one rollout, and what they recorded."""

    def openai(self, *, is_async: bool) -> Any: ...

    def anthropic(self, *, is_async: bool) -> Any: ...

    @property
    def session(self) -> Any:
        """Their `AgentSession`."""
        ...

    def samples(self, reward: float | None = None) -> tuple[Sample, ...]: ...

    async def close(self) -> None: ...


class ModelOfRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the run's own, in one rollout. What it says is not learnt: to the policy it is what others say."""

    root: Episode
    """Of no conversation."""
    clients: Clients
    is_plain: bool = False

    def session(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Episode:
        """A conversation with it, by tokens. Raises as `Episode.session`."""
        return self.root.session(messages, tools)

    def generate(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> Awaitable[Turn]:
        """Its turn after these messages; in a plain `def` the turn itself."""
        return self.session(messages).generate(sampling)

    @property
    def openai(self) -> Any:
        return self.clients.openai(is_async=not self.is_plain)

    @property
    def anthropic(self) -> Any:
        return self.clients.anthropic(is_async=not self.is_plain)


class ModelsOfRollout(dict[str, ModelOfRollout]):
    """By the names of `[models.NAME]`."""

    def __missing__(self, name: str) -> ModelOfRollout:
        raise UserCodeError(
            f'workflow: ctx.models["{name}"]: this run has no such model', remedy=f"{suggest(name, self)}; see [models]"
        )


class WorkflowContext(msgspec.Struct, frozen=True, kw_only=True):
    """Handed to a workflow for one rollout."""

    episode: Episode
    tokenizer: Tokenizer
    max_turns: int
    """`rollout.max_turns` of the run file."""
    index: int
    """Member number inside the group."""
    session_id: str = ""
    """Of this member of this group in this run: the same in every attempt, in whatever process it is made."""
    attempt: int = 0
    """How often this member was begun before, as far as the run knows: its actor died, or its environment failed."""

    run_s: float = math.inf
    """Seconds for all turns."""
    models: ModelsOfRollout = msgspec.field(default_factory=ModelsOfRollout)
    """The models of the run's own."""
    clients: Clients | None = None
    is_plain: bool = False
    """It is handed to a plain `def`: clients are those that wait."""

    @property
    def is_replay(self) -> bool:
        """Whether an earlier attempt may have had side effects already."""
        return self.attempt > 0

    @property
    def facts(self) -> dict[str, Any]:
        """Of its session, for environments and agents."""
        return {"session_id": self.session_id, "attempt": self.attempt, "is_replay": self.is_replay}

    @property
    def openai(self) -> Any:
        """A client of the `openai` package that talks to the policy, without a network: `AsyncOpenAI`, or `OpenAI` for
        a plain `def`. What is asked of it is recorded; `samples` gives it. Raises UserCodeError without the package."""
        return self._clients.openai(is_async=not self.is_plain)

    @property
    def anthropic(self) -> Any:
        """The same of the `anthropic` package."""
        return self._clients.anthropic(is_async=not self.is_plain)

    def samples(self, reward: float | None = None) -> tuple[Sample, ...]:
        """What a workflow returns that used `openai` or `anthropic`: a sample of each line of turns. `reward`: of the
        rollout. Raises UserCodeError before the first turn."""
        return self._clients.samples(reward)

    @property
    def _clients(self) -> Clients:
        if self.clients is None:
            raise UserCodeError("workflow: this context has no clients", remedy="use ctx.episode")
        return self.clients


Workflow = Callable[[WorkflowContext, Prompt], Awaitable[Sample | Sequence[Sample]]]
"""A workflow turns a prompt into the finished sample of a rollout, or into several, usually by `ctx.episode`."""


@runtime_checkable
class Lasting(Protocol):
    """Of a workflow that has something running as long as its actor."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class Resizable(Protocol):
    """Of a workflow, or the processes that run it, whose number may change."""

    def resize(self, num: int) -> None: ...
