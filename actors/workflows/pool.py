"""Workflows of the user's run in worker processes; this is the actor's side: which worker gets an episode, turns of the
model for it, and what became of it.

Several episodes share a worker. One whose code hangs is ended with its limit. The worker that still has such a call
takes nothing new and is killed once its other episodes have ended; a new one takes its place. Teardown runs until
the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ...core import errors
from ...core.config import RunConfig
from ...core.errors import MemberFailed, MyxaError, UserCodeError
from ...core.protocols import Tokenizer
from ...core.samples import Sample
from ..user_code.process import PoolWorker, SpokeGarbage, WorkerGone, WorkerPool
from .episode import Interrupted, ModelAccess, TokenSegment, drawn, joined, stops_of
from .worker_messages import (
    AskModel,
    CancelEpisode,
    DrawnTurn,
    EpisodeDone,
    EpisodeFailed,
    EpisodeStuck,
    PhaseLimits,
    StartEpisode,
    Waits,
    WorkflowSpec,
    from_worker,
    sample_decoder,
)

_log = logging.getLogger(__name__)

EPISODES_PER_WORKER = 32
"""Before a further worker is started."""
SLACK_S = 15.0
"""For a worker to say how an episode ended whose limits are over."""
SILENT_S = 20.0
"""A worker that says nothing for so long, beyond the time that its own watch needs, is killed."""


class TokensSoFar:
    """What an episode in a worker has, at any moment."""

    def __init__(self, recorded: Sample | None) -> None:
        self._closed = recorded
        self.under_way: list[TokenSegment] = []

    def asked(self, ask: AskModel) -> None:
        """A turn is to be drawn."""
        self._closed = ask.so_far
        self.under_way = [ask.start.segment]

    def so_far(self) -> Sample:
        """Tokens of the turn that is drawn included. Only while there are any."""
        assert self._closed is not None
        if not self.under_way:
            return self._closed
        turn, before = joined(self.under_way), self._closed
        return msgspec.structs.replace(
            before,
            response_ids=np.concatenate([before.response_ids, turn.ids]).astype(np.int32, copy=False),
            logprobs=np.concatenate([before.logprobs, turn.logprobs]).astype(np.float32, copy=False),
            loss_mask=np.concatenate([before.loss_mask, np.ones(len(turn.ids), np.uint8)]),
            versions=np.concatenate([before.versions, turn.versions]).astype(np.int32, copy=False),
            finish="abort",
        )

    @property
    def is_empty(self) -> bool:
        return self._closed is None


@dataclass(slots=True)
class _Running:
    inbox: asyncio.Queue[AskModel | EpisodeDone | EpisodeFailed | DrawnTurn | Exception] = field(
        default_factory=asyncio.Queue["AskModel | EpisodeDone | EpisodeFailed | DrawnTurn | Exception"]
    )
    place: str = ""


class _Lost(WorkerGone):
    def __init__(self, how: str, episode: int) -> None:
        super().__init__(how)
        self.episode = episode
        """The episode to blame; negative: unknown."""


class WorkflowWorker(PoolWorker):
    """Many episodes at a time."""

    MODULE = "myxa.actors.workflows.worker"

    calls: dict[int, _Running]
    """Episode -> what its caller gets."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.ending: set[int] = set()
        """Episodes that were abandoned and have not ended yet."""

    @property
    def num_calls(self) -> int:
        return len(self.calls) + len(self.ending)


