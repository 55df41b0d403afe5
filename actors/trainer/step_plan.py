"""From a claimed batch to a shard per trainer rank (advantages, balance, micro-batches), and the metrics of the batch.

A user's functions over a whole batch run on the leader alone, in a thread with a deadline, so all ranks train on the
same numbers. A wrong one raises a UserCodeError with function, step and group, and ends the run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from ...algos.baselines import group_advantages
from ...algos.packing import RankPlan, plan_shards
from ...algos.rewards.outcome import Unusable, each_of, is_in_order, number_of
from ...core.config import AlgoConfig
from ...core.config.learning import COMPARING_KINDS
from ...core.daemon_thread import in_daemon_thread
from ...core.errors import DataError, StalenessError, UserCodeError
from ...core.samples import F32, I32, Group, LossPart, Sample, TrainSample, TrainShard
from ..user_code.functions import (
    ADVANTAGE_FN,
    REWARD_POST_PROCESS,
    Expected,
    UserFunction,
    load_function,
    what_was_raised,
)

T = TypeVar("T")
REMEDY = "mend the function; docs/algorithms.md says what it gets and returns"


@dataclass(frozen=True, slots=True)
class BatchFunctions:
    """Those that the run file names."""

    reward_post_process: UserFunction | None = None
    advantage_fn: UserFunction | None = None

    @classmethod
    def load(cls, algo: AlgoConfig) -> BatchFunctions:
        """Raises ConfigError or UserCodeError for one that cannot be loaded."""
        return cls(_load(algo.reward_post_process, REWARD_POST_PROCESS), _load(algo.advantage_fn, ADVANTAGE_FN))

    def __bool__(self) -> bool:
        return self.reward_post_process is not None or self.advantage_fn is not None

    def rewarded(self, step: int, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups with the rewards that advantages are to be made of. Raises UserCodeError."""
        if self.reward_post_process is None:
            return groups
        rows = _call(REWARD_POST_PROCESS, self.reward_post_process, step, groups, lambda value, _: number_of(value))
        return [
            msgspec.structs.replace(group, rewards=np.asarray(row, dtype=np.float32))
            for group, row in zip(groups, rows, strict=True)
        ]

    def advantages(self, step: int, groups: Sequence[Group]) -> list[float | F32] | None:
        """Of every sample in order: a number, or float32 [R]. None: the algorithm's own. Raises UserCodeError."""
        if self.advantage_fn is None:
            return None
        rows = _call(ADVANTAGE_FN, self.advantage_fn, step, groups, _advantage)
        return [value for row in rows for value in row]


def _load(name: str, expected: Expected) -> UserFunction | None:
    return load_function(name, expected) if name else None


def _call(
    expected: Expected, function: UserFunction, step: int, groups: Sequence[Group], check: Callable[[object, Sample], T]
) -> list[list[T]]:
    """What it returns for each sample of each group. Raises UserCodeError."""

    def check_row(row: object, group_index: int) -> list[T]:
        samples = groups[group_index].samples
        places = [f"sample {index}" for index in range(len(samples))]
        return each_of(row, places, "values", lambda value, index: check(value, samples[index]))

    try:
        rows: Any = function.fn(list(groups))
        return each_of(rows, [f"group {group.group_id}" for group in groups], "entries", check_row)
    except (Exception, SystemExit) as error:  # a user's class may do anything when it is asked for its numbers
        reason = str(error) if isinstance(error, Unusable) else f"raised {what_was_raised(error)}"
        raise UserCodeError(f'{expected.key} = "{function.name}" {reason} (step {step})', remedy=REMEDY) from error


def _advantage(value: object, sample: Sample) -> float | F32:
    """A number, or one for each token of the response."""
    if not is_in_order(value):
        return float(np.float32(number_of(value)))
    length = len(sample.response_ids)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise Unusable("returned advantages that are no array of numbers") from error
    if array.shape != (length,) or array.dtype.kind not in "fiub":
        raise Unusable(
            f"returned advantages of shape {list(array.shape)} and type {array.dtype}, not numbers for {length} tokens"
        )
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not bool(np.isfinite(array).all()):
        raise Unusable(f"returned an advantage of {array[~np.isfinite(array)][0]} as float32")
    return array


