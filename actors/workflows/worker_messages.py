"""What a rollout actor and a process that runs its workflows say to each other, in the frames of
`actors/user_code/process.py`: token ids in, token ids out, one question and one answer a turn.

    actor                                       worker
    StartEpisode(prompt, limits, ...)     ->    the workflow begins
                                          <-    AskModel(request, so_far): the model's next turn
    DrawnTurn(tokens, finish)             ->
                                          <-    WaitNote(kind, name): the workflow waits for that, or no longer
                                          <-    EpisodeDone(sample) | EpisodeFailed(kind, words)
    Cancel(call)                          ->    ends it; its teardown runs, then EpisodeFailed
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ...core.errors import FailureKind
from ...core.messages import SamplingParams
from ...core.protocols import Delta, GenerateRequest
from ...core.samples import I32, FinishReason, Prompt, Sample
from ..models.tokenizer import TokenizerParts
from ..user_code.process import Cancel, Ended, Stuck, Waits, array_in
from .episode import ModelSpec
from .timeline import WaitNote


class PhaseLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    setup_s: float = 120.0
    run_s: float = 600.0
    finalize_s: float = 60.0
    score_s: float = 60.0
    teardown_s: float = 30.0
    step_s: float = math.inf
    """Of the phase `run`, between two turns of the model."""

    @property
    def total_s(self) -> float:
        return self.setup_s + self.run_s + self.finalize_s + self.score_s + self.teardown_s


class WorkflowSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First frame to a worker."""

    workflow: str
    args: dict[str, Any]
    max_turns: int
    max_block_s: float
    tokenizer: TokenizerParts
    models: dict[str, ModelSpec] = {}


class StartEpisode(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One episode."""

    call: int = 0
    """The pool says it, and the limits."""
    limits: PhaseLimits = PhaseLimits()
    prompt: Prompt
    index: int
    prompt_ids: I32
    sampling: SamplingParams
    context_length: int
    request_prefix: str
    session_id: str
    attempt: int
    recorded: tuple[Sample, ...] = ()


class DrawnTurn(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The turn that was asked for."""

    call: int
    turn: int
    segment: Delta
    finish: FinishReason


class AskModel(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The model's next turn."""

    call: int
    turn: int
    """Counts what this episode asked: one that was given up is not taken for the next."""
    request: GenerateRequest
    so_far: Sample
    """The sample without the turn that is asked for."""
    start: Delta
    """What that turn has already."""
    model: str = ""
    """Of the run's own; empty: the policy."""


class EpisodeDone(Ended, frozen=True, kw_only=True, tag=True):
    """What the workflow returned."""

    samples: msgspec.Raw
    temperatures: dict[int, float]
    """That the turns were drawn at; by the numbers of the samples."""
    teardown: str = ""
    """What went wrong when it cleaned up; empty: nothing."""


class EpisodeFailed(Ended, frozen=True, kw_only=True, tag=True):
    """How it failed."""

    kind: FailureKind
    words: str
    """A sentence without its subject."""
    remedy: str
    error: str = ""
    """Class of an error of myxa's own; then `words` is its whole message."""
    teardown: str = ""


ToWorker = StartEpisode | DrawnTurn | Cancel
FromWorker = AskModel | EpisodeDone | EpisodeFailed | WaitNote | Waits | Stuck

spec_decoder = msgspec.msgpack.Decoder(WorkflowSpec)
to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker, dec_hook=array_in)
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker, dec_hook=array_in)
samples_decoder = msgspec.msgpack.Decoder(tuple[Sample, ...], dec_hook=array_in)
