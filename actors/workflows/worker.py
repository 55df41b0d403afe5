"""A worker process for a user's workflows. `actors/subreaper.py` starts it, `pool.py` talks to it.

Async phases of all episodes run in its loop (`actors/user_code/loop.py`), each phase that is a plain `def` in its own
thread. Code that holds the loop longer than `rollout.max_block_s` is interrupted: that episode fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import itertools
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future
from typing import Any, BinaryIO, TypeVar, cast

import msgspec

from ...core.errors import FailureKind, MyxaError, UserCodeError
from ...core.messages import SamplingParams
from ...core.protocols import GenerateRequest, Tokenizer
from ...core.samples import FinishReason, Message, Sample
from ..models.tokenizer import load_tokenizer
from ..user_code.functions import is_async, what_was_raised
from ..user_code.loop import Blocked, SharedLoop, TookTooLong, UserCall, UserRaised, awaited, frames_above, user_place
from ..user_code.process import MAX_FRAME_BYTES, begin, encoder
from .episode import Episode, ModelAccess, TokenSegment, Turn, WorkflowContext
from .failures import kind_of
from .named import OwnWorkflow, load_workflow
from .turn_renderer import TurnRenderer
from .worker_messages import (
    AskModel,
    DrawnTurn,
    EpisodeDone,
    EpisodeFailed,
    StartEpisode,
    Waits,
    WorkflowSpec,
    spec_decoder,
    to_worker,
)

T = TypeVar("T")

WAITS_EVERY_S = 1.0
FRAME_SLACK_BYTES = 1 << 16


def main() -> None:
    """Load what the first frame names, then run episodes until the input ends."""
    (spec, workflow, tokenizer), incoming, outgoing = begin(_loaded)
    with asyncio.Runner() as runner:
        runner.run(Worker(spec, workflow, tokenizer, outgoing).run(incoming))
        os._exit(0)  # threads that hang would be waited for


def _loaded(first: bytes) -> tuple[WorkflowSpec, OwnWorkflow, Tokenizer]:
    spec = spec_decoder.decode(first)
    workflow = load_workflow(spec.workflow, spec.args)
    return spec, workflow, load_tokenizer(spec.model_path, spec)


class Worker(SharedLoop["Play"]):
    """The episodes of this process."""

    def __init__(self, spec: WorkflowSpec, workflow: OwnWorkflow, tokenizer: Tokenizer, outgoing: BinaryIO) -> None:
        super().__init__(spec.max_block_s, outgoing, to_worker)
        self.spec = spec
        self.workflow = workflow
        self.tokenizer = tokenizer
        self.renderer = TurnRenderer(tokenizer)

    async def serve(self, over: asyncio.Event) -> None:
        """Until the input ends; then all episodes are ended, their teardown included."""
        while not over.is_set():
            places = {number: place for number, play in self.calls.items() if (place := play.place())}
            self.out.put(Waits(places))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAITS_EVERY_S):
                    await over.wait()
        for play in self.calls.values():
            play.cancel()
        if self.calls:
            await asyncio.wait([play.task for play in self.calls.values()])
        self.out.flush()

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
        self._answers: dict[int, asyncio.Future[DrawnTurn]] = {}
        """Turns that are drawn, each of another sample of the rollout; by their numbers."""
        self._drawing: set[int] = set()
        """Those samples."""
        self._asked = itertools.count(1)
        self.turns: set[Future[Any]] = set()
        """Of threads that wait for a turn of the model."""
        self.is_over = False

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
        answer = self._answers[turn] = asyncio.get_running_loop().create_future()
        self._worker.out.put(AskModel(call=self._start.call, turn=turn, request=request, so_far=so_far, start=start))
        try:
            drawn = await answer
        finally:
            del self._answers[turn]
            self._drawing.remove(so_far.branch)
        return drawn.segment, drawn.finish

    def drawn(self, answer: DrawnTurn) -> None:
        waits = self._answers.get(answer.turn)
        if waits is not None and not waits.done():
            waits.set_result(answer)

    @property
    def waits_for_model(self) -> bool:
        return bool(self._answers)

    async def run(self) -> None:
        methods: dict[str, Callable[..., Any]] = {}
        end: EpisodeDone | EpisodeFailed
        try:
            end = await self._phases(methods)
        except BaseException as error:  # noqa: BLE001 -- any error is reported to the actor
            end = self._failed(error)
        self.is_over = True
        for turn in self.turns:
            turn.cancel()
        teardown = ""
        try:
            await self._phase("teardown", methods, self._start.limits.teardown_s)
        except BaseException as error:  # noqa: BLE001
            teardown = f"teardown {self._failed(error).words}"
        self._worker.out.put(msgspec.structs.replace(end, teardown=teardown, is_hanging=self.is_hanging))
        del self._worker.calls[self._start.call]

    def _episode(self) -> Episode:
        """One whose turns, and those of its branches, are drawn in the actor's process."""
        start, worker = self._start, self._worker
        model = ModelAccess(
            generate=_no_engine,
            sampling=start.sampling,
            context_length=start.context_length,
            request_prefix=start.request_prefix,
            goes_on=lambda: True,  # else the actor ends the episode
        )
        return Episode(
            prompt=start.prompt,
            index=start.index,
            tokenizer=worker.tokenizer,
            model=model,
            renderer=worker.renderer,
            prompt_ids=start.prompt_ids,
            recorded=start.recorded,
            draw=self.ask,
        )

    async def _phases(self, methods: dict[str, Callable[..., Any]]) -> EpisodeDone:
        start, limits = self._start, self._start.limits
        episode = self._episode()
        workflow, prompt = self._worker.workflow, start.prompt
        if workflow.is_class:
            made = await self._phase_within("setup", asyncio.to_thread(workflow.made), limits.setup_s)
        else:
            made = workflow.made()
        methods.update(made)

        def context(method: str) -> WorkflowContext:
            is_loops = method in methods and is_async(methods[method])
            return WorkflowContext(
                episode=episode if is_loops else cast("Episode", PlainEpisode(self, episode, self._worker.loop)),
                tokenizer=self._worker.tokenizer,
                max_turns=self._worker.spec.max_turns,
                index=start.index,
                session_id=start.session_id,
                attempt=start.attempt,
            )

        await self._phase("setup", methods, limits.setup_s, context("setup"), prompt)
        sample = await self._phase("run", methods, limits.run_s, context("run"), prompt)
        if workflow.is_class and sample is None:
            sample = episode.sample()
        if "finalize" in methods:
            sample = await self._phase("finalize", methods, limits.finalize_s, context("finalize"), sample) or sample
        samples = samples_of(sample)
        if "score" in methods:
            reward = await self._phase("score", methods, limits.score_s, context("score"), sample)
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

    async def _phase(self, name: str, methods: dict[str, Callable[..., Any]], limit_s: float, *args: object) -> Any:
        method = methods.get(name)
        if method is None:
            return None

        async def call() -> Any:
            if is_async(method):
                return await method(*args)
            returned = await asyncio.to_thread(method, *args)
            return await returned if inspect.isawaitable(returned) else returned

        return await self._phase_within(name, call(), limit_s)

    async def _phase_within(self, name: str, call: Awaitable[T], limit_s: float) -> T:
        places: list[str] = []
        timer = self._worker.loop.call_later(limit_s * 0.98, lambda: places.append(self.place()))
        try:
            return await self.within(call, limit_s)
        except TookTooLong:
            place = f" at {places[0]}" if places and places[0] else ""
            raise _Late(f"did not finish {'' if name == 'run' else name + ' '}within {limit_s:g} s{place}") from None
        except UserRaised as raised:
            raise raised.cause from None
        finally:
            timer.cancel()

    def _failed(self, error: BaseException) -> EpisodeFailed:
        kind: FailureKind = "user-code"
        remedy = name = ""
        words = str(error)
        if isinstance(error, MyxaError):
            words, remedy, name = error.message, error.remedy, type(error).__name__
        elif isinstance(error, _Late):
            kind = "user-code" if self.waits_for_model else "environment"
            remedy = "bound its waits, or raise rollout.timeout_s"
        elif isinstance(error, Blocked):
            kind = "environment"
            remedy = "write a plain def, use asyncio.to_thread, or raise rollout.max_block_s"
        elif isinstance(error, asyncio.CancelledError):
            words = "was cancelled"
        else:
            kind, remedy = kind_of(error), "mend the workflow function"
            words = f"raised {what_was_raised(error)}"
        return EpisodeFailed(call=self._start.call, kind=kind, words=words, remedy=remedy, error=name)

    def place(self) -> str:
        """Where it waits for anything but the model; empty: it does not, or the place is unknown."""
        if self.waits_for_model:
            return ""
        threads = {thread.ident for thread in self.threads if thread.is_alive()}
        running = [frame for ident, frame in sys._current_frames().items() if ident in threads]  # pyright: ignore[reportPrivateUsage]
        if running:
            return user_place(frames_above(running[-1]))
        coro: Any = self._doing.get_coro() if self._doing is not None else None
        return user_place(awaited(coro))


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


class _EpisodeOver(BaseException):
    """Raised into a thread whose episode has ended."""


class PlainEpisode:
    """`ctx.episode` of a plain `def`: an Episode whose `generate` is no coroutine."""

    def __init__(self, play: Play, episode: Episode, loop: asyncio.AbstractEventLoop) -> None:
        self._play, self._episode, self._loop = play, episode, loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)

    def branch(self) -> PlainEpisode:
        return PlainEpisode(self._play, self._episode.branch(), self._loop)

    def session(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> PlainEpisode:
        return PlainEpisode(self._play, self._episode.session(messages, tools), self._loop)

    def __copy__(self) -> Any:
        return copy.copy(self._episode)

    def __deepcopy__(self, memo: object) -> Any:
        return copy.copy(self._episode)

    def generate(self, sampling: SamplingParams | None = None) -> Turn:
        """The model's next turn. Raises as `Episode.generate`."""
        if self._play.is_over:
            raise _EpisodeOver
        call = asyncio.run_coroutine_threadsafe(self._episode.generate(sampling), self._loop)
        self._play.turns.add(call)
        try:
            return call.result()
        except FutureCancelled:
            raise _EpisodeOver from None
        finally:
            self._play.turns.discard(call)
