"""From an assignment to a finished group: workflows side by side, each sample rewarded as soon as it is finished,
or all of them together once the last one is.

Knows workflows, rewards and the engine's contract; knows nothing of the ledger, of admission or of other actors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from ...core.chaos import reached
from ...core.clock import Clock
from ...core.completions import Completion
from ...core.errors import (
    DataError,
    DeadlyReward,
    EngineError,
    MyxaError,
    PromptTooLong,
    ReferenceFailed,
    RequestRefused,
    RewardError,
    TemplateError,
    UserCodeError,
)
from ...core.flow_sampling import Hop
from ...core.messages import Assignment, DropReason
from ...core.protocols import Delta, GenerateRequest, Tokenizer
from ...core.samples import I32, Group, Prompt, Sample
from ..user_call import TookTooLong, UserRaised, within
from ..user_code import what_was_raised
from ..workflows.context import Workflow, WorkflowContext
from ..workflows.episode import Episode, Interrupted, ModelAccess
from ..workflows.turn_renderer import TurnRenderer
from .group_so_far import GroupSoFar
from .group_stretches import Stretches
from .judging import Outcome, Reference, Scorer
from .sample_checks import checked_sample

T = TypeVar("T")


Member = tuple[Sample, Outcome | None] | Interrupted
"""What becomes of one member of a group. No outcome: it is judged together with the others."""


class NoEngine:
    """Stands where an engine would be when the workflow needs none (demonstrations)."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Always raises EngineError."""
        raise EngineError(
            f"request {request.request_id}: this rollout actor has no engine",
            remedy='set roles.rollout.kind to "embedded" or "sglang", or use workflow = "demonstration"',
        )


@dataclass(slots=True)
class RunnerStats:
    """Running sums since the last `take`."""

    num_tokens: int = 0
    num_samples: int = 0
    num_truncated: int = 0
    reward_s: float = 0.0

    def take(self) -> RunnerStats:
        """The sums so far; starts again from zero."""
        taken = RunnerStats(self.num_tokens, self.num_samples, self.num_truncated, self.reward_s)
        self.num_tokens = self.num_samples = self.num_truncated = 0
        self.reward_s = 0.0
        return taken


@dataclass(slots=True)
class Partial(Exception):
    """The group was interrupted; `samples` are what there is, finished members included."""

    samples: tuple[Sample, ...] = field(default_factory=tuple)
    cause: EngineError | None = None
    """What the engine failed with; None: it was told to stop."""


@dataclass(slots=True)
class Load:
    """What this actor's groups are doing, for the time accounting: who is waited for."""

    generating: int = 0
    rewarding: int = 0


@dataclass(frozen=True, slots=True)
class _Task:
    """One member of a group."""

    assignment: Assignment
    index: int
    prompt_ids: I32
    recorded: Sample | None
    stretches: Stretches
    made: GroupSoFar


