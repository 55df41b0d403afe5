"""From an assignment to a finished group: workflows run side by side, and each sample is rewarded as soon as it is
finished, or all of them together once the last one is.

A built-in workflow runs in the actor's loop: it does nothing but wait for the engine. All others run in the processes
of a `Pool`; what they return is checked.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from ...algos.rewards.outcome import RewardOutcome
from ...core.activity import Hop
from ...core.clock import Clock
from ...core.completions import Completion
from ...core.config import RewardSettings
from ...core.config.run import GatewaySettings, RolloutSettings
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
from ...core.messages import Assignment, DropReason, RolloutNow, SamplingParams
from ...core.protocols import Delta, GenerateRequest, Tokenizer
from ...core.refs import all_or_first_error
from ...core.samples import I32, ExpertChoices, Group, LossPart, Prompt, Sample
from ...core.timeouts import TIMEOUTS
from ..environments.workflow import EnvironmentPools
from ..rewards.guard import Reference, Scorer
from ..stream_checks import checked_rollout
from ..workflows.episode import Episode, Interrupted, Lasting, ModelAccess, Workflow, WorkflowContext
from ..workflows.failures import FAILURE_KINDS, RETRIED
from ..workflows.pool import TokensSoFar, WorkflowPool
from ..workflows.timeline import DOINGS, Doing, RolloutSpan, Timeline
from ..workflows.turn_renderer import MARK_IDS, TurnRenderer, begins_in_thought
from ..workflows.worker_messages import StartEpisode

T = TypeVar("T")


Pool = WorkflowPool | EnvironmentPools
"""The processes that run a workflow."""
Rollout = tuple[Sample, ...]
"""The samples of one member of a group; the last one is judged."""
MAX_LOST = 10
"""Processes that a member may lose to others."""
MAX_LASTED = 1000
MAX_TOLD = 100
"""Rollouts under way."""


def no_engine(request: GenerateRequest) -> AsyncIterator[Delta]:
    """In place of an engine when the workflow needs none (demonstrations)."""
    raise EngineError(
        f"request {request.request_id}: this rollout actor has no engine",
        remedy='set roles.rollout.kind to "embedded" or "sglang", or use workflow = "demonstration"',
    )


@dataclass(slots=True)
class RolloutOptions:
    """Settings of a rollout actor; those that a knob has change while it runs."""

    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    context_length: int = 0
    """0: the engine's own."""
    report_s: float = 1.0
    through_router: bool = False
    """Requests may be answered by a server that has not loaded the newest version yet."""
    run_dir: str = ""
    """Through which weights may travel."""
    loss_parts: tuple[LossPart, ...] = ("algo",)
    choices: ExpertChoices | None = None
    """Of the model, where samples must have the experts of their tokens."""
    eval_sampling: SamplingParams = field(default_factory=SamplingParams)
    """Of requests with the eval key, where they do not say it."""


@dataclass(slots=True)
class GroupLoad:
    """What an actor's groups are doing, for the time accounting: who is waited for."""

    generating: int = 0
    """Rollouts that do so, or wait for the engine."""
    rewarding: int = 0
    waiting: int = 0
    """For an environment, a tool, an agent, a judge or the workflow's code."""
    labels: Counter[str] = field(default_factory=Counter[str])
    """These, by what they wait for."""
    has_engine: bool = True
    """Else workflows that run in the loop only compute."""
    function: str = ""
    """The workflow; function and file where one of them waits, once it is known."""

    @property
    def place(self) -> str:
        """What most of these wait for."""
        label = max(self.labels, key=lambda name: self.labels[name], default="workflow")
        return self.function if label == "workflow" else label

    def move(self, before: RolloutSpan | None, after: RolloutSpan | None) -> None:
        """A rollout does something else."""
        for span, count in ((before, -1), (after, 1)):
            if span is None:
                continue
            if span.is_at_engine or (span.kind == "workflow" and not self.has_engine):
                self.generating += count
            elif span.kind == "reward":
                self.rewarding += count
            else:
                self.waiting += count
                self.labels[span.label] += count
                if not self.labels[span.label]:
                    del self.labels[span.label]


@dataclass(slots=True)
class Partial(Exception):
    """The group was interrupted; `samples` are what there is, finished members included."""

    samples: tuple[Sample, ...] = field(default_factory=tuple)
    cause: EngineError | None = None
    """What the engine failed with; None: it had to stop."""


