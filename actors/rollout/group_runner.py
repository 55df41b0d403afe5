"""From an assignment to a finished group: workflows run side by side, and each sample is rewarded as soon as it is
finished, or all of them together once the last one is.

`GroupSoFar` is what a running group has at any moment, for another actor that must continue it. `Stretches` records
when the first and the last member of a group reached each stage, for the trace.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from ...algos.rewards.extraction import opens_thought
from ...algos.rewards.outcome import RewardOutcome
from ...core.activity import Hop
from ...core.clock import Clock
from ...core.completions import Completion
from ...core.errors import (
    DataError,
    DeadlyReward,
    EngineError,
    FailureKind,
    MemberFailed,
    MyxaError,
    PromptTooLong,
    ReferenceFailed,
    RequestRefused,
    RewardError,
    TemplateError,
    UserCodeError,
)
from ...core.messages import Assignment, DropReason
from ...core.protocols import Delta, GenerateRequest, Tokenizer
from ...core.samples import I32, Group, Prompt, Sample
from ..stream_checks import checked_sample
from ..user_code.calls import TookTooLong, UserRaised, within
from ..user_code.functions import what_was_raised
from ..workflows.episode import Episode, Interrupted, ModelAccess, Workflow, WorkflowContext, closing
from ..workflows.failures import FAILURE_KINDS, RETRIED
from ..workflows.pool import EpisodeStart, TokensSoFar, WorkflowPool
from ..workflows.turn_renderer import TurnRenderer
from .judging import Reference, ScoredOutcome, Scorer

T = TypeVar("T")


Member = tuple[Sample, ScoredOutcome | None] | Interrupted | MemberFailed
"""The end of one member of a group. No outcome: it is judged together with the others; MemberFailed: its environment
failed for good, and the group continues without it."""
MAX_LOST = 10
"""Processes that a member may lose to others."""
RETRY_AFTER_S = 0.5
"""Before a member is tried again; doubled each time."""
MARK_IDS = 16
"""The mark that opens a thought, and the white space behind it, are no longer."""
_LINE = re.compile(r":\d+\)$")


class NoEngine:
    """In place of an engine when the workflow needs none (demonstrations)."""

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
    env_s: float = 0.0
    """That workflows took beside waiting for the model."""
    max_env_s: float = 0.0
    """Of one sample."""

    def take(self) -> RunnerStats:
        """The sums so far; starts again from zero."""
        taken = copy(self)
        self.num_tokens = self.num_samples = self.num_truncated = 0
        self.reward_s = self.env_s = self.max_env_s = 0.0
        return taken


@dataclass(slots=True)
class FailureCounts:
    """Of workflows, since the actor began."""

    by_kind: Counter[FailureKind] = field(default_factory=Counter["FailureKind"])
    num_retried: int = 0
    num_masked: int = 0

    def gauges(self) -> dict[str, float]:
        kinds = {f"rollout/failures/{kind}": float(self.by_kind[kind]) for kind in FAILURE_KINDS}
        return kinds | {"rollout/num_retried": float(self.num_retried), "rollout/num_masked": float(self.num_masked)}


@dataclass(slots=True)
class Partial(Exception):
    """The group was interrupted; `samples` are what there is, finished members included."""

    samples: tuple[Sample, ...] = field(default_factory=tuple)
    cause: EngineError | None = None
    """What the engine failed with; None: it had to stop."""


@dataclass(slots=True)
class GroupLoad:
    """What this actor's groups are doing, for the time accounting: who is waited for."""

    generating: int = 0
    rewarding: int = 0
    waiting: int = 0
    """Samples whose workflow does anything but wait for the model."""
    place: str = ""
    """Where most of these are: function and file."""


@dataclass(frozen=True, slots=True)
class _Task:
    """One member of a group."""

    assignment: Assignment
    index: int
    prompt_ids: I32
    recorded: Sample | None
    stretches: Stretches
    made: GroupSoFar
    num_retries: int = 0
    """Attempts of this actor that its environment failed."""
    num_before: int = 0
    """Attempts of this actor before this one, whatever ended them."""

    @property
    def where(self) -> str:
        prompt = self.assignment.prompt
        return f"(group {prompt.group_id}, sample {self.index}, row {prompt.row} of {prompt.source})"