class GroupRunner:
    """Runs groups. One per rollout actor; `run` may be called concurrently."""

    def __init__(
        self,
        *,
        workflow: Workflow,
        scorer: Scorer,
        tokenizer: Tokenizer,
        model: ModelAccess,
        max_turns: int,
        clock: Clock,
        on_load: Callable[[Load], None],
        on_hop: Callable[[Hop, int, float, float], None],
        vocab_size: int | None = None,
    ) -> None:
        """`model.sampling` is replaced by what each assignment asks for. `on_hop(hop, group, began, lasted)`: all of a
        group was generated, or rewarded; seconds, the first of the wall clock."""
        self._workflow = workflow
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._renderer = TurnRenderer(tokenizer)
        self._model = model
        self._max_turns = max_turns
        self._clock = clock
        self._on_load = on_load
        self._on_hop = on_hop
        self._vocab_size = vocab_size
        self.reference: Reference | None = None
        """Who is asked for log-probs of every sample that is finished; None: nobody."""
        self.timeout_s = 600.0
        """How long a workflow may take for one sample that it begins from now on."""
        self._load = Load()
        self._made: dict[int, GroupSoFar] = {}
        """Of groups that run."""
        self.stats = RunnerStats()

    def judged_by(self, scorer: Scorer) -> GroupRunner:
        """This one, load and sums included, with other rewards and no reference: for an evaluation."""
        other = copy(self)
        other._scorer, other.reference = scorer, None
        return other

    @property
    def model(self) -> ModelAccess:
        """How its episodes reach the model."""
        return self._model

    def so_far(self, group_id: int) -> tuple[Sample, ...]:
        """What there is of a group that runs: members with at least one token; empty for any other group."""
        made = self._made.get(group_id)
        return () if made is None else made.samples()

    def has(self, group_id: int) -> bool:
        """Whether that group runs, and is not whole yet."""
        return group_id in self._made

    async def run(self, assignment: Assignment) -> Group:
        """All members of one group, rewarded.

        Raises Partial when generation was interrupted or the engine failed, PromptTooLong for a prompt that does not
        fit, DataError for one that cannot be rendered, TemplateError for a reply that the chat template cannot write,
        UserCodeError for a workflow or reward that failed, RequestRefused for a request that no engine can serve.
        """
        recorded = {s.index: s for s in assignment.partial}
        prompt_ids = self._renderer.prompt(assignment.prompt)
        stretches, made = Stretches(self._clock), GroupSoFar(recorded)
        members = [
            self._member(_Task(assignment, i, prompt_ids, recorded.get(i), stretches, made))
            for i in range(assignment.num_samples)
        ]
        group_id = assignment.prompt.group_id
        self._made[group_id] = made
        try:
            done: list[Member] = await _all_or_first_error(members)
            finished = [d for d in done if not isinstance(d, Interrupted)]
            interrupted = [d.partial for d in done if isinstance(d, Interrupted)]
            outcomes: Sequence[Outcome] = (
                () if interrupted else await self._outcomes(assignment.prompt, finished, stretches)
            )
        except RequestRefused:
            raise
        except EngineError as err:
            raise Partial(made.samples(), err) from err
        finally:
            if self._made.get(group_id) is made:  # held-out prompts may be answered twice at a time
                del self._made[group_id]
            for hop, (began_s, ended_s) in stretches.found.items():
                self._on_hop(hop, group_id, stretches.wall_s(began_s), ended_s - began_s)
        if interrupted:
            raise Partial((*(sample for sample, _ in finished), *interrupted))
        return Group(
            prompt=assignment.prompt,
            samples=tuple(sample for sample, _ in finished),
            rewards=np.asarray([outcome.value for outcome in outcomes], dtype=np.float32),
            reward_parts=tuple(dict(outcome.parts) for outcome in outcomes),
            knobs=assignment.knobs,
        )

    async def _member(self, task: _Task) -> Member:
        try:
            with task.stretches.of("generate"):
                sample = await self._produce(task)
        except Interrupted as interrupted:
            return interrupted
        self.stats.num_tokens += int(sample.loss_mask.sum())
        self.stats.num_samples += 1
        self.stats.num_truncated += sample.finish == "length"
        prompt = task.assignment.prompt
        if self.reference is not None:
            with task.stretches.of("reward"):
                sample = await self._referenced(self.reference, task, sample)
        if self._scorer.judges_groups:
            return sample, None
        with task.stretches.of("reward"):
            reached("rollout.reward")
            return sample, await self._rewarded(self._scorer.score(_completion(prompt, sample)))

    async def _referenced(self, reference: Reference, task: _Task, sample: Sample) -> Sample:
        """With the log-probs of the reference model: those of an earlier attempt, if it was as far with this sample."""
        known = task.recorded
        if known is None or known.reference_logprobs is None or not _is_same(known, sample):
            self._note(rewarding=1)
            try:
                sample = await reference.judged(task.assignment.prompt, sample)
            finally:
                self._note(rewarding=-1)
        else:
            sample = msgspec.structs.replace(sample, reference_logprobs=known.reference_logprobs)
        task.made.finished(sample)
        return sample

    async def _outcomes(
        self, prompt: Prompt, finished: Sequence[tuple[Sample, Outcome | None]], stretches: Stretches
    ) -> Sequence[Outcome]:
        """Of all members: their own, or those of the group that they are."""
        own = [outcome for _, outcome in finished if outcome is not None]
        if not self._scorer.judges_groups:
            return own
        with stretches.of("reward"):
            reached("rollout.reward")
            return await self._rewarded(self._scorer.score_group([_completion(prompt, one) for one, _ in finished]))

    async def _produce(self, task: _Task) -> Sample:
        prompt, index = task.assignment.prompt, task.index
        episode = Episode(
            prompt=prompt,
            index=index,
            tokenizer=self._tokenizer,
            model=replace(
                self._model,
                sampling=task.assignment.sampling,
                request_prefix=f"{self._model.request_prefix}a{task.assignment.attempt}.",
            ),
            renderer=self._renderer,
            prompt_ids=task.prompt_ids,
            recorded=task.recorded,
        )
        task.made.begun(index, episode)
        context = WorkflowContext(episode=episode, tokenizer=self._tokenizer, max_turns=self._max_turns, index=index)
        self._note(generating=1)
        timeout_s = self.timeout_s
        where = f"(group {prompt.group_id}, sample {index}, row {prompt.row} of {prompt.source})"
        try:
            sample = await within(self._call_workflow(context, prompt), timeout_s)
        except (Interrupted, MyxaError):
            raise
        except TookTooLong as late:
            more = ", and goes on although it was cancelled" if late.goes_on else ""
            raise UserCodeError(
                f"workflow did not finish within {timeout_s:g} s{more} {where}",
                remedy="bound its waits, or raise rollout.timeout_s",
            ) from late
        except Exception as err:
            cause = err.cause if isinstance(err, UserRaised) else err
            raise UserCodeError(
                f"workflow raised {what_was_raised(cause)} {where}", remedy="mend the workflow function"
            ) from err
        finally:
            self._note(generating=-1)
        checked = checked_sample(sample, prompt, index, temperature=episode.temperature, vocab_size=self._vocab_size)
        task.made.finished(checked)
        return checked

    async def _call_workflow(self, context: WorkflowContext, prompt: Prompt) -> object:
        return await self._workflow(context, prompt)

    async def _rewarded(self, scoring: Awaitable[T]) -> T:
        started = self._clock.monotonic()
        self._note(rewarding=1)
        try:
            return await scoring
        except RewardError:
            raise
        except UserCodeError as err:
            raise RewardError(err.message, remedy=err.remedy) from err
        finally:
            self.stats.reward_s += self._clock.monotonic() - started
            self._note(rewarding=-1)

    def _note(self, *, generating: int = 0, rewarding: int = 0) -> None:
        self._load.generating += generating
        self._load.rewarding += rewarding
        self._on_load(self._load)


