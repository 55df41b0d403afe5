"""Workflows of the user's run in worker processes; this is the actor's side: which worker gets an episode, turns of the
model for it, and what became of it.

Several episodes share a worker. One whose code hangs is ended with its limit, if need be with its worker; the others
continue in another one from their tokens. Teardown runs until the process ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ...core import errors
from ...core.config import RunConfig
from ...core.errors import MemberFailed, MyxaError, UserCodeError
from ...core.protocols import Delta, Tokenizer
from ...core.samples import Sample, joined_experts, joined_kept
from ..models.tokenizer import FolderTokenizer
from ..user_code.process import Call, Lost, WorkerPool
from .episode import Interrupted, ModelAccess, ReachedModel, draw_turn, joined, stops_of
from .timeline import WaitNote
from .worker_messages import (
    AskModel,
    DrawnTurn,
    EpisodeDone,
    EpisodeFailed,
    PhaseLimits,
    StartEpisode,
    WorkflowSpec,
    from_worker,
    samples_decoder,
)

_log = logging.getLogger(__name__)

EPISODES_PER_WORKER = 32
"""Before a further worker is started."""
SLACK_S = 15.0
"""For a worker to say how an episode ended whose limits are over."""


class TokensSoFar:
    """What a rollout in a worker has, at any moment."""

    def __init__(self, recorded: Sequence[Sample]) -> None:
        self._closed = {sample.branch: sample for sample in recorded}
        self.under_way: dict[int, list[Delta]] = {}
        """Turns behind those samples, by their numbers."""

    def asked(self, ask: AskModel) -> list[Delta]:
        """A turn is to be drawn: what there is of it, which grows."""
        self._closed[ask.so_far.branch] = ask.so_far
        self.under_way[ask.so_far.branch] = under_way = [ask.start]
        return under_way

    def so_far(self) -> tuple[Sample, ...]:
        """Tokens of the turns that are drawn included; () while there are none."""
        return tuple(map(self._with_turn, self._closed.values()))

    def _with_turn(self, before: Sample) -> Sample:
        if before.branch not in self.under_way:
            return before
        turn = joined(self.under_way[before.branch])
        kept = joined_kept([(before.kept_rows, len(before.response_ids)), (turn.kept, len(turn.output_ids))])
        return msgspec.structs.replace(
            before,
            response_ids=np.concatenate([before.response_ids, turn.output_ids]).astype(np.int32, copy=False),
            logprobs=np.concatenate([before.logprobs, turn.logprobs]).astype(np.float32, copy=False),
            loss_mask=np.concatenate([before.loss_mask, np.ones(len(turn.output_ids), np.uint8)]),
            versions=np.concatenate([before.versions, turn.versions]).astype(np.int32, copy=False),
            kept=None if kept is None else kept.ravel(),
            experts=joined_experts([before.experts, turn.experts]),
            finish="abort",
        )


class WorkflowPool(WorkerPool):
    """At most `max_workers` processes, started as they are needed; `play` may be called concurrently."""

    module = "myxa.actors.gateway.clients"

    def __init__(
        self,
        spec: WorkflowSpec,
        limits: PhaseLimits,
        tokenizer: Tokenizer,
        *,
        max_workers: int,
        max_calls: int = EPISODES_PER_WORKER,
        models: Mapping[str, ReachedModel] | None = None,
    ) -> None:
        """`max_calls`: episodes of a worker, before a further one. `models`: of the run's own."""
        super().__init__(
            self.module,
            spec,
            f'workflow "{spec.workflow}"',
            from_worker,
            max_workers=max_workers,
            max_calls=max_calls,
            grace_s=limits.teardown_s,
            max_block_s=spec.max_block_s,
        )
        self.name = spec.workflow.rpartition("/")[2]
        self._limits = limits
        self._tokenizer = tokenizer
        self._models = models or {}

    async def start(self) -> None:
        """Have the first worker load the workflow. Raises ConfigError or UserCodeError if it cannot."""
        await self.take()

    async def play(
        self, start: StartEpisode, run_s: float, model: ModelAccess, record: TokensSoFar
    ) -> tuple[tuple[Sample, ...], dict[int, float]]:
        """The samples that the workflow returned, unchecked but for their types, and the temperatures of their turns.
        Raises MemberFailed, UserCodeError and other errors of myxa's by what the workflow did, Interrupted when the
        engine had to abort, and what the engine raises. `run_s`: for the phase `run`."""
        limits = msgspec.structs.replace(self._limits, run_s=run_s)
        async with self.calling() as call:
            try:
                await _sent(call, msgspec.structs.replace(start, call=call.number, limits=limits))
                async with asyncio.timeout(limits.total_s + SLACK_S):
                    end = await self._until_end(call, model, record)
            except TimeoutError:
                call.worker.kill(call.number)
                how = f"its worker process {call.worker.pid} did not end it within its limits"
                raise _gone(self.what_of(start, call), how) from None
            except Lost as lost:
                is_bystander = lost.culprit not in (-1, call.number)
                raise _gone(self.what_of(start, call), str(lost), is_bystander=is_bystander) from None
        if isinstance(end, EpisodeFailed):
            raise _error_of(end, self.what_of(start, call))
        return _samples_of(end), end.temperatures

    def what_of(self, start: StartEpisode, call: Call) -> str:
        """The subject of what is said of an episode's failure."""
        return "workflow"

    async def _until_end(self, call: Call, model: ModelAccess, record: TokensSoFar) -> EpisodeDone | EpisodeFailed:
        drawing: dict[tuple[str, int], asyncio.Task[None]] = {}  # by model, and the numbers of samples
        try:
            while True:
                event: AskModel | WaitNote | EpisodeDone | EpisodeFailed | Exception = await call.inbox.get()
                if isinstance(event, AskModel):
                    key = (event.model, event.so_far.branch)
                    await _cancelled(drawing.pop(key, None))  # given up by the workflow
                    under_way = [event.start] if event.model else record.asked(event)
                    turn = self._draw(event, call, model, record, under_way)
                    drawing[key] = asyncio.ensure_future(turn)  # noqa: TID251 -- ended below
                elif isinstance(event, WaitNote):
                    model.on_wait(event)
                elif isinstance(event, Exception):
                    raise event
                else:
                    if event.teardown:
                        _log.warning("%s: its %s", self.what, event.teardown)
                    return event
        finally:
            for task in drawing.values():
                await _cancelled(task)

    async def _draw(
        self, ask: AskModel, call: Call, model: ModelAccess, record: TokensSoFar, under_way: list[Delta]
    ) -> None:
        """By the policy, or by a model of the run's own, of which nothing is recorded."""
        generate = self._models[ask.model].access.generate if ask.model else model.generate
        stops = stops_of(() if ask.model else ask.request.sampling.stop, self._tokenizer)
        try:
            segment, finish = await draw_turn(generate, ask.request, stops, under_way)
            if finish == "abort" and not ask.model and not model.goes_on():
                raise Interrupted(record.so_far())
            under_way[:] = [segment]
            await call.worker.send(DrawnTurn(call=call.number, turn=ask.turn, segment=segment, finish=finish))
        except Exception as error:  # noqa: BLE001 -- raised by the episode that asked
            call.inbox.put_nowait(error)


