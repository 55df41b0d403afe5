"""Checks of what engines and workflows return, before a token of it is used. Every piece of every stream:

    as many log-probs and stamps as tokens; token ids of the vocabulary; log-probs that are such
    no more tokens than were asked for; nothing after the end; the token that stopped it is the last one
    stamps of versions that this engine had to serve since the request was sent, in their order

The first piece that fails ends the stream with EngineLied; the tokens before it are sound. Order of versions counts,
not size: a trainer that went back makes numbers go down. Tokens that are missing or doubled with plausible numbers are
not seen here: the clients count tokens (`engines/sglang/wire.HeldTokens`), the guard compares log-probs with the
trainer's.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import cast

import msgspec
import orjson

from ..algos.rewards.outcome import Unusable, number_of
from ..core.errors import EngineError, EngineLied, UserCodeError
from ..core.protocols import Delta, GenerateRequest
from ..core.samples import ExpertChoices, LossPart, Prompt, Sample, check_sample, wrong_kept
from .user_code.functions import what_was_raised, words_of
from .workflows.episode import Generate, closed

MAX_LOGPROB = 1e-3
"""Rounding may put a certain token's a little above 0."""


class StreamChecks:
    """Of one engine. See the module's head."""

    def __init__(self, place: str, *, may_be_older: bool, on_lie: Callable[[EngineLied], None]) -> None:
        """`may_be_older`: behind a router. `on_lie` is called for each lie, before the stream ends with it."""
        self._place = place
        self.vocab_size = 1 << 31
        """Of the model; to be set once the engine reports it."""
        self._may_be_older = may_be_older
        self._on_lie = on_lie
        self._orders: list[int] = []
        self._num_served = 0
        """Of `_orders`: the last one may still be loading."""

    def loading(self, version: int) -> None:
        """The engine is ordered to serve `version`: its stamps may say so from now on."""
        self._orders.append(version)

    def loaded(self) -> None:
        """It serves the last order: requests that are sent from now on are answered by that version."""
        self._num_served = len(self._orders)

    def kept(self) -> None:
        """It did not load the last order, and keeps what it had."""
        del self._orders[self._num_served :]

    def watch(self, generate: Generate) -> Generate:
        """The same, with every stream looked at."""

        async def watched(request: GenerateRequest) -> AsyncGenerator[Delta, None]:
            stream = _Stream(request, 0 if self._may_be_older else max(self._num_served - 1, 0))
            deltas = generate(request)
            try:
                async for delta in deltas:
                    if wrong := stream.wrong(delta, self.vocab_size, self._orders):
                        raise self._lie(request, stream, wrong)
                    yield delta
            finally:
                await closed(deltas)

        return watched

    def _lie(self, request: GenerateRequest, stream: _Stream, wrong: str) -> EngineLied:
        lie = EngineLied(
            f"{self._place}: request {request.request_id!r}, after {stream.num_tokens} tokens: {wrong}",
            remedy="the engine is built again; if it lies again, compare its versions with the trainer's",
        )
        self._on_lie(lie)
        return lie


class _Stream:
    """One request's answer, as far as it has come."""

    def __init__(self, request: GenerateRequest, first: int) -> None:
        """`first`: place, among the versions ordered, of the one that served when the request was sent."""
        self._limit = request.sampling.max_new_tokens
        self._at = first
        self.num_tokens = 0
        self._is_over = False

    def wrong(self, delta: Delta, vocab_size: int, orders: list[int]) -> str:
        """What is wrong with the next piece; empty if nothing is."""
        if self._is_over:
            return "it continues after its end"
        self._is_over = delta.finish is not None
        problem = _wrong_shapes(delta) or _wrong_values(delta, vocab_size) or self._wrong_stamps(delta, orders)
        if problem:
            return problem
        if self.num_tokens + delta.output_ids.size > self._limit:
            return f"{self.num_tokens + delta.output_ids.size} tokens came, {self._limit} were asked for"
        is_stopped = delta.finish == "stop" and delta.matched is not None and delta.output_ids.size > 0
        if is_stopped and int(delta.output_ids[-1]) != delta.matched:
            return f"it says that token {delta.matched} stopped it, the last one is {int(delta.output_ids[-1])}"
        self.num_tokens += delta.output_ids.size
        return ""

    def _wrong_stamps(self, delta: Delta, orders: list[int]) -> str:
        previous = None
        for stamp in delta.versions.tolist():
            if stamp == previous:
                continue
            previous = stamp
            try:
                self._at = orders.index(stamp, self._at)
            except ValueError:
                since = orders[self._at :]
                return f"it is stamped with weight version {stamp}; its orders were {since or 'none'}, in that order"
        return ""


def _wrong_shapes(delta: Delta) -> str:
    num_tokens = delta.output_ids.shape
    if len(num_tokens) != 1:
        return f"its token ids have shape {list(num_tokens)}"
    for name in ("logprobs", "versions"):
        if getattr(delta, name).shape != num_tokens:
            return f"{getattr(delta, name).size} {name} came for {delta.output_ids.size} tokens"
    return ""