class WorkflowPool(WorkerPool[WorkflowWorker]):
    """At most `max_workers` processes, started as they are needed; `play` may be called concurrently."""

    def __init__(self, spec: WorkflowSpec, limits: PhaseLimits, tokenizer: Tokenizer, *, max_workers: int) -> None:
        """`limits.run_s` is that of each episode's start."""
        what = f'workflow "{spec.workflow}"'
        super().__init__(WorkflowWorker, spec, what, max_workers=max_workers, max_calls=EPISODES_PER_WORKER)
        self.grace_s = limits.teardown_s
        self.name = spec.workflow.rpartition("/")[2]
        self._silent_s = SILENT_S + 5 * spec.max_block_s
        self._limits = limits
        self._tokenizer = tokenizer
        self._number = 0
        self.on_waits: Callable[[], None] = lambda: None
        """Called when there is news of where episodes wait."""

    def places(self) -> list[str]:
        """Where episodes wait for anything but the model, as they reported last: function, file and line."""
        return [one.place for worker in self.workers for one in worker.calls.values() if one.place]

    async def start(self) -> None:
        """Have the first worker load the workflow. Raises ConfigError or UserCodeError if it cannot."""
        await self.take()

    async def play(
        self, start: StartEpisode, run_s: float, model: ModelAccess, record: TokensSoFar
    ) -> tuple[Sample, float | None]:
        """The sample that the workflow returned, unchecked but for its types, and the temperature of its turns. Raises
        MemberFailed, UserCodeError and other errors of myxa's by what the workflow did, Interrupted when the engine had
        to abort, and what the engine raises. `run_s`: for the phase `run`."""
        limits = msgspec.structs.replace(self._limits, run_s=run_s)
        worker = await self.take()
        self._number += 1
        number, running = self._number, _Running()
        worker.calls[number] = running
        is_over = False
        try:
            await _sent(worker, msgspec.structs.replace(start, episode=number, limits=limits))
            async with asyncio.timeout(limits.total_s + SLACK_S):
                end = await self._until_end(worker, running, model, record)
            is_over = True
        except TimeoutError:
            worker.kill()
            raise _gone(f"its worker process {worker.pid} did not end it within its limits") from None
        except WorkerGone as gone:
            is_over = True
            culprit = gone.episode if isinstance(gone, _Lost) else -1
            raise _gone(str(gone), is_bystander=culprit not in (-1, number)) from None
        finally:
            worker.calls.pop(number, None)
            if not is_over and worker.is_alive:
                worker.ending.add(number)
                with contextlib.suppress(WorkerGone):
                    await worker.send(CancelEpisode(number))
            self.mind(worker)
        if isinstance(end, EpisodeFailed):
            raise _error_of(end)
        return _sample_of(end), end.temperature

    async def _until_end(
        self, worker: WorkflowWorker, running: _Running, model: ModelAccess, record: TokensSoFar
    ) -> EpisodeDone | EpisodeFailed:
        drawing: asyncio.Task[None] | None = None
        turn = 0
        try:
            while True:
                event = await running.inbox.get()
                if isinstance(event, AskModel):
                    await _cancelled(drawing)
                    record.asked(event)
                    turn = event.turn
                    drawing = asyncio.ensure_future(self._draw(event, running, model, record.under_way))  # noqa: TID251 -- ended below
                elif isinstance(event, DrawnTurn):
                    if event.turn != turn:
                        continue  # the workflow gave it up and has asked for another one
                    if event.finish == "abort" and not model.goes_on():
                        raise Interrupted(record.so_far())
                    record.under_way = [event.segment]
                    await worker.send(event)
                elif isinstance(event, Exception):
                    raise event
                else:
                    if event.is_hanging:
                        worker.is_retired = True
                    if event.teardown:
                        _log.warning("workflow %s: its %s", self.name, event.teardown)
                    return event
        finally:
            await _cancelled(drawing)

    async def _draw(self, ask: AskModel, running: _Running, model: ModelAccess, under_way: list[TokenSegment]) -> None:
        running.place = ""
        try:
            segment, finish = await drawn(model.generate, ask.request, stops_of(ask.stop, self._tokenizer), under_way)
        except Exception as error:  # noqa: BLE001 -- raised by the episode that asked
            running.inbox.put_nowait(error)
        else:
            ids, logprobs, versions = segment.ids, segment.logprobs, segment.versions
            answer = DrawnTurn(
                episode=ask.episode, turn=ask.turn, ids=ids, logprobs=logprobs, versions=versions, finish=finish
            )
            running.inbox.put_nowait(answer)

    async def listen(self, worker: WorkflowWorker) -> None:
        gone = _Lost(*await self._until_gone(worker))
        for running in worker.calls.values():
            running.inbox.put_nowait(gone)
        if not worker.is_retired and not self.is_closed:
            _log.warning("worker process %d of workflow %s ended: %s", worker.pid, self.name, gone)

    async def _until_gone(self, worker: WorkflowWorker) -> tuple[str, int]:
        """Pass on its messages; returns how it ended, and the episode to blame; negative: unknown."""
        silent_s, words, culprit = self._silent_s, "", -1
        while True:
            try:
                async with asyncio.timeout(silent_s):
                    message = from_worker.decode(await worker.receive())
            except TimeoutError:
                worker.kill()
                return f"it said nothing for {silent_s:g} s: {await worker.how_it_ended()}", -1
            except (SpokeGarbage, msgspec.MsgspecError, ValueError) as garbage:
                return f"it wrote into its own pipe ({garbage}) and was killed", -1
            except WorkerGone as gone:
                return f"{words}{gone}", culprit
            if isinstance(message, EpisodeStuck):
                words, culprit = f"its code cannot be interrupted at {message.place}: ", message.episode
            elif isinstance(message, Waits):
                for number, running in worker.calls.items():
                    running.place = message.places.get(number, "")
                self.on_waits()
            else:
                if (running := worker.calls.get(message.episode)) is not None:
                    running.inbox.put_nowait(message)
                elif isinstance(message, EpisodeDone | EpisodeFailed):
                    worker.ending.discard(message.episode)
                    worker.is_retired |= message.is_hanging
                    self.mind(worker)