@dataclass(frozen=True, slots=True)
class StepPlanOptions:
    """What shapes a step."""

    algo: AlgoConfig
    num_ranks: int
    max_tokens: int
    """Tokens (P + R) a micro-batch may hold; a single longer sample sits alone."""
    minibatches: int
    """Optimizer steps per batch."""
    sources: tuple[str, ...] = ()
    """Names of the sources of prompts, where there are several."""
    functions: BatchFunctions = field(default_factory=BatchFunctions)
    """The user's own, for rewards and advantages."""


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """What a step trains on."""

    groups: Sequence[Group]
    oldest: Mapping[int, int] = field(default_factory=dict[int, int])
    """Group id -> version of its oldest token as the buffer counts it, which is not its stamp where the weights of that
    version were undone by a restart of the trainer; a group that is not named counts by its stamps."""

    def oldest_version(self, group: Group) -> int:
        """Negative: no engine took part in it."""
        stamp = group.oldest_version()
        return min(stamp, self.oldest.get(group.group_id, stamp))

    def check(self, step: int, max_staleness: int) -> None:
        """Raises StalenessError if a token is older than the bound allows at `step`."""
        for group in self.groups:
            oldest = self.oldest_version(group)
            if 0 <= oldest < step - max_staleness:
                raise StalenessError(
                    f"step {step} was given group {group.group_id} with tokens of version {oldest}: "
                    f"that is older than max_staleness = {max_staleness} allows; it is not trained",
                    remedy="a bug of the buffer: report it with ledger.sqlite of the run",
                )


def plan_step(step: int, groups: Sequence[Group], options: StepPlanOptions) -> tuple[TrainShard, ...]:
    """One shard per rank, covering every sample exactly once. Advantages are normalised inside each group by its id, so
    groups of unequal size are safe; or they are the user's. Raises ValueError for an empty batch, UserCodeError for a
    function of the user's that fails, DataError for a sample without the reference log-probs that it should bring."""
    if not groups:
        raise ValueError(f"step {step}: no groups to train on")
    if options.algo.ref_urls:
        _check_reference(step, groups)
    flat = [(g, i) for g in groups for i in range(len(g.samples))]
    advantages = options.functions.advantages(step, groups)
    if advantages is None:
        advantages = own_advantages(groups, options)
    samples = [_train_sample(g, i, advantage, options) for (g, i), advantage in zip(flat, advantages, strict=True)]
    plan = _planned(samples, options)
    if options.algo.reduction == "rollout" and not options.algo.learns_pairs:
        samples = _by_rollout(samples)
    minibatches = [[samples[i] for rank in plan for micro in rank[m] for i in micro] for m in range(len(plan[0]))]
    denominators = [_denominators(minibatch, "algo") for minibatch in minibatches]
    parts: list[LossPart] = [part for part in ("sft", "distill") if any(sample.loss == part for sample in samples)]
    common = TrainShard(
        step=step,
        samples=(),
        minibatches=(),
        minibatch_tokens=tuple(tokens for tokens, _ in denominators),
        minibatch_rollouts=tuple(rollouts for _, rollouts in denominators),
        minibatch_parts=tuple(
            {part: _denominators(minibatch, part) for part in parts} for minibatch in minibatches if parts
        ),
    )
    return tuple(_shard(common, rank, samples) for rank in plan)


def _planned(samples: Sequence[TrainSample], options: StepPlanOptions) -> list[RankPlan]:
    """Which rank trains which samples in which micro-batch; both answers of a pair are in one."""
    units = [[i] for i in range(len(samples))]
    if options.algo.learns_pairs:
        by_group: dict[int, list[int]] = {}
        for i, sample in enumerate(samples):
            by_group.setdefault(sample.group_id, []).append(i)
        units = list(by_group.values())
    plan = plan_shards(
        [sum(samples[i].num_tokens for i in unit) for unit in units],
        options.num_ranks,
        options.max_tokens,
        options.minibatches,
        [samples[unit[0]].group_id for unit in units],
    )
    return [
        [[[i for unit in micro for i in units[unit]] for micro in micros] for micros in minibatches]
        for minibatches in plan
    ]