def _wrong_values(delta: Delta, vocab_size: int) -> str:
    ids: list[int] = delta.output_ids.tolist()  # a piece is short, where plain numbers are quicker than numpy
    logprobs: list[float] = delta.logprobs.tolist()
    if not ids:
        return ""
    if min(ids) < 0 or max(ids) >= vocab_size:
        outside = next(token for token in ids if not 0 <= token < vocab_size)
        return f"token id {outside} lies outside the vocabulary of {vocab_size}"
    if not math.isfinite(sum(logprobs)):
        return "a log-prob is NaN or infinite"
    if max(logprobs) > MAX_LOGPROB:
        return f"a log-prob is {max(logprobs):g}, above 0"
    return wrong_kept(delta.kept, delta.output_ids, vocab_size)


MAX_METADATA_BYTES = 64 << 10
"""Of a sample, as JSON: it travels to the reward function and is kept with the group."""


def checked_rollout(
    samples: Sequence[object],
    prompt: Prompt,
    index: int,
    *,
    temperatures: Mapping[int, float],
    vocab_size: int | None,
    loss_parts: Sequence[LossPart] = ("algo",),
    choices: ExpertChoices | None = None,
) -> tuple[Sample, ...]:
    """User code may return anything: only consistent samples of this very prompt pass, with the temperatures that their
    turns were drawn at, their rewards and metadata as plain values, and numbers of their own: one that was made of
    another one gets a new number. The last one says the reward of the rollout, if any does. Raises UserCodeError,
    EngineError. `choices`: samples must have the experts of their tokens."""
    checked: list[Sample] = []
    for value in samples:
        sample = _checked_sample(value, prompt, index, vocab_size=vocab_size)
        if sample.loss not in loss_parts:
            raise UserCodeError(
                f'workflow returned a sample with loss = "{sample.loss}", which this run does not have '
                f"(group {prompt.group_id}, sample {index})",
                remedy=f'use one of {", ".join(loss_parts)}; "distill" needs algo.kl_in = "advantage", "sft" no critic',
            )
        if wrong := choices.wrong_sample(sample) if choices is not None else "":
            raise EngineError(
                f"group {prompt.group_id}, sample {index}: {wrong}",
                remedy="a workflow must keep `experts` with the tokens; or set megatron.routing_replay = true",
            )
        temperature = temperatures.get(sample.branch, sample.temperature)
        if sample.temperature != temperature:
            sample = msgspec.structs.replace(sample, temperature=temperature)
        numbers = {other.branch for other in checked}
        if sample.branch in numbers:
            sample = msgspec.structs.replace(sample, branch=max(*numbers, *temperatures, 0) + 1)
        checked.append(sample)
    rewards = [sample.reward for sample in checked if sample.reward is not None]
    if rewards and checked[-1].reward is None:
        checked[-1] = msgspec.structs.replace(checked[-1], reward=rewards[-1])
    return tuple(checked)


def _checked_sample(sample: object, prompt: Prompt, index: int, *, vocab_size: int | None) -> Sample:
    place = f"(group {prompt.group_id}, sample {index})"
    if not isinstance(sample, Sample):
        raise UserCodeError(
            f"workflow returned a value of type {type(sample).__name__}, not a Sample {place}",
            remedy="end it with `return ctx.episode.sample()`",
        )
    if (sample.group_id, sample.index) != (prompt.group_id, index):
        raise UserCodeError(
            f"workflow returned sample {sample.group_id}/{sample.index} for {prompt.group_id}/{index}",
            remedy="return the sample of the episode it was given",
        )
    try:
        check_sample(sample, vocab_size)
    except ValueError as err:
        raise EngineError(str(err), remedy="the engine or workflow broke the per-token contract") from err
    except Exception as err:
        raise UserCodeError(
            f"workflow returned a sample that cannot be checked: {what_was_raised(err)} {place}",
            remedy="end it with `return ctx.episode.sample()`",
        ) from err
    return _with_plain_outcome(sample, place)


def _with_plain_outcome(sample: Sample, place: str) -> Sample:
    """Reward and metadata as they will be after a journey: a float, and what JSON makes of the rest."""
    if sample.reward is None and not sample.metadata:
        return sample
    reward = sample.reward
    try:
        reward = None if reward is None else number_of(reward)
    except Unusable as err:
        raise UserCodeError(
            f"workflow: reward of its sample: {words_of(err)} {place}",
            remedy="give episode.sample(reward=...) a finite number",
        ) from err
    return msgspec.structs.replace(sample, reward=reward, metadata=_plain(sample.metadata, place))


def _plain(metadata: object, place: str) -> dict[str, object]:
    cause: Exception | None = None
    try:
        written = orjson.dumps(metadata)
    except (TypeError, ValueError, RecursionError) as err:
        cause, why = err, f"cannot be written as JSON: {words_of(err)}"
    else:
        read = orjson.loads(written) if len(written) <= MAX_METADATA_BYTES else None
        if isinstance(read, dict):
            return cast("dict[str, object]", read)
        why = "is no dict" if len(written) <= MAX_METADATA_BYTES else f"has {len(written):,} bytes as JSON"
    remedy = f"give episode.sample(metadata=...) a dict of JSON values, of at most {MAX_METADATA_BYTES:,} bytes in all"
    raise UserCodeError(f"workflow: the metadata of its sample {why} {place}", remedy=remedy) from cause