class GroupRunner:
    """Runs groups. One per rollout actor; `run` may be called concurrently."""

    def __init__(
        self,
        *,
        workflow: Workflow | WorkflowPool,
        scorer: Scorer,
        tokenizer: Tokenizer,
        model: ModelAccess,
        max_turns: int,
        clock: Clock,
        on_load: Callable[[GroupLoad], None],
        on_hop: Callable[[Hop, int, float, float], None],
        vocab_size: int | None = None,
    ) -> None:
        """`workflow`: one that never holds the loop, or the processes that run it. `model.sampling` is replaced by what
        each assignment asks for. `on_hop(hop, group, began, lasted)`: all of a group was generated, or rewarded;
        seconds, the first of the wall clock."""
        self._workflow = workflow
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._renderer = TurnRenderer(tokenizer)
        self.model = model
        self._max_turns = max_turns
        self._clock = clock
        self._on_load = on_load
        self._on_hop = on_hop
        self._vocab_size = vocab_size
        self.reference: Reference | None = None
        """Gives the log-probs of every finished sample; None: they are not needed."""
        self.timeout_s = 600.0
        """How long a workflow may take for one sample that it begins from now on."""
        self.max_retries = 2
        """How often a member is tried again whose environment failed."""
        self.zero_on_error = False
        """Whether a member that fails by its policy gets reward 0."""
        self.run_name = ""
        """For session ids."""
        self.on_failure: Callable[[FailureKind, str], None] = lambda kind, words: None
        """Called for each failure of a workflow: its kind, and in words what becomes of the member."""
        self.failures = FailureCounts()
        self._load = GroupLoad()
        self._made: dict[int, GroupSoFar] = {}
        """Of groups that run."""
        self.stats = RunnerStats()
        if isinstance(workflow, WorkflowPool):
            self._load.place = workflow.name
            workflow.on_waits = self._hear_waits

    def judged_by(self, scorer: Scorer) -> GroupRunner:
        """This one, load and sums included, with other rewards and no reference: for an evaluation."""
        other = copy(self)
        other._scorer, other.reference = scorer, None
        return other

    def so_far(self, group_id: int) -> tuple[Sample, ...]:
        made = self._made.get(group_id)
        return () if made is None else made.samples()

    def has(self, group_id: int) -> bool:
        return group_id in self._made

    async def run(self, assignment: Assignment) -> Group:
        """All members of one group, rewarded. Raises Partial when generation was interrupted or the engine failed,
        PromptTooLong for a prompt that does not fit, DataError for one that cannot be rendered, TemplateError for a
        reply that the chat template cannot write, UserCodeError for a workflow or reward that failed, MemberFailed if
        no member is left or the policy made one fail, RequestRefused for a request that no engine can serve."""
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
            finished = [d for d in done if isinstance(d, tuple)]
            interrupted = [d.partial for d in done if isinstance(d, Interrupted)]
            masked = [d for d in done if isinstance(d, MemberFailed)]
            if masked and not finished and not interrupted:
                raise masked[0]
            outcomes: Sequence[ScoredOutcome] = (
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
            num_masked=len(masked),
        )

    async def _member(self, task: _Task) -> Member:
        outcome: ScoredOutcome | None = None
        try:
            with task.stretches.of("generate"):
                sample = await self._tried(task)
        except Interrupted as interrupted:
            return interrupted
        except MemberFailed as failed:
            if (kept := self._settled(task, failed)) is None:
                return failed
            sample, outcome = kept, RewardOutcome(0.0)
        self.stats.num_tokens += int(sample.loss_mask.sum())
        self.stats.num_samples += 1
        self.stats.num_truncated += sample.finish == "length"
        prompt = task.assignment.prompt
        if self.reference is not None:
            with task.stretches.of("reward"):
                sample = await self._referenced(self.reference, task, sample)
        if self._scorer.judges_groups or outcome is not None:
            return sample, outcome
        with task.stretches.of("reward"):
            return sample, await self._rewarded(self._scorer.score(self._completion(prompt, sample)))

    async def _tried(self, task: _Task) -> Sample:
        """The member's sample. A member whose environment failed is tried again, without its tokens. A member whose
        process was ended by another member's workflow continues from its tokens, and that does not count."""
        num_lost = 0
        while True:
            try:
                return await self._produce(task)
            except MemberFailed as failed:
                if failed.is_bystander and num_lost < MAX_LOST:
                    num_lost += 1
                    task = replace(task, recorded=task.made.of(task.index), num_before=task.num_before + 1)
                    continue
                if failed.kind not in RETRIED or task.num_retries >= self.max_retries:
                    raise
                self._failed(failed, f"it is tried again: {failed.message}")
                self.failures.num_retried += 1
            except UserCodeError as error:
                self._failed(error, f"its group is dropped: {error.message}")
                raise
            task.made.again(task.index)
            pause_s = RETRY_AFTER_S * 2**task.num_retries
            task = replace(task, recorded=None, num_retries=task.num_retries + 1, num_before=task.num_before + 1)
            await asyncio.sleep(pause_s)

    def _settled(self, task: _Task, failed: MemberFailed) -> Sample | None:
        """The sample, which gets reward 0, of a member whose workflow failed for good; None: it is masked. Raises
        `failed` where it costs the group."""
        if failed.kind in RETRIED:
            self._failed(failed, f"it is masked: {failed.message}")
            self.failures.num_masked += 1
            task.made.again(task.index)
            return None
        sample = task.made.of(task.index)
        if not self.zero_on_error or sample is None or not sample.loss_mask.any():
            self._failed(failed, f"its group is dropped: {failed.message}")
            raise failed
        self._failed(failed, f"it gets reward 0: {failed.message}")
        sample = msgspec.structs.replace(sample, finish="stop", reward=0.0)
        task.made.finished(sample)
        return sample

    def _failed(self, error: MemberFailed | UserCodeError, words: str) -> None:
        kind = error.kind if isinstance(error, MemberFailed) else "user-code"
        self.failures.by_kind[kind] += 1
        self.on_failure(kind, words)

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
        self, prompt: Prompt, finished: Sequence[tuple[Sample, ScoredOutcome | None]], stretches: Stretches
    ) -> Sequence[ScoredOutcome]:
        """Of all members: their own, or those of the group that they are."""
        own = [outcome for _, outcome in finished if outcome is not None]
        if not self._scorer.judges_groups:
            return own
        with stretches.of("reward"):
            judged = await self._rewarded(
                self._scorer.score_group([self._completion(prompt, one) for one, _ in finished])
            )
        return [own or of_group for (_, own), of_group in zip(finished, judged, strict=True)]

    async def _produce(self, task: _Task) -> Sample:
        prompt, index = task.assignment.prompt, task.index
        model = replace(
            self.model,
            sampling=task.assignment.sampling,
            request_prefix=f"{self.model.request_prefix}a{task.assignment.attempt}.{_retry(task.num_before)}",
        )
        if isinstance(self._workflow, WorkflowPool):
            sample, temperature = await self._in_worker(self._workflow, task, model)
        else:
            sample, temperature = await self._in_loop(self._workflow, task, model)
        checked = checked_sample(sample, prompt, index, temperature=temperature, vocab_size=self._vocab_size)
        task.made.finished(checked)
        return checked

    async def _in_loop(self, workflow: Workflow, task: _Task, model: ModelAccess) -> tuple[object, float | None]:
        prompt, timeout_s = task.assignment.prompt, self.timeout_s
        episode = Episode(
            prompt=prompt,
            index=task.index,
            tokenizer=self._tokenizer,
            model=model,
            renderer=self._renderer,
            prompt_ids=task.prompt_ids,
            recorded=task.recorded,
        )
        task.made.begun(task.index, episode)
        context = WorkflowContext(
            episode=episode,
            tokenizer=self._tokenizer,
            max_turns=self._max_turns,
            index=task.index,
            session_id=self._session_id(task),
            attempt=_attempt(task),
        )

        async def call() -> object:
            return await workflow(context, prompt)

        self._note(generating=1)
        try:
            return await within(call(), timeout_s), episode.temperature
        except (Interrupted, MyxaError):
            raise
        except TookTooLong as late:
            more = ", and still runs although it was cancelled" if late.hangs else ""
            raise UserCodeError(
                f"workflow did not finish within {timeout_s:g} s{more} {task.where}",
                remedy="bound its waits, or raise rollout.timeout_s",
            ) from late
        except Exception as err:
            cause = err.cause if isinstance(err, UserRaised) else err
            raise UserCodeError(
                f"workflow raised {what_was_raised(cause)} {task.where}", remedy="mend the workflow function"
            ) from err
        finally:
            self._note(generating=-1)

    async def _in_worker(self, pool: WorkflowPool, task: _Task, model: ModelAccess) -> tuple[object, float | None]:
        record, began_s, model_s = TokensSoFar(task.recorded), self._clock.monotonic(), 0.0
        task.made.begun(task.index, record)

        async def generate(request: GenerateRequest) -> AsyncIterator[Delta]:
            nonlocal model_s
            asked_s = self._clock.monotonic()
            self._note(generating=1, waiting=-1)
            try:
                async with closing(model.generate(request)) as deltas:
                    async for delta in deltas:
                        yield delta
            finally:
                model_s += self._clock.monotonic() - asked_s
                self._note(generating=-1, waiting=1)

        start = EpisodeStart(
            prompt=task.assignment.prompt,
            index=task.index,
            prompt_ids=task.prompt_ids,
            recorded=task.recorded,
            session_id=self._session_id(task),
            attempt=_attempt(task),
            run_s=self.timeout_s,
        )
        self._note(waiting=1)
        try:
            return await pool.play(start, replace(model, generate=generate), record)
        except MemberFailed as failed:
            words = f"{failed.message} {task.where}"
            raise MemberFailed(
                words, kind=failed.kind, remedy=failed.remedy, is_bystander=failed.is_bystander
            ) from failed
        except UserCodeError as error:
            raise UserCodeError(f"{error.message} {task.where}", remedy=error.remedy) from error
        finally:
            self._note(waiting=-1)
            env_s = self._clock.monotonic() - began_s - model_s
            self.stats.env_s += env_s
            self.stats.max_env_s = max(self.stats.max_env_s, env_s)

    def _session_id(self, task: _Task) -> str:
        kind = "" if task.assignment.attempt >= 0 else f"eval{-task.assignment.attempt}."
        return f"{self.run_name}.{kind}{task.assignment.prompt.group_id}.{task.index}"

    def _hear_waits(self) -> None:
        """Note where workflows are, for the account of the actor's time."""
        assert isinstance(self._workflow, WorkflowPool)
        places = Counter(_LINE.sub(")", place) for place in self._workflow.places())
        self._load.place = places.most_common(1)[0][0] if places else self._workflow.name
        self._on_load(self._load)

    def _completion(self, prompt: Prompt, sample: Sample) -> Completion:
        tail = self._tokenizer.decode(_before_last_turn(sample), skip_special=False)
        return _completion(prompt, sample, begins_in_thought=opens_thought(tail))

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

    def _note(self, *, generating: int = 0, rewarding: int = 0, waiting: int = 0) -> None:
        self._load.generating += generating
        self._load.rewarding += rewarding
        self._load.waiting += waiting
        self._on_load(self._load)


