"""What a rollout actor and a process that runs its workflows say to each other, in the frames of
`actors/user_code/process.py`: token ids in, token ids out, one question and one answer a turn.

    actor                                       worker
    Start(episode, prompt, limits, ...)   ->    the workflow begins
                                          <-    Ask(request, so_far): the model's next turn
    Drawn(tokens, finish)                 ->
                                          <-    Done(sample) | Failed(kind, words)
    Cancel(episode)                       ->    ends it; its teardown runs, then Failed
                                          <-    Waits({episode: place}): once a second, where each waits
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.errors import FailureKind
from ...core.messages import SamplingParams
from ...core.protocols import GenerateRequest
from ...core.samples import F32, I32, FinishReason, Prompt, Sample
from ..user_code.process import array_in
from .episode import TokenSegment


class PhaseLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    setup_s: float = 120.0
    run_s: float = 600.0
    finalize_s: float = 60.0
    score_s: float = 60.0
    teardown_s: float = 30.0

    @property
    def total_s(self) -> float:
        return self.setup_s + self.run_s + self.finalize_s + self.score_s + self.teardown_s


class WorkflowSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First frame to a worker."""

    workflow: str
    args: dict[str, Any]
    max_turns: int
    max_block_s: float
    model_path: str
    apply_chat_template: bool
    chat_template_kwargs: dict[str, Any]
    date: str


class StartEpisode(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One episode."""

    episode: int = 0
    """Its number in the pool, which says it."""
    limits: PhaseLimits = PhaseLimits()
    """As the pool says them too."""
    prompt: Prompt
    index: int
    prompt_ids: I32
    sampling: SamplingParams
    context_length: int
    request_prefix: str
    session_id: str
    attempt: int
    recorded: Sample | None = None


class DrawnTurn(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The turn that was asked for."""

    episode: int
    turn: int
    """`AskModel.turn`."""
    ids: I32
    logprobs: F32
    versions: I32
    finish: FinishReason

    @property
    def segment(self) -> TokenSegment:
        return TokenSegment(self.ids, self.logprobs, self.versions, is_model=True)


class CancelEpisode(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """End that episode."""

    episode: int


class AskModel(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The model's next turn."""

    episode: int
    turn: int
    """Counts what this episode asked: one that was given up is not taken for the next."""
    request: GenerateRequest
    stop: tuple[str, ...]
    so_far: Sample
    """The episode without the turn that is asked for."""
    start: DrawnTurn
    """What that turn has already."""


class EpisodeDone(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What the workflow returned."""

    episode: int
    sample: msgspec.Raw
    temperature: float | None
    teardown: str = ""
    """What went wrong when it cleaned up; empty: nothing."""
    is_hanging: bool = False
    """A call of it still runs: this worker takes no further episodes."""


class EpisodeFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """How it failed."""

    episode: int
    kind: FailureKind
    words: str
    """A sentence without its subject."""
    remedy: str
    error: str = ""
    """Class of an error of myxa's own; then `words` is its whole message."""
    teardown: str = ""
    is_hanging: bool = False


class Waits(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Where episodes are that do not wait for the model: function, file and line."""

    places: dict[int, str]


class EpisodeStuck(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Code that cannot be interrupted holds the worker, which ends now."""

    place: str
    episode: int
    """Whose code it is; negative: unknown."""


ToWorker = StartEpisode | DrawnTurn | CancelEpisode
FromWorker = AskModel | EpisodeDone | EpisodeFailed | Waits | EpisodeStuck

spec_decoder = msgspec.msgpack.Decoder(WorkflowSpec)
to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker, dec_hook=array_in)
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker, dec_hook=array_in)
sample_decoder = msgspec.msgpack.Decoder(Sample, dec_hook=array_in)
