"""A worker process for a user's workflows. `gateway/clients.py` begins it, `pool.py` talks to it.

Async phases of all episodes run in its loop (`actors/user_code/process.py`), each phase that is a plain `def` in a
thread. Code that holds the loop longer than `rollout.max_block_s` is interrupted: that episode fails.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future
from functools import partial
from typing import Any, BinaryIO, TypeVar, cast

import msgspec

from ...core.errors import FailureKind, MyxaError, UserCodeError
from ...core.messages import SamplingParams
from ...core.protocols import Delta, GenerateRequest
from ...core.samples import FinishReason, Sample
from ..models.tokenizer import FolderTokenizer
from ..user_code.functions import is_async, what_was_raised
from ..user_code.process import MAX_FRAME_BYTES, Blocked, SharedLoop, TookTooLong, UserCall, encoder
from .episode import AskOther, Clients, Episode, ModelAccess, ModelsOfRollout, Turn, WorkflowContext
from .failures import kind_of
from .named import OwnWorkflow, load_workflow
from .timeline import WaitKind, WaitNote, waiting
from .turn_renderer import TurnRenderer
from .worker_messages import AskModel, DrawnTurn, EpisodeDone, EpisodeFailed, StartEpisode, spec_decoder, to_worker

T = TypeVar("T")

FRAME_SLACK_BYTES = 1 << 16


class WorkflowWorker(SharedLoop["Play"]):
    """The episodes of this process."""

    blames: FailureKind = "user-code"
    """For what nothing else is known to be the cause of."""
    phase_waits: Mapping[str, tuple[WaitKind, str]] = {
        "setup": ("environment", "setup"), "finalize": ("environment", "finalize"),
        "score": ("judge", "score"), "teardown": ("environment", "teardown"),
    }  # fmt: skip
    """What an episode waits for in its phases."""

    def __init__(self, first: bytes, outgoing: BinaryIO) -> None:
        self.spec = spec = spec_decoder.decode(first)
        super().__init__(spec.max_block_s, outgoing, to_worker)
        self.workflow = self.load()
        self.tokenizer = FolderTokenizer.of(spec.tokenizer)
        self.renderer = TurnRenderer(self.tokenizer)

    def load(self) -> OwnWorkflow:
        """What the spec names. Raises ConfigError, UserCodeError."""
        return load_workflow(self.spec.workflow, self.spec.args)

    def take(self, message: StartEpisode | DrawnTurn) -> None:
        if isinstance(message, StartEpisode):
            self.calls[message.call] = Play(self, message)
        elif (play := self.calls.get(message.call)) is not None:
            play.drawn(message)

    def clients(self, episode: Episode, ask: AskOther) -> tuple[Clients | None, ModelsOfRollout]:
        """What `ctx.openai` and `ctx.anthropic` are made of, and `ctx.models`, whose turns `ask` draws."""
        return None, ModelsOfRollout()

    def place(self) -> str:
        waiting = [play for play in self.calls.values() if not play.waits_for_model]
        place = min(waiting, key=lambda play: play.since_s).place() if waiting else ""
        return re.sub(r":\d+\)$", ")", place)


class _Late(Exception):
    """A phase took longer than it may."""

    def __init__(self, name: str, limit_s: float, place: str, blames: FailureKind) -> None:
        """`place`: empty: it waits for the model."""
        which = "" if name == "run" else f"{name} "
        super().__init__(f"did not finish {which}within {limit_s:g} s{f' at {place}' if place else ''}")
        self.kind: FailureKind = "environment" if place else blames


class Play(UserCall):
    """One episode: setup, run, finalize, score, and teardown whatever became of the others."""

    def __init__(self, worker: WorkflowWorker, start: StartEpisode) -> None:
        super().__init__(worker.loop)
        self._worker = worker
        self._start = start
        self._methods: dict[str, Callable[..., Any]] = {}
        self._answers: dict[int, asyncio.Future[DrawnTurn]] = {}
        """Turns that are drawn, each of another sample of the rollout; by their numbers."""
        self._drawing: set[tuple[str, int]] = set()
        """Those samples: model, number."""
        self._asked = itertools.count(1)
        self.since_s = worker.loop.time()
        """When its phase began, or it got its last turn."""
        self._step_s = math.inf
        self.turns: set[Future[Any]] = set()
        """Of threads that wait for a turn of the model."""
        self.is_over = False
        self._clients: Clients | None = None
        self._models = ModelsOfRollout()

    async def ask(
        self, so_far: Sample, request: GenerateRequest, start: Delta, params: SamplingParams, model: str = ""
    ) -> tuple[Delta, FinishReason]:
        """The next turn of a sample; `model`: of the run's own. Raises UserCodeError while another one is drawn."""
        if (model, so_far.branch) in self._drawing:
            raise UserCodeError(
                "workflow: two turns of one episode were asked for at a time",
                remedy="await each generate() before the next: an episode is one conversation",
            )
        turn = next(self._asked)
        self._drawing.add((model, so_far.branch))
        answer = self._answers[turn] = self._worker.loop.create_future()
        self._worker.put(
            AskModel(call=self._start.call, turn=turn, request=request, so_far=so_far, start=start, model=model)
        )
        try:
            drawn = await answer
        finally:
            self.since_s = self._worker.loop.time()
            del self._answers[turn]
            self._drawing.remove((model, so_far.branch))
        return drawn.segment, drawn.finish

    def drawn(self, answer: DrawnTurn) -> None:
        waits = self._answers.get(answer.turn)
        if waits is not None and not waits.done():
            waits.set_result(answer)

    @property
    def waits_for_model(self) -> bool:
        return bool(self._answers)

    async def run(self) -> None:
        end: EpisodeDone | EpisodeFailed
        try:
            end = await self._phases()
        except BaseException as error:  # noqa: BLE001 -- any error is reported to the actor
            end = self._failed(error)
        self.is_over = True
        for clients in (self._clients, *(model.clients for model in self._models.values())):
            if clients is not None:
                await clients.close()
        for turn in self.turns:
            turn.cancel()
        teardown = ""
        try:
            await self._phase("teardown", self._start.limits.teardown_s)
        except BaseException as error:  # noqa: BLE001
            teardown = f"teardown {self._failed(error).words}"
        self._worker.put(msgspec.structs.replace(end, teardown=teardown, is_hanging=self.is_hanging))
        del self._worker.calls[self._start.call]

    def _episode(self) -> Episode:
        """Its turns, and those of its branches, are drawn in the actor's process, which ends it where need be."""
        start, worker = self._start, self._worker
        model = ModelAccess(
            generate=no_engine,
            sampling=start.sampling,
            context_length=start.context_length,
            request_prefix=start.request_prefix,
            goes_on=lambda: True,
            on_wait=self._tell_wait,
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

    def _tell_wait(self, note: WaitNote) -> None:
        self._worker.put(msgspec.structs.replace(note, call=self._start.call, at_s=time.monotonic()))

    async def _phases(self) -> EpisodeDone:
        start, limits, workflow = self._start, self._start.limits, self._worker.workflow
        episode, prompt = self._episode(), start.prompt
        self._clients, self._models = self._worker.clients(episode, self.ask)
        context = WorkflowContext(
            episode=episode,
            tokenizer=self._worker.tokenizer,
            max_turns=self._worker.spec.max_turns,
            index=start.index,
            session_id=start.session_id,
            attempt=start.attempt,
            models=self._models,
            clients=self._clients,
        )
        if workflow.is_class:  # what makes its object may block too
            self._methods = await self._in_time("setup", asyncio.to_thread(workflow.made), limits.setup_s)
        else:
            self._methods = workflow.made()
        await self._phase("setup", limits.setup_s, context, prompt)
        sample = await self._phase("run", limits.run_s, context, prompt)
        if workflow.is_class and sample is None:
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
        if (wait := self._worker.phase_waits.get(name)) is None:
            return await self._in_time(name, self._called(method, args), limit_s)
        with waiting(self._tell_wait, *wait, 0):
            return await self._in_time(name, self._called(method, args), limit_s)

    async def _called(self, method: Callable[..., Any], args: Sequence[object]) -> Any:
        if is_async(method):
            return await method(*args)
        plain = (self._plain(value) if isinstance(value, WorkflowContext) else value for value in args)
        returned = await asyncio.to_thread(method, *plain)
        return await returned if inspect.isawaitable(returned) else returned

    def _plain(self, context: WorkflowContext) -> WorkflowContext:
        def plain(episode: Episode) -> Episode:
            return cast("Episode", PlainEpisode(self, episode, self._worker.loop))

        models = ModelsOfRollout()
        for name, model in context.models.items():
            models[name] = msgspec.structs.replace(model, root=plain(model.root), is_plain=True)
        return msgspec.structs.replace(context, episode=plain(context.episode), models=models, is_plain=True)

    async def _in_time(self, name: str, call: Awaitable[T], limit_s: float) -> T:
        limits, blames = self._start.limits, self._worker.blames
        began_s = self.since_s = self._worker.loop.time()
        self._step_s = limits.step_s if name == "run" else math.inf
        try:
            return await self.within(call, limit_s)
        except TookTooLong as late:
            if self._worker.loop.time() < began_s + limit_s:
                raise _Late("step", self._step_s, str(late), blames) from None
            raise _Late(name, limit_s, str(late), blames) from None

    def left_s(self, until_s: float) -> float:
        left_s, now_s = super().left_s(until_s), self._worker.loop.time()
        return min(left_s, self._step_s if self.waits_for_model else self.since_s + self._step_s - now_s)

    def place(self) -> str:
        return "" if self.waits_for_model else super().place()

    def _failed(self, error: BaseException) -> EpisodeFailed:
        while isinstance(error, BaseExceptionGroup):
            error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
        kind, remedy, name, fault = self._worker.blames, "", "", str(error)
        if isinstance(error, MyxaError):
            fault, remedy, name = error.message, error.remedy, type(error).__name__
        elif isinstance(error, _Late):
            kind, remedy = error.kind, "bound its waits, or raise rollout.timeout_s"
        elif isinstance(error, Blocked):
            kind, remedy = "environment", "write a plain def, use asyncio.to_thread, or raise rollout.max_block_s"
        elif isinstance(error, asyncio.CancelledError):
            fault = "was cancelled"
        else:
            kind, remedy = kind_of(error, kind), "mend the workflow function"
            fault = f"raised {what_was_raised(error)}"
        return EpisodeFailed(call=self._start.call, kind=kind, words=fault, remedy=remedy, error=name)


def no_engine(request: GenerateRequest) -> Any:
    """Turns are drawn in the actor's process."""
    raise NotImplementedError


def samples_of(returned: object) -> tuple[Sample, ...]:
    """What a workflow returned, a sample or several. Raises UserCodeError naming the type of what is none."""
    values = cast("Sequence[Any]", returned if isinstance(returned, list | tuple) and returned else [returned])
    for value in values:
        if not isinstance(value, Sample):
            fault = f"workflow returned a value of type {type(value).__name__}, not a Sample"
            raise UserCodeError(fault, remedy="end it with `return ctx.episode.sample()`")
    return tuple(values)


class _EpisodeOver(BaseException):
    """Raised into a thread whose episode has ended."""


class PlainEpisode:
    """`ctx.episode` of a plain `def`: an Episode whose `generate` is no coroutine."""

    def __init__(self, play: Play, episode: Episode, loop: asyncio.AbstractEventLoop) -> None:
        self._play, self._episode, self._loop = play, episode, loop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._episode, name)
        if name not in ("branch", "session", "text"):
            return value
        return partial(self._opened, value)

    def _opened(self, opens: Callable[..., Episode], *args: Any, **options: Any) -> PlainEpisode:
        return PlainEpisode(self._play, opens(*args, **options), self._loop)

    def __copy__(self) -> Any:
        return copy.copy(self._episode)

    def __deepcopy__(self, memo: object) -> Any:
        return copy.copy(self._episode)

    def generate(self, sampling: SamplingParams | None = None) -> Turn:
        """The model's next turn. Raises as `Episode.generate`."""
        if self._play.is_over:
            raise _EpisodeOver
        turn = asyncio.run_coroutine_threadsafe(self._episode.generate(sampling), self._loop)
        self._play.turns.add(turn)
        try:
            return turn.result()
        except FutureCancelled:
            raise _EpisodeOver from None
        finally:
            self._play.turns.discard(turn)
