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
class Running:
    """A request from its arrival to its end; its events are for `owner`."""

    request_id: str
    owner: object
    sampling: SamplingParams
    context: I32
    """int32 [P + tokens generated before the last retract]."""
    num_prompt: int
    limit: int
    """The request ends when its context has that many tokens."""
    stop_ids: frozenset[int]
    """None under `ignore_eos`."""
    end_ids: frozenset[int]
    """Kept away before the least length; as in SGLang, under `ignore_eos` too."""
    state: int
    """Random stream, see `sampler.stream_state`."""
    stops: StopStrings


def make_running(
    request: GenerateRequest, owner: object, eos_token_ids: frozenset[int], state: int, decode: Decode
) -> Running:
    sampling, context = request.sampling, request.input_ids.astype(np.int32, copy=True)
    end_ids = eos_token_ids | frozenset(sampling.stop_token_ids)
    return Running(
        request_id=request.request_id,
        owner=owner,
        sampling=sampling,
        context=context,
        num_prompt=len(context),
        limit=len(context) + sampling.max_new_tokens,
        stop_ids=frozenset() if sampling.ignore_eos else end_ids,
        end_ids=end_ids,
        state=state,
        stops=StopStrings(sampling.stop, decode),
    )


def check_request(request: GenerateRequest, *, vocab_size: int, context_length: int, place: str) -> None:
    """Raise RequestRefused with the numbers and a remedy if the request cannot be served."""
    sampling, ids = request.sampling, request.input_ids
    name = f"{place}: request {request.request_id[:MAX_NAME_CHARS]!r}"
    if not 0 < len(request.request_id) <= MAX_NAME_CHARS:
        raise RequestRefused(
            f"{name}: its request_id has {len(request.request_id)} characters",
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
    fault, remedy = sampling_fault(sampling)
    if fault:
        raise RequestRefused(f"{name}: {fault}", remedy=remedy)
    outside = [i for i in sampling.stop_token_ids if not 0 <= i < vocab_size]
    if outside:
        raise RequestRefused(
            f"{name}: stop token id {outside[0]} is outside the vocabulary [0, {vocab_size})",
            remedy="stop ids must come from the engine's own tokenizer",
        )
    size = ids.size
    longest = size + sampling.max_new_tokens
    if longest > context_length:
        raise RequestRefused(
            f"{name}: {size} prompt tokens and max_new_tokens {sampling.max_new_tokens} make {longest}, the engine's "
            f"context is {context_length}",
            remedy=f"shorten the prompt or lower max_new_tokens to {max(context_length - size, 0)}",
        )