def _attempt(task: _Task) -> int:
    """How often the member was begun before; an assignment's first attempt is 1, an evaluation's negative."""
    return max(task.assignment.attempt - 1, 0) + task.num_before


def _retry(num_before: int) -> str:
    return f"r{num_before}." if num_before else ""


def _is_same(one: Sample, other: Sample) -> bool:
    """Whether they are of the same tokens, by the same policy at the same temperature."""
    return one.temperature == other.temperature and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("prompt_ids", "response_ids", "loss_mask")
    )


def _completion(prompt: Prompt, sample: Sample, *, begins_in_thought: bool) -> Completion:
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
        begins_in_thought=begins_in_thought,
    )


def _before_last_turn(sample: Sample) -> list[int]:
    """The last ids that the model was given."""
    mask = sample.loss_mask.tobytes()
    start = mask.rfind(0, 0, mask.rfind(1) + 1) + 1
    given = np.concatenate([sample.prompt_ids[-MARK_IDS:], sample.response_ids[:start]])
    return given[-MARK_IDS:].tolist()


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
    (MemberFailed, "environment-error"),
    (MyxaError, "workflow-error"),
)


def drop_reason(error: MyxaError) -> DropReason:
    """Ledger reason for a group that failed with `error`: the first row of the table that fits."""
    if isinstance(error, MemberFailed) and error.kind not in RETRIED:
        return "policy-error"
    return next(reason for kind, reason in _REASONS if isinstance(error, kind))