def own_advantages(groups: Sequence[Group], options: StepPlanOptions) -> list[float | F32]:
    """The algorithm's, of every sample in order. A number: of the sample. float32 [R]: of each of its turns, where
    turns have rewards of their own or `turn_discount` is below 1; turn k of n returns G_k = sum over j >= k of
    discount^(j - k) r_j, with what no turn earned in r_n. Turns are compared with those of the whole group, and a
    rollout counts once."""
    rewards: list[float] = []
    weights: list[float] = []
    group_ids: list[int] = []
    all_turns: list[list[tuple[int, int]]] = []
    """Of each sample: begin and end of what has a reward of its own; none: the sample has one."""
    for group in groups:
        has_turns = options.algo.kind in COMPARING_KINDS and (
            options.algo.turn_discount < 1 or any(sample.token_rewards is not None for sample in group.samples)
        )
        group_turns = [sample.model_runs() if has_turns else [] for sample in group.samples]
        counts = Counter[int]()
        for sample, turns in zip(group.samples, group_turns, strict=True):
            counts[sample.index] += len(turns) or 1
        for i, (sample, turns) in enumerate(zip(group.samples, group_turns, strict=True)):
            returns = _returns(group, i, turns, options.algo.turn_discount) if turns else [float(group.rewards[i])]
            rewards += returns
            weights += [1 / counts[sample.index]] * len(returns)
            group_ids += [group.group_id] * len(returns)
        all_turns += group_turns
    advantages = iter(
        group_advantages(options.algo.kind, rewards, group_ids, normalise=options.algo.normalise, weights_S=weights)
    )
    samples = (sample for group in groups for sample in group.samples)
    return [
        _spread(sample, turns, advantages) if turns else float(next(advantages))
        for sample, turns in zip(samples, all_turns, strict=True)
    ]


def _returns(group: Group, i: int, turns: Sequence[tuple[int, int]], discount: float) -> list[float]:
    token_rewards = group.samples[i].token_rewards
    rewards = [0.0 if token_rewards is None else float(token_rewards[begin:end].sum()) for begin, end in turns]
    rewards[-1] += _unplaced(group, i)
    for k in reversed(range(len(rewards) - 1)):
        rewards[k] += discount * rewards[k + 1]
    return rewards


def _unplaced(group: Group, i: int) -> float:
    """What the rollout of that sample earned by none of its turns."""
    siblings = (sample.token_rewards for sample in group.samples if sample.index == group.samples[i].index)
    return float(group.rewards[i]) - sum(float(rewards.sum()) for rewards in siblings if rewards is not None)


def _spread(sample: Sample, turns: Sequence[tuple[int, int]], advantages: Iterator[np.float32]) -> F32:
    token_advantages = np.zeros(len(sample.response_ids), np.float32)
    for begin, end in turns:
        token_advantages[begin:end] = next(advantages)
    return token_advantages