@dataclass(slots=True, eq=False)
class GroupMember:
    """One rollout of a running group, as far as it is."""

    assignment: Assignment
    """Of its group, and so are the ids of the prompt."""
    prompt_ids: I32
    index: int
    timeline: Timeline
    recorded: Rollout
    """What an earlier attempt left."""
    num_retries: int = 0
    """Attempts of this actor that its environment failed."""
    num_before: int = 0
    """Attempts of this actor before this one, whatever ended them."""
    so_far: Callable[[], Rollout] = tuple
    """Samples of the attempt that runs."""
    finished: Rollout = ()
    """The last one is judged."""
    outcome: RewardOutcome | None = None
    """None: it is not judged yet."""

    @property
    def samples(self) -> Rollout:
        return self.finished or self.so_far() or self.recorded

    def restart(self, recorded: Rollout = ()) -> None:
        """It starts over, with those tokens."""
        self.recorded, self.so_far = recorded, tuple
        self.num_before += 1

    @property
    def prompt(self) -> Prompt:
        return self.assignment.prompt

    @property
    def place(self) -> str:
        prompt = self.prompt
        return f"(group {prompt.group_id}, sample {self.index}, row {prompt.row} of {prompt.source})"


@dataclass(eq=False)
class RunningGroup:
    """What there is of a group at any moment, for another actor that must continue it."""

    assignment: Assignment
    prompt_ids: I32
    clock: Clock
    on_change: Callable[[RolloutSpan | None, RolloutSpan | None], None]
    """See `Timeline`."""

    def __post_init__(self) -> None:
        self.prompt = self.assignment.prompt
        recorded = defaultdict[int, list[Sample]](list)
        for sample in self.assignment.partial:
            recorded[sample.index].append(sample)
        timelines = [Timeline(self.clock.monotonic, self.on_change) for _ in range(self.assignment.num_samples)]
        self.members = [
            GroupMember(self.assignment, self.prompt_ids, index, timeline, tuple(recorded[index]))
            for index, timeline in enumerate(timelines)
        ]

    @property
    def is_held_out(self) -> bool:
        return self.assignment.attempt < 0

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Those with at least one token, finished or not."""
        return tuple(sample for member in self.members for sample in member.samples if sample.response_ids.size)

    def hops(self) -> dict[Hop, tuple[float, float]]:
        """Begin of the first member and end of the last, on the monotonic clock."""
        times: dict[Hop, tuple[float, float]] = {}
        for member in self.members:
            for span in member.timeline.stretches:
                hop = "reward" if span.kind == "reward" else "generate"
                began_s, ended_s = times.get(hop, (span.began_s, span.ended_s))
                times[hop] = min(began_s, span.began_s), max(ended_s, span.ended_s)
        return times


@dataclass(kw_only=True, eq=False)
class GroupRunner:
    """Runs groups. One per rollout actor; `run` may be called concurrently."""

    workflow: Workflow | Pool
    """One that never holds the loop, or the processes that run it."""
    scorer: Scorer
    tokenizer: Tokenizer
    model: ModelAccess
    """`model.sampling` is replaced by what each assignment asks for."""
    clock: Clock
    options: RolloutOptions
    load: GroupLoad = field(default_factory=GroupLoad)
    on_load: Callable[[GroupLoad], object] = lambda load: None
    vocab_size: int | None = None
    reference: Reference | None = None
    """Gives the log-probs of every finished sample; None: they are not needed."""
    on_failure: Callable[[FailureKind, str], None] = lambda kind, text: None
    """Called for each failure of a workflow: its kind, and in words what becomes of the member."""
    on_end: Callable[[RunningGroup], None] = lambda group: None
    """Called for each group that does not run any more."""

    def __post_init__(self) -> None:
        names = (*(f"failures/{kind}" for kind in FAILURE_KINDS), "num_retried", "num_masked")
        self.failures = Counter[str]({f"rollout/{name}": 0 for name in names})
        """Of workflows, since the actor began, by the names of their gauges."""
        self._renderer, self._run_name = TurnRenderer(self.tokenizer), Path(self.options.run_dir).name
        self._running: dict[int, RunningGroup] = {}
        self.sums = defaultdict[str, float](float)
        """Since they were cleared last: tokens, samples, truncated."""
        self._seconds = dict[Doing, float].fromkeys(DOINGS, 0.0)
        self._held_out_s = 0.0
        """Of rollouts that are over, by what they did."""
        self._lasted: dict[Doing, deque[float]] = {kind: deque(maxlen=MAX_LASTED) for kind in DOINGS}
        """Seconds of the newest stretches."""
        is_in_loop = not isinstance(self.workflow, Pool)
        self.load.has_engine = self.model.generate is not no_engine or not is_in_loop
        self._first: Doing = "engine" if is_in_loop and self.load.has_engine else "workflow"
        """What a member does that says nothing else."""
        self._is_lasting = isinstance(self.workflow, Lasting)
        """It bounds its own phases."""
        if isinstance(self.workflow, WorkflowPool):
            self.load.function = self.workflow.name
            self.workflow.on_waits = self._hear_place

    def judged_by(self, scorer: Scorer) -> GroupRunner:
        """This one, load and sums included, with other rewards and no reference: for an evaluation."""
        other = copy(self)
        other.scorer, other.reference = scorer, None
        return other

    def so_far(self, group_id: int) -> tuple[Sample, ...]:
        return self._running[group_id].samples if group_id in self._running else ()

    def has(self, group_id: int) -> bool:
        return group_id in self._running

    async def run(self, assignment: Assignment) -> Group:
        """All members of one group, rewarded. Raises Partial when generation was interrupted or the engine failed,
        PromptTooLong for a prompt that does not fit, DataError for one that cannot be rendered, TemplateError for a
        reply that the chat template cannot write, UserCodeError for a workflow or reward that failed, MemberFailed if
        no member is left or the policy made one fail, RequestRefused for a request that no engine can serve."""
        group_id, choices = assignment.prompt.group_id, self.options.choices
        if choices is not None:  # of a life in which they were not asked for
            samples = tuple(sample for sample in assignment.partial if not choices.wrong_sample(sample))
            assignment = replace(assignment, partial=samples)
        group = self._running[group_id] = RunningGroup(
            assignment, self._renderer.prompt(assignment.prompt), self.clock, self._note_change
        )
        try:
            ends = await all_or_first_error([self._run_member(member) for member in group.members])
            finished = [member for member in group.members if member.finished]
            masked = [end for end in ends if isinstance(end, MemberFailed)]
            if any(isinstance(end, Interrupted) for end in ends):
                raise Partial(group.samples)
            if not finished:
                raise masked[0]
            await self._judge_together(group, finished)
        except RequestRefused:
            raise
        except EngineError as err:
            raise Partial(group.samples, err) from err
        finally:
            if self._running.get(group_id) is group:  # held-out prompts may be answered twice at a time
                del self._running[group_id]
            self._count_time(group)
            self.on_end(group)
        judged = [(sample, member.outcome) for member in finished if member.outcome for sample in member.finished]
        last = {id(member.finished[-1]) for member in finished}
        return Group(
            prompt=assignment.prompt,
            samples=tuple(sample for sample, _ in judged),
            rewards=np.asarray([outcome.value for _, outcome in judged], dtype=np.float32),
            reward_parts=tuple(dict(outcome.parts) if id(sample) in last else {} for sample, outcome in judged),
            knobs=assignment.knobs,
            num_masked=len(masked),
        )

    async def _run_member(self, member: GroupMember) -> Interrupted | MemberFailed | None:
        """Generate a member, and judge it unless the group is judged at once. Returns why it is not finished."""
        try:
            with member.timeline.during(self._first):
                member.finished = await self._produce_with_retries(member)
        except Interrupted as interrupted:
            member.restart(interrupted.partial)
            return interrupted
        except MemberFailed as failed:
            self._settle(member, failed)
            if not member.finished:
                return failed
        for sample in member.finished:
            self.sums["tokens"] += int(sample.loss_mask.sum())
            self.sums["samples"] += 1
            self.sums["truncated"] += sample.finish == "length"
        if self.reference is not None:
            member.finished = await self._with_reference(self.reference, member)
        if not self.scorer.judges_groups and member.outcome is None:
            completion = self._completion(member.prompt, member.finished[-1])
            try:
                member.outcome = await self._timed_reward(self.scorer.score(completion), [member])
            except MemberFailed as failed:  # its judge gave no score
                member.finished = ()
                self._settle(member, failed)
                return failed
        return None

    async def _produce_with_retries(self, member: GroupMember) -> Rollout:
        """The member's samples. A member whose environment failed is tried again, without its tokens. A member whose
        process was ended by another member's workflow continues from its tokens, and that does not count."""
        num_lost = 0
        while True:
            try:
                return await self._produce(member)
            except MemberFailed as failed:
                if failed.is_bystander and num_lost < MAX_LOST:
                    num_lost += 1
                    member.restart(member.so_far())
                    continue
                if failed.kind not in RETRIED or member.num_retries >= self.options.rollout.max_retries:
                    raise
                self._note_failure(failed, f"it is tried again: {failed.message}")
                self.failures["rollout/num_retried"] += 1
            except UserCodeError as error:
                self._note_failure(error, f"its group is dropped: {error.message}")
                raise
            member.restart()
            member.num_retries += 1
            await asyncio.sleep(TIMEOUTS.rollout.repeat_s * 2 ** (member.num_retries - 1))

    def _settle(self, member: GroupMember, failed: MemberFailed) -> None:
        """Of a failed member: masked, or reward 0. Raises `failed` where it costs the group."""
        if failed.kind in RETRIED:
            self._note_failure(failed, f"it is masked: {failed.message}")
            self.failures["rollout/num_masked"] += 1
            member.restart()
            return
        samples = tuple(sample for sample in member.so_far() if sample.loss_mask.any())
        if self.options.reward.on_error != "zero" or not samples:
            self._note_failure(failed, f"its group is dropped: {failed.message}")
            raise failed
        self._note_failure(failed, f"it gets reward 0: {failed.message}")
        member.finished = tuple(replace(sample, finish="stop", reward=0.0) for sample in samples)
        member.outcome = RewardOutcome(0.0)

    def _note_failure(self, error: MemberFailed | UserCodeError, text: str) -> None:
        kind = error.kind if isinstance(error, MemberFailed) else "user-code"
        self.failures[f"rollout/failures/{kind}"] += 1
        self.on_failure(kind, text)

    async def _with_reference(self, reference: Reference, member: GroupMember) -> Rollout:
        """With the log-probs of the reference model."""
        with member.timeline.during("reward", "reference"):
            calls = [reference.judged(member.prompt, sample) for sample in member.finished]
            return tuple(await all_or_first_error(calls))

    async def _judge_together(self, group: RunningGroup, members: Sequence[GroupMember]) -> None:
        if self.scorer.judges_groups:
            completions = [self._completion(group.prompt, member.finished[-1]) for member in members]
            outcomes = await self._timed_reward(self.scorer.score_group(completions), members)
            for member, outcome in zip(members, outcomes, strict=True):
                member.outcome = member.outcome or outcome

    async def _produce(self, member: GroupMember) -> Rollout:
        assignment, number = member.assignment, member.num_before
        model = replace(
            self.model,
            generate=partial(member.timeline.watched, self.model.generate),
            on_wait=member.timeline.note,
            sampling=assignment.sampling,
            request_prefix=f"{self.model.request_prefix}a{assignment.attempt}.{f'r{number}.' if number else ''}",
        )
        try:
            if isinstance(self.workflow, Pool):
                return await self._in_worker(self.workflow, member, model)
            return await self._in_loop(self.workflow, member, model)
        finally:
            member.timeline.forget_waits()

    async def _in_loop(self, workflow: Workflow, member: GroupMember, model: ModelAccess) -> Rollout:
        prompt = member.prompt
        episode = Episode(
            prompt=prompt,
            index=member.index,
            tokenizer=self.tokenizer,
            model=model,
            renderer=self._renderer,
            prompt_ids=member.prompt_ids,
            recorded=member.recorded,
        )
        member.so_far = episode.so_far
        context = WorkflowContext(
            episode=episode,
            tokenizer=self.tokenizer,
            max_turns=self.options.rollout.max_turns,
            index=member.index,
            session_id=self._session_id(member),
            attempt=_attempt(member),
            run_s=self.options.rollout.timeout_s,
        )
        timeout_s = None if self._is_lasting else self.options.rollout.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                samples = await workflow(context, prompt)
                return (samples,) if isinstance(samples, Sample) else tuple(samples)
        except TimeoutError as late:
            raise UserCodeError(
                f"workflow did not finish within {timeout_s or 0:g} s {member.place}", remedy="raise rollout.timeout_s"
            ) from late

    def _session_id(self, member: GroupMember) -> str:
        assignment = member.assignment
        kind = "" if assignment.attempt >= 0 else f"eval{-assignment.attempt}."
        return f"{self._run_name}.{kind}{assignment.prompt.group_id}.{member.index}"

    async def _in_worker(self, pool: Pool, member: GroupMember, model: ModelAccess) -> Rollout:
        record = TokensSoFar(member.recorded)
        member.so_far = record.so_far
        prompt = member.prompt
        start = StartEpisode(
            prompt=prompt,
            index=member.index,
            prompt_ids=member.prompt_ids,
            sampling=model.sampling,
            context_length=model.context_length,
            request_prefix=model.request_prefix,
            session_id=self._session_id(member),
            attempt=_attempt(member),
            recorded=member.recorded,
        )
        try:
            run_s = self.options.rollout.timeout_s
            samples, temperatures = await pool.play(start, run_s, model, record)
        except MemberFailed as failed:
            text = f"{failed.message} {member.place}"
            raise MemberFailed(
                text, kind=failed.kind, remedy=failed.remedy, is_bystander=failed.is_bystander
            ) from failed
        except UserCodeError as error:
            raise UserCodeError(f"{error.message} {member.place}", remedy=error.remedy) from error
        return checked_rollout(
            samples,
            prompt,
            member.index,
            temperatures=temperatures,
            vocab_size=self.vocab_size,
            loss_parts=self.options.loss_parts,
            choices=self.options.choices,
        )

    def _hear_place(self, place: str) -> None:
        self.load.function = place
        self.on_load(self.load)

    def _note_change(self, before: RolloutSpan | None, after: RolloutSpan | None) -> None:
        if before is None or after is None or not (before.is_at_engine and after.is_at_engine):
            self.load.move(before, after)
            self.on_load(self.load)

    def _count_time(self, group: RunningGroup) -> None:
        for member in group.members:
            for kind, spent_s in member.timeline.seconds().items():
                self._seconds[kind] += spent_s
                self._held_out_s += spent_s * group.is_held_out
            for span in member.timeline.stretches:
                self._lasted[span.kind].append(span.ended_s - span.began_s)

    def seconds(self) -> dict[str, float]:
        """Of all rollouts since the actor began, by what they did: "rollouts/generate" and so on; of their calls of
        reward workers "rewards/queue" and so on; "held-out/rollouts" is the part of those for an evaluation."""
        totals, held_out_s = dict(self._seconds), self._held_out_s
        for group in self._running.values():
            for member in group.members:
                for kind, spent_s in member.timeline.seconds().items():
                    totals[kind] += spent_s
                    held_out_s += spent_s * group.is_held_out
        calls = {f"rewards/{part}": spent_s for part, spent_s in self.scorer.seconds().items()}
        rollouts = {f"rollouts/{kind}": spent_s for kind, spent_s in totals.items()}
        return rollouts | calls | {"held-out/rollouts": held_out_s}

    def under_way(self, actor: str) -> tuple[RolloutNow, ...]:
        now_s, entries = self.clock.monotonic(), list[tuple[tuple[bool, float], RolloutNow]]()
        for group in self._running.values():
            prompt = group.prompt
            for member in group.members:
                doing, timeline = member.timeline.doing, member.timeline
                since_s = 0.0 if doing is None else now_s - doing.began_s
                entry = RolloutNow(
                    actor=actor, group_id=prompt.group_id, index=member.index, row=prompt.row, source=prompt.source,
                    is_held_out=group.is_held_out, turn=timeline.turn, doing="" if doing is None else doing.label,
                    since_s=since_s, began_s=now_s - timeline.began_s,
                )  # fmt: skip
                is_outside = doing is not None and not doing.is_at_engine
                entries.append(((is_outside, since_s), entry))
        entries.sort(key=lambda entry: entry[0], reverse=True)
        return tuple(entry for _, entry in entries[:MAX_TOLD])

    def lengths(self) -> dict[str, float]:
        """Metrics: how long the newest stretches of each kind lasted, in seconds."""
        metrics: dict[str, float] = {}
        for kind, lasted in self._lasted.items():
            if lasted:
                values = np.quantile(np.asarray(lasted), (0.5, 0.95, 1.0)).tolist()
                names = (f"rollout/{kind}_s_{which}" for which in ("p50", "p95", "max"))
                metrics |= dict(zip(names, values, strict=True))
        return metrics

    def _completion(self, prompt: Prompt, sample: Sample) -> Completion:
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
            begins_in_thought=self._begins_in_thought(sample),
        )

    def _begins_in_thought(self, sample: Sample) -> bool:
        """Whether the last ids that the model was given open one."""
        mask = sample.loss_mask.tobytes()
        start = mask.rfind(0, 0, mask.rfind(1) + 1) + 1
        context_ids = np.concatenate([sample.prompt_ids[-MARK_IDS:], sample.response_ids[:start]])
        return begins_in_thought(self.tokenizer, context_ids.tolist())

    async def _timed_reward(self, scoring: Awaitable[T], members: Sequence[GroupMember]) -> T:
        waits = [(member.timeline, member.timeline.begin("reward")) for member in members]
        try:
            return await scoring
        except RewardError:
            raise
        except UserCodeError as err:
            raise RewardError(err.message, remedy=err.remedy) from err
        finally:
            for timeline, number in waits:
                timeline.end(number)


def _attempt(member: GroupMember) -> int:
    return max(member.assignment.attempt - 1, 0) + member.num_before


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