class GroupSoFar:
    """See the module's head."""

    def __init__(self, recorded: dict[int, Sample]) -> None:
        """`recorded`: index -> what an earlier attempt left."""
        self._recorded = recorded
        self._episodes: dict[int, Episode | TokensSoFar] = {}
        self._finished: dict[int, Sample] = {}

    def begun(self, index: int, episode: Episode | TokensSoFar) -> None:
        self._episodes[index] = episode

    def finished(self, sample: Sample) -> None:
        self._finished[sample.index] = sample

    def again(self, index: int) -> None:
        """That member starts over: its tokens are of no use."""
        self._recorded.pop(index, None)
        self._episodes.pop(index, None)

    def of(self, index: int) -> Sample | None:
        """What there is of an unfinished member; None: nothing."""
        episode = self._episodes.get(index)
        return None if episode is None or episode.is_empty else episode.so_far()

    def samples(self) -> tuple[Sample, ...]:
        """Members with at least one token, finished or not."""
        begun = {i: e.so_far() for i, e in self._episodes.items() if not e.is_empty}
        known = self._recorded | begun | self._finished
        return tuple(known[index] for index in sorted(known) if known[index].response_ids.size)


class Stretches:
    """Of one group."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.found: dict[Hop, tuple[float, float]] = {}
        """Hop -> begin and end on the monotonic clock."""

    @contextmanager
    def of(self, hop: Hop) -> Generator[None]:
        began_s = self._clock.monotonic()
        try:
            yield
        finally:
            first_s = self.found[hop][0] if hop in self.found else began_s
            self.found[hop] = (min(first_s, began_s), self._clock.monotonic())

    def wall_s(self, monotonic_s: float) -> float:
        """That moment on the wall clock."""
        return self._clock.wall() - self._clock.monotonic() + monotonic_s