def spec_of(config: RunConfig, tokenizer: FolderTokenizer, models: Mapping[str, ReachedModel]) -> WorkflowSpec:
    settings = config.rollout
    return WorkflowSpec(
        workflow=settings.workflow,
        args=settings.workflow_args,
        max_turns=settings.max_turns,
        max_block_s=settings.max_block_s,
        tokenizer=tokenizer.parts(),
        models={name: model.spec for name, model in models.items()},
    )


def make_pool(config: RunConfig, tokenizer: FolderTokenizer, models: Mapping[str, ReachedModel]) -> WorkflowPool:
    settings = config.rollout
    limits = PhaseLimits(
        setup_s=settings.setup_timeout_s,
        run_s=settings.timeout_s,
        finalize_s=settings.finalize_timeout_s,
        score_s=settings.score_timeout_s,
        teardown_s=settings.teardown_timeout_s,
    )
    spec = spec_of(config, tokenizer, models)
    return WorkflowPool(spec, limits, tokenizer, max_workers=settings.workers, models=models)


async def _sent(call: Call, start: StartEpisode) -> None:
    try:
        await call.worker.send(start)
    except (ValueError, TypeError) as error:
        call.is_over = True  # it has not begun
        fault = f"workflow cannot be given its prompt: {error}"
        raise UserCodeError(fault, remedy="give the row less metadata") from error


def _samples_of(end: EpisodeDone) -> tuple[Sample, ...]:
    try:
        return samples_decoder.decode(end.samples)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        fault = f"workflow returned a sample that cannot be checked: {error}"
        raise UserCodeError(fault, remedy="end it with `return ctx.episode.sample()`") from None


def _error_of(failed: EpisodeFailed, subject: str) -> MyxaError:
    kind = getattr(errors, failed.error, None) if failed.error else None
    if isinstance(kind, type) and issubclass(kind, MyxaError) and kind is not MemberFailed:
        return kind(failed.words, remedy=failed.remedy)
    if failed.kind == "user-code":
        return UserCodeError(f"{subject} {failed.words}", remedy=failed.remedy)
    return MemberFailed(f"{subject} {failed.words}", kind=failed.kind, remedy=failed.remedy)


def _gone(subject: str, how: str, *, is_bystander: bool = False) -> MemberFailed:
    return MemberFailed(
        f"{subject} lost its worker process: {how}",
        kind="environment",
        remedy="see the actor's log: what it did there",
        is_bystander=is_bystander,
    )


async def _cancelled(drawing: asyncio.Task[None] | None) -> None:
    if drawing is not None and not drawing.done():
        drawing.cancel()
        await asyncio.wait({drawing})