def make_pool(config: RunConfig, tokenizer: Tokenizer) -> WorkflowPool:
    """What runs the workflow of this run, which is the user's own."""
    of = config.rollout
    spec = WorkflowSpec(
        workflow=of.workflow,
        args=of.workflow_args,
        max_turns=of.max_turns,
        max_block_s=of.max_block_s,
        model_path=config.model.path,
        apply_chat_template=config.data.apply_chat_template,
        chat_template_kwargs=config.data.chat_template_kwargs,
        date=config.data.date,
    )
    limits = PhaseLimits(
        setup_s=of.setup_timeout_s,
        run_s=of.timeout_s,
        finalize_s=of.finalize_timeout_s,
        score_s=of.score_timeout_s,
        teardown_s=of.teardown_timeout_s,
    )
    return WorkflowPool(spec, limits, tokenizer, max_workers=of.workers)


async def _sent(worker: WorkflowWorker, start: StartEpisode) -> None:
    try:
        await worker.send(start)
    except (ValueError, TypeError) as error:
        raise UserCodeError(
            f"workflow cannot be given its prompt: {error}", remedy="give the row less metadata"
        ) from error


def _sample_of(end: EpisodeDone) -> Sample:
    try:
        return sample_decoder.decode(end.sample)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise UserCodeError(
            f"workflow returned a sample that cannot be checked: {error}",
            remedy="end it with `return ctx.episode.sample()`",
        ) from None


def _error_of(failed: EpisodeFailed) -> MyxaError:
    kind = getattr(errors, failed.error, None) if failed.error else None
    if isinstance(kind, type) and issubclass(kind, MyxaError) and kind is not MemberFailed:
        return kind(failed.words, remedy=failed.remedy)
    if failed.kind == "user-code":
        return UserCodeError(f"workflow {failed.words}", remedy=failed.remedy)
    return MemberFailed(f"workflow {failed.words}", kind=failed.kind, remedy=failed.remedy)


def _gone(how: str, *, is_bystander: bool = False) -> MemberFailed:
    return MemberFailed(
        f"workflow lost its worker process: {how}",
        kind="environment",
        remedy="see the actor's log: what it did there",
        is_bystander=is_bystander,
    )


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task})
