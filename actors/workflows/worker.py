"""A worker process for a user's workflows. `actors/subreaper.py` starts it, `pool.py` talks to it.

All episodes run in its loop (`actors/user_code/process.py`). Code that holds the loop longer than `rollout.max_block_s`
is interrupted: that episode fails.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, cast

import msgspec

from ...core.errors import FailureKind, MyxaError, UserCodeError
from ...core.messages import SamplingParams
from ...core.protocols import GenerateRequest
from ...core.samples import FinishReason, Sample
from ..models.tokenizer import load_tokenizer
from ..user_code.functions import place_raised, what_was_raised
from ..user_code.process import MAX_FRAME_BYTES, Blocked, SharedLoop, UserCall, encoder, run_worker
from .episode import Episode, ModelAccess, TokenSegment, WorkflowContext
from .failures import kind_of
from .named import load_workflow
from .turn_renderer import TurnRenderer
from .worker_messages import (
    AskModel,
    DrawnTurn,
    EpisodeDone,
    EpisodeFailed,
    StartEpisode,
    spec_decoder,
    to_worker,
)

FRAME_SLACK_BYTES = 1 << 16


def main() -> None:
    """Load what the first frame names, then run episodes until the input ends."""
    run_worker(Worker)


class Worker(SharedLoop["Play"]):
    """The episodes of this process."""

    def __init__(self, first: bytes, outgoing: BinaryIO) -> None:
        self.spec = spec = spec_decoder.decode(first)
        super().__init__(spec.max_block_s, outgoing, to_worker)
        self.workflow = load_workflow(spec.workflow, spec.args)
        self.tokenizer = load_tokenizer(spec.model_path, spec)
        self.renderer = TurnRenderer(self.tokenizer)

    def take(self, message: StartEpisode | DrawnTurn) -> None:
        if isinstance(message, StartEpisode):
            self.calls[message.call] = Play(self, message)
        elif (play := self.calls.get(message.call)) is not None:
            play.drawn(message)


class _Late(Exception):
    """A phase took longer than it may."""


class Play(UserCall):
    """One episode: setup, run, finalize, score, and teardown whatever became of the others."""

    def __init__(self, worker: Worker, start: StartEpisode) -> None:
        super().__init__(worker.loop)
        self._worker = worker
        self._start = start
        self._methods: dict[str, Callable[..., Any]] = {}
        self._answers: dict[int, asyncio.Future[DrawnTurn]] = {}
        """Turns that are drawn, each of another sample of the rollout; by their numbers."""
        self._drawing: set[int] = set()
        """Those samples."""
        self._asked = itertools.count(1)
        self._awaited_model = False
        """When it was cancelled."""

    async def ask(
        self, so_far: Sample, request: GenerateRequest, start: TokenSegment, params: SamplingParams
    ) -> tuple[TokenSegment, FinishReason]:
        """The next turn of a sample. Raises UserCodeError while another one of it is drawn."""
        if so_far.branch in self._drawing:
            raise UserCodeError(
                "workflow: two turns of one episode were asked for at a time",
                remedy="await each generate() before the next: an episode is one conversation",
            )
        turn = next(self._asked)
        self._drawing.add(so_far.branch)
        answer = self._answers[turn] = self._worker.loop.create_future()
        self._worker.put(AskModel(call=self._start.call, turn=turn, request=request, so_far=so_far, start=start))
        try:
            drawn = await answer
        except asyncio.CancelledError:
            self._awaited_model = True
            raise
        finally:
            del self._answers[turn]
            self._drawing.remove(so_far.branch)
        return drawn.segment, drawn.finish

    def drawn(self, answer: DrawnTurn) -> None:
        waits = self._answers.get(answer.turn)
        if waits is not None and not waits.done():
            waits.set_result(answer)

    async def run(self) -> None:
        end: EpisodeDone | EpisodeFailed
        try:
            end = await self._phases()
        except BaseException as error:  # noqa: BLE001 -- any error is reported to the actor
            end = self._failed(error)
        teardown = ""
        try:
            await self._phase("teardown", self._start.limits.teardown_s)
        except BaseException as error:  # noqa: BLE001
            teardown = f"teardown {self._failed(error).words}"
        self._worker.put(msgspec.structs.replace(end, teardown=teardown))
        del self._worker.calls[self._start.call]

    async def _phases(self) -> EpisodeDone:
        start, limits, worker = self._start, self._start.limits, self._worker
        prompt = start.prompt
        # Its turns, and those of its branches, are drawn in the actor's process, which ends it where need be.
        model = ModelAccess(
            generate=_no_engine,
            sampling=start.sampling,
            context_length=start.context_length,
            request_prefix=start.request_prefix,
            goes_on=lambda: True,
        )
        episode = Episode(
            prompt=prompt,
            index=start.index,
            tokenizer=worker.tokenizer,
            model=model,
            renderer=worker.renderer,
            prompt_ids=start.prompt_ids,
            recorded=start.recorded,
            draw=self.ask,
        )
        context = WorkflowContext(
            episode=episode,
            tokenizer=worker.tokenizer,
            max_turns=worker.spec.max_turns,
            index=start.index,
            session_id=start.session_id,
            attempt=start.attempt,
        )
        self._methods = worker.workflow.made()
        await self._phase("setup", limits.setup_s, context, prompt)
        sample = await self._phase("run", limits.run_s, context, prompt)
        if worker.workflow.is_class and sample is None:
            sample = episode.sample()
        sample = await self._phase("finalize", limits.finalize_s, context, sample) or sample
        samples = samples_of(sample)
        if "score" in self._methods:
            reward = await self._phase("score", limits.score_s, context, sample)
            samples = (*samples[:-1], msgspec.structs.replace(samples[-1], reward=reward))
        try:
            body = encoder.encode(samples)
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            raise UserCodeError(
                f"workflow returned a sample that cannot be checked: {what_was_raised(error)}",
                remedy="give its metadata JSON values, and its reward a number",
            ) from error
        if len(body) > MAX_FRAME_BYTES - FRAME_SLACK_BYTES:
            raise UserCodeError(f"workflow returned a sample of {len(body):,} bytes", remedy="return a smaller one")
        return EpisodeDone(call=start.call, samples=msgspec.Raw(body), temperatures=episode.temperatures)

    async def _phase(self, name: str, limit_s: float, *args: object) -> Any:
        if (method := self._methods.get(name)) is None:
            return None
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                returned = method(*args)
                return await returned if inspect.isawaitable(returned) else returned
        except TimeoutError as late:
            if not limit.expired():
                raise
            which = "" if name == "run" else f"{name} "
            raise _Late(f"did not finish {which}within {limit_s:g} s{place_raised(late.__cause__)}") from late

    def _failed(self, error: BaseException) -> EpisodeFailed:
        kind: FailureKind = "user-code"
        remedy = name = ""
        words = str(error)
        if isinstance(error, MyxaError):
            words, remedy, name = error.message, error.remedy, type(error).__name__
        elif isinstance(error, _Late):
            kind = "user-code" if self._awaited_model else "environment"
            remedy = "bound its waits, or raise rollout.timeout_s"
        elif isinstance(error, Blocked):
            kind = "environment"
            remedy = "use asyncio.to_thread, or raise rollout.max_block_s"
        elif isinstance(error, asyncio.CancelledError):
            words = "was cancelled"
        else:
            kind, remedy = kind_of(error), "mend the workflow function"
            words = f"raised {what_was_raised(error)}"
        return EpisodeFailed(call=self._start.call, kind=kind, words=words, remedy=remedy, error=name)


def _no_engine(request: GenerateRequest) -> Any:
    raise NotImplementedError


def samples_of(returned: object) -> tuple[Sample, ...]:
    """What a workflow returned, a sample or several. Raises UserCodeError naming the type of what is none."""
    several = cast("Sequence[object]", returned if isinstance(returned, list | tuple) and returned else [returned])
    samples = tuple(one for one in several if isinstance(one, Sample))
    if len(samples) < len(several):
        stranger = next(type(one).__name__ for one in several if not isinstance(one, Sample))
        raise UserCodeError(
            f"workflow returned a value of type {stranger}, not a Sample",
            remedy="end it with `return ctx.episode.sample()`",
        )
    return samples