def _by_rollout(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples with weights that make the mean over a sample's tokens one over all tokens of its rollout."""
    tokens = Counter[tuple[int, int, LossPart]]()
    for sample in samples:
        tokens[sample.group_id, sample.index, sample.loss] += int(sample.loss_mask.sum())

    def weigh(sample: TrainSample) -> TrainSample:
        num_tokens, num_of_rollout = int(sample.loss_mask.sum()), tokens[sample.group_id, sample.index, sample.loss]
        if num_tokens in (0, num_of_rollout):
            return sample
        weights = np.ones(len(sample.loss_mask), np.float32) if sample.loss_weights is None else sample.loss_weights
        return msgspec.structs.replace(sample, loss_weights=weights * np.float32(num_tokens / num_of_rollout))

    return [weigh(sample) for sample in samples]


def _denominators(samples: Sequence[TrainSample], part: LossPart) -> tuple[float, float]:
    """Loss tokens of a part of the loss, and rollouts that have any."""
    tokens = [(sample, float(sample.loss_mask.sum())) for sample in samples if sample.loss == part]
    rollouts = {(sample.group_id, sample.index) for sample, count in tokens if count}
    return sum(count for _, count in tokens), float(len(rollouts))


def _check_reference(step: int, groups: Sequence[Group]) -> None:
    for group in groups:
        for sample in group.samples:
            if sample.reference_logprobs is None and sample.loss_mask.any():
                raise DataError(
                    f"step {step}: sample {sample.name} has no reference log-probs: it was finished "
                    "when algo.ref_urls was not set",
                    remedy="continue as the run began, or begin a new one: model.path = an export of this one",
                )


def _train_sample(group: Group, i: int, advantage: float | F32, options: StepPlanOptions) -> TrainSample:
    """`advantage`: of the sample, or of each of its tokens."""
    sample = group.samples[i]
    part: LossPart = "algo" if options.algo.is_given else sample.loss
    token_advantages: F32 | None = None
    token_rewards = None
    if part == "sft":
        advantage = 1.0
    elif part == "distill":
        advantage = 0.0
    elif options.algo.kind in ("ppo", "reinforce_pp") and sample.token_rewards is not None:
        token_rewards, advantage = sample.token_rewards, _unplaced(group, i)
    elif isinstance(advantage, np.ndarray):
        token_advantages, learnt = advantage, advantage[sample.loss_mask != 0]
        advantage = float(learnt.mean()) if learnt.size else 0.0
    return TrainSample.of(
        sample,
        cast("float", advantage),
        token_advantages=token_advantages,
        reward=float(group.rewards[i]),
        reference_logprobs=sample.reference_logprobs if options.algo.ref_urls else None,
        loss=part,
        token_rewards=token_rewards,
    )


def _shard(
    common: TrainShard, rank_plan: Sequence[Sequence[Sequence[int]]], samples: Sequence[TrainSample]
) -> TrainShard:
    """Renumber one rank's part of the plan to indexes into its own samples."""
    indexes = [i for minibatch in rank_plan for micro in minibatch for i in micro]
    local = {i: k for k, i in enumerate(indexes)}
    return msgspec.structs.replace(
        common,
        samples=tuple(samples[i] for i in indexes),
        minibatches=tuple(tuple(tuple(local[i] for i in micro) for micro in minibatch) for minibatch in rank_plan),
    )


def batch_metrics(
    step: int, batch: ClaimedBatch, sources: Sequence[str] = ()
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Reward, length, lag and knob facts of a batch, and the lag of every group (-1: no engine took part). `sources`:
    names, where there are several: the share of each in the batch, and its mean reward. Demonstrations alone have no
    reward to report, for every one of them counts 1, and no lag."""
    groups = batch.groups
    rewards = np.concatenate([g.rollout_rewards() for g in groups]).astype(np.float64)
    lengths = [len(s.response_ids) for g in groups for s in g.samples]
    truncated = [s.finish == "length" for g in groups for s in g.samples]
    temperatures = [s.temperature for g in groups for s in g.samples]
    oldest = [batch.oldest_version(group) for group in groups]
    lags = tuple(step - version if version >= 0 else -1 for version in oldest)
    metrics = {
        "batch/num_groups": float(len(groups)),
        "batch/response_tokens_mean": float(np.mean(lengths)),
        "batch/truncated_fraction": float(np.mean(truncated)),
        "batch/temperature_min": min(temperatures),
        "batch/temperature_max": max(temperatures),
        "batch/knobs_min": float(min(g.knobs for g in groups)),
        "batch/knobs_max": float(max(g.knobs for g in groups)),
    }
    metrics |= response_metrics([sample for group in groups for sample in group.samples])
    if known_lags := [lag for lag in lags if lag >= 0]:
        least, most, mean = min(known_lags), max(known_lags), np.mean(known_lags)
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        metrics |= {"lag/max": float(most), "lag/mean": float(mean), "lag/min": float(least)}
        # Zeros too: a view of newest values must not show those of an older step.
        metrics |= {f"lag_hist/{lag}": float(known_lags.count(lag)) for lag in range(most + 1)}
    metrics |= _source_metrics(groups, sources, has_rewards=bool(known_lags))
    return metrics, lags


def _source_metrics(groups: Sequence[Group], sources: Sequence[str], *, has_rewards: bool) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for source in sources:
        rewards = [group.rollout_rewards() for group in groups if group.prompt.source_name == source]
        metrics[f"batch/source/{source}"] = len(rewards) / len(groups)
        if rewards and has_rewards:
            metrics[f"reward/source/{source}"] = float(np.concatenate(rewards).astype(np.float64).mean())
    return metrics


@dataclass(frozen=True, slots=True)
class Planned:
    """A step, ready for the ranks."""

    metrics: dict[str, float]
    lags: tuple[int, ...]
    """Of each group; -1: no engine took part."""
    shards: tuple[TrainShard, ...]


async def planned_step(version: int, batch: ClaimedBatch, options: StepPlanOptions, timeout_s: float) -> Planned:
    """The step from `version`. Raises UserCodeError for a function that fails or takes longer than `timeout_s`."""
    metrics, lags = batch_metrics(version, batch, options.sources)
    if not options.functions:
        return Planned(metrics, lags, plan_step(version, batch.groups, options))

    def work() -> Planned:
        groups = options.functions.rewarded(version, batch.groups)
        shards = plan_step(version, groups, options)
        return Planned(metrics | _processed(groups, options), lags, shards)

    try:
        async with asyncio.timeout(timeout_s):
            return await in_daemon_thread(work, "batch functions")
    except TimeoutError as error:
        functions = (options.functions.reward_post_process, options.functions.advantage_fn)
        names = " and ".join(f'"{function.name}"' for function in functions if function is not None)
        raise UserCodeError(
            f"{names} did not return within {timeout_s:g} s (step {version})",
            remedy="make it faster, or raise trainer.step_timeout_s",
        ) from error


def _processed(groups: Sequence[Group], options: StepPlanOptions) -> dict[str, float]:
    if options.functions.reward_post_process is None:
        return {}
    rewards = np.concatenate([group.rewards for group in groups]).astype(np.float64)
    return {"reward/processed_mean": float(rewards.mean()), "reward/processed_std": float(rewards.std())}


MAX_PARTS = 32
"""Names that become metrics under one leader."""
MAX_NAME = 64
"""Characters of a name that becomes one."""
LEFT_OUT = "reward/parts_left_out"


class PartMetrics:
    """One per leader: remembers which names have metrics."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def of(self, groups: Sequence[Group]) -> dict[str, float]:
        """`reward/part/NAME/mean` and `/std` over those samples of the batch that have the part, and how many names
        were left out; nothing where no sample has parts."""
        rewards: dict[str, list[float]] = {}
        for name, reward in (item for g in groups for parts in g.reward_parts for item in parts.items()):
            rewards.setdefault(name, []).append(reward)
        for name in sorted(rewards):
            if len(self._names) < MAX_PARTS and len(name) <= MAX_NAME:
                self._names.add(name)
        metrics = {LEFT_OUT: float(len(rewards.keys() - self._names))} if rewards else {}
        for name in sorted(rewards.keys() & self._names):
            values = np.asarray(rewards[name], dtype=np.float64)
            metrics[f"reward/part/{name}/mean"] = float(values.mean())
            metrics[f"reward/part/{name}/std"] = float(values.std())
        return metrics


NGRAM = 4
TAIL_TOKENS = 1024
"""Of an answer's end: a model that falls into a loop stays in it until it is cut off, and long batches cost no more."""
QUANTILES = (10, 50, 90, 99)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def response_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Quantiles and the longest, in response tokens; share of repeated n-grams, over the samples."""
    lengths = np.asarray([len(sample.response_ids) for sample in samples])
    values = np.percentile(lengths, QUANTILES, method="lower")
    repeated = [repetition(sample.response_ids) for sample in samples]
    return {
        **{f"batch/response_tokens_p{q}": float(value) for q, value in zip(QUANTILES, values, strict=True)},
        "batch/response_tokens_max": float(lengths.max()),
        "batch/repetition_mean": float(np.mean(repeated)),
        "batch/repetition_max": float(max(repeated)),
    }


def repetition(ids: I32) -> float:
    """Share of the n-grams of an answer's end that were there before in it: 0 nothing repeats, near 1 a loop. Different
    n-grams are taken for equal with a chance below 1e-13."""
    tail = ids[-TAIL_TOKENS:].astype(np.uint64) + np.uint64(1)
    count = len(tail) - NGRAM + 1
    if count < 2:
        return 0.0
    hashes = np.zeros(count, dtype=np.uint64)
    for position in range(NGRAM):
        hashes = (hashes ^ tail[position : position + count]) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return 1.0 - len(np.unique(hashes)) / count
