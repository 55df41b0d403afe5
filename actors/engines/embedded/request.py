"""One request inside the engine, and the checks that keep nonsense out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....core.errors import RequestRefused
from ....core.messages import SamplingParams
from ....core.protocols import GenerateRequest
from ....core.samples import I32
from ....core.sampling import Decode, StopStrings, sampling_fault

MAX_NAME_CHARS = 1024


@dataclass(slots=True, eq=False)
class Scoring:
    """A sequence whose tokens from `first` on are to be scored."""

    request_id: str
    owner: object
    """Whom its events are for."""
    ids: I32
    """int32 [T]"""
    first: int


@dataclass(slots=True, eq=False)
class Running:
    """A request from its arrival to its end. `context` grows when its row is taken away (retract)."""

    request_id: str
    owner: object
    """Whom its events are for."""
    context: I32
    """int32 [P + tokens generated before the last retract]."""
    limit: int
    """The request ends when its context has that many tokens."""
    sampling: SamplingParams
    stop_ids: frozenset[int]
    """End it; none under `ignore_eos`."""
    end_ids: frozenset[int]
    """Kept away before the least length; as in SGLang, under `ignore_eos` too."""
    state: int
    """Random stream, see `sampler.stream_state`."""
    num_prompt: int
    """Tokens of `context` that it came with."""
    stops: StopStrings


def check_request(request: GenerateRequest, *, vocab_size: int, context_length: int, place: str) -> None:
    """Raise RequestRefused with the numbers and a remedy if the request cannot be served."""
    name = check_ids(request.request_id, request.input_ids, vocab_size=vocab_size, place=place)
    _check_sampling(request.sampling, name, vocab_size)
    size = request.input_ids.size
    longest = size + request.sampling.max_new_tokens
    if longest > context_length:
        raise RequestRefused(
            f"{name}: {size} prompt tokens and max_new_tokens {request.sampling.max_new_tokens} make {longest}, "
            f"the engine's context is {context_length}",
            remedy=f"shorten the prompt or lower max_new_tokens to {max(context_length - size, 0)}",
        )


def check_scoring(scoring: Scoring, *, vocab_size: int, context_length: int, place: str) -> None:
    """The same for tokens that are to be scored."""
    name = check_ids(scoring.request_id, scoring.ids, vocab_size=vocab_size, place=place)
    if not 0 < scoring.first <= scoring.ids.size:
        raise RequestRefused(
            f"{name}: its tokens are to be scored from number {scoring.first} of {scoring.ids.size} on",
            remedy="the first token has nothing in front: score from 1 on",
        )
    if scoring.ids.size > context_length:
        raise RequestRefused(
            f"{name}: {scoring.ids.size} tokens are to be scored, the engine's context is {context_length}",
            remedy="serve it with a longer context, or send fewer tokens",
        )


def check_ids(request_id: str, ids: I32, *, vocab_size: int, place: str) -> str:
    """Raise RequestRefused for what are no token ids of this model; returns the request's name for further messages."""
    name = f"{place}: request {request_id[:MAX_NAME_CHARS]!r}"
    if not 0 < len(request_id) <= MAX_NAME_CHARS:
        raise RequestRefused(
            f"{name}: its request_id has {len(request_id)} characters",
            remedy=f"give every request its own id of 1 to {MAX_NAME_CHARS} characters",
        )
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestRefused(f"{name}: input_ids are {ids.dtype}{list(ids.shape)}", remedy="pass one sequence of int32")
    if not ids.size:
        raise RequestRefused(f"{name}: the prompt is empty", remedy="send at least one token")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestRefused(
            f"{name}: token id {wrong} is outside the vocabulary [0, {vocab_size})",
            remedy="encode the prompt with the tokenizer of the engine's own model folder",
        )
    return name


def _check_sampling(sampling: SamplingParams, name: str, vocab_size: int) -> None:
    fault, remedy = sampling_fault(sampling)
    if fault:
        raise RequestRefused(f"{name}: {fault}", remedy=remedy)
    outside = [i for i in sampling.stop_token_ids if not 0 <= i < vocab_size]
    if outside:
        raise RequestRefused(
            f"{name}: stop token id {outside[0]} is outside the vocabulary [0, {vocab_size})",
            remedy="stop ids must come from the engine's own tokenizer",
        )


def make_running(
    request: GenerateRequest, owner: object, eos_token_ids: frozenset[int], state: int, decode: Decode
) -> Running:
    """The engine's view of a checked request."""
    sampling = request.sampling
    context = request.input_ids.astype(np.int32, copy=True)
    end_ids = eos_token_ids | frozenset(sampling.stop_token_ids)
    return Running(
        request_id=request.request_id,
        owner=owner,
        context=context,
        limit=len(context) + sampling.max_new_tokens,
        sampling=sampling,
        stop_ids=frozenset() if sampling.ignore_eos else end_ids,
        end_ids=end_ids,
        state=state,
        num_prompt=len(context),
        stops=StopStrings(sampling.stop, decode),
    )