def _is_same(one: Sample, other: Sample) -> bool:
    """Whether they are of the same tokens, by the same policy at the same temperature."""
    return one.temperature == other.temperature and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("prompt_ids", "response_ids", "loss_mask")
    )


def _completion(prompt: Prompt, sample: Sample) -> Completion:
    return Completion(
        group_id=prompt.group_id,
        index=sample.index,
        messages=prompt.messages,
        prompt=prompt.messages[-1].content if prompt.messages else "",
        text=sample.text,
        turns=sample.turns,
        conversation=sample.conversation(),
        label=prompt.label,
        metadata=prompt.metadata,
        finish=sample.finish,
        num_tokens=len(sample.response_ids),
        reward=sample.reward,
        sample_metadata=sample.metadata,
    )


async def _all_or_first_error(members: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first failure cancels the other members and is raised as it is."""
    tasks = [asyncio.ensure_future(m) for m in members]  # noqa: TID251 -- every task is awaited right below
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [t.result() for t in tasks]


_REASONS: tuple[tuple[type[MyxaError], DropReason], ...] = (
    (DeadlyReward, "reward-crash"),
    (ReferenceFailed, "reference-error"),
    (RewardError, "reward-error"),
    (PromptTooLong, "prompt-too-long"),
    (DataError, "data-error"),
    (TemplateError, "template-error"),
    (EngineError, "engine-error"),
    (MyxaError, "workflow-error"),
)


def drop_reason(error: MyxaError) -> DropReason:
    """Ledger reason for a group that failed with `error`: the first row of the table that fits."""
    return next(reason for kind, reason in _REASONS if isinstance(error, kind))
