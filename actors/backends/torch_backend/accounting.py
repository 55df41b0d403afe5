"""What a step does beside the model: advantages before it, the objective's metrics in it, the report after it; and a
user's loss and weight per token, whose results are checked and whose failures all ranks raise together.

`MetricSums` adds up sums and maxima over micro-batches and then over ranks; nothing is read from the device until
`reduced`. `accusation` lets all ranks agree on a loss or gradient that is not finite, with the names of what caused it:
every rank says what it saw, and either all raise or none, so no rank takes an optimizer step that another refuses.
Both training backends use these functions, so for one batch they report the same numbers under the same names.

`StepSettings` is what a step needs of the run file. A knob replaces a field for one step, with the same checks.
`learning_rate` is a function of finished optimizer updates, without state: resuming needs the count alone.
`torch.optim.lr_scheduler` keeps its own counter, which would have to be saved and kept equal to ours.

`TrainedModel` is a model as a step uses it: one module on this rank (`parallel.py`), or a pipeline over several
(`megatron/schedule.py`). Losses are made on scoring ranks; what the teller of a replica counts is counted once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import msgspec
import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from ....algos.advantages import less_kl, token_advantages, whiten
from ....algos.losses import TokenLoss
from ....algos.objective import (
    OPTIONS_OWN,
    LossTokens,
    Normaliser,
    Objective,
    TokenBatch,
    TokenFunctions,
    needs_whitening,
    objective_config,
    policy_objective,
    supervised,
    weight_sums,
)
from ....algos.ratios import Segments, TokenWeights, kl_terms
from ....core.config import AlgoConfig, OptimizerConfig
from ....core.errors import ConfigError, TrainError, UserCodeError
from ....core.samples import LossPart, Sample, TrainShard
from ...trainer.knobs import STEP_TUNABLES
from ...trainer.step_plan import REMEDY as MEND
from ...user_code.functions import LOSS_FN, WEIGHT_FN, UserFunction, load_function, source_digest, what_was_raised
from ..vocab_scores import TokenScores
from .layout import MicroBatch, batch_of, check_samples, to_score, trained_members
from .tensors import floats
from .world import RankGroup, World


def learning_rate(config: OptimizerConfig, num_updates: int, total_updates: int) -> float:
    """Rate of the next update after `num_updates` finished ones. Warm-up rises linearly and reaches the peak at its
    last update; then constant, or a half cosine, or a line down to `min_lr_ratio * lr` at `decay_steps` (0: at
    `total_updates`; every run file has one of both). wsd ("warm-up, stable, decay", arXiv 2404.06395, section 4) is
    constant until `wsd_decay_steps` before that."""
    if num_updates < config.warmup_steps:
        return config.lr * (num_updates + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    end = config.decay_steps or total_updates
    start, course = config.warmup_steps, config.schedule
    if course == "wsd":
        start, course = max(start, end - config.wsd_decay_steps), config.wsd_decay
    progress = min(1.0, max(0, num_updates - start) / max(1, end - start))
    share = 1.0 - progress
    if course == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif course == "minus_sqrt":
        share = 1.0 - math.sqrt(progress)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


KNOBS = {tunable.name: tunable for tunable in STEP_TUNABLES}
"""`lr` is the peak of the schedule, not the rate of the moment."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The plain values behind one step."""

    algo: AlgoConfig
    optimizer: OptimizerConfig
    max_new_tokens: int = 1
    """Divisor per sample of reduction "constant" (Dr.GRPO, arXiv 2503.20783, section 3.2)."""
    total_updates: int = 0
    """Optimizer updates of the whole run, where decays end by default; 0 = unknown."""
    mtp: float = 0.0
    """Factor of `TokenScores.mtp_loss`."""
    functions: TokenFunctions = OPTIONS_OWN
    """The user's, where `[algo]` names some."""


def with_knobs(
    settings: StepSettings, knobs: Mapping[str, float], *, has_reference: bool, can_renew: bool
) -> StepSettings:
    """`settings` with the knobs' values. Raises ConfigError for an unknown knob or an impossible value, and for a KL
    term without a reference model, here or served elsewhere, or one that cannot become the policy."""
    changed = _apply_knobs(settings, knobs) if knobs else settings
    if changed.algo.kl_coef > 0 and not (has_reference or changed.algo.ref_urls):
        raise ConfigError(
            f"kl_coef = {changed.algo.kl_coef} needs a reference model, but the run began with kl_coef = 0",
            remedy="begin with a small kl_coef; it can be changed later",
        )
    if changed.algo.ref_update_every and not can_renew:
        raise ConfigError(
            f"ref_update_every = {changed.algo.ref_update_every}: this trainer keeps no reference model of its own",
            remedy="use 0",
        )
    return changed


def _apply_knobs(settings: StepSettings, knobs: Mapping[str, float]) -> StepSettings:
    unknown = sorted(set(knobs) - set(KNOBS))
    if unknown:
        raise ConfigError(f"no such knob: {', '.join(unknown)}", remedy=f"the trainer has {', '.join(KNOBS)}")
    values = {KNOBS[name].key: int(value) if KNOBS[name].kind == "int" else value for name, value in knobs.items()}
    algo, optimizer = (
        {key.removeprefix(section): value for key, value in values.items() if key.startswith(section)}
        for section in ("algo.", "optimizer.")
    )
    try:
        return replace(
            settings,
            algo=AlgoConfig.model_validate({**settings.algo.model_dump(), **algo}),
            optimizer=OptimizerConfig.model_validate({**settings.optimizer.model_dump(), **optimizer}),
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])  # nothing where several values do not go together
        raise ConfigError(
            f"knob {name}: {first['msg']}" if name else first["msg"], remedy="the run file's limits hold for knobs too"
        ) from error


Micros = Sequence[MicroBatch[Any]]
LossOf = Callable[[int, Any], Tensor]
"""(number of the micro-batch, what the model says of it) -> its share of the loss, 0-dim."""


class ScoringModel(Protocol):
    """What gives log-probs, without gradient, by the operations of training, hence to the same bits."""

    def score(self, layouts: Sequence[Any]) -> list[Any]:
        """Of each layout; empty on ranks that do not score. Collective."""
        ...

    def parts(self) -> dict[str, Tensor]:
        """This rank's numbers, by name."""
        ...


M = TypeVar("M", bound=ScoringModel)


@dataclass(slots=True)
class ReferenceModel(Generic[M]):
    """The model of the KL term: one that was given, or the policy as it was at some version."""

    model: M
    written: Callable[[], None]
    """Its parameters changed."""
    version: int = 0
    """Of the policy that it is; 0: as it was given."""
    can_renew: bool = True

    @torch.no_grad()
    def renew(self, policy: TrainedModel, version: int) -> None:
        """Become the policy as it is now. Collective."""
        policy_parts = policy.parts()
        for name, part in self.model.parts().items():
            part.copy_(policy_parts[name])
        self.version = version
        self.written()


class TrainedModel(ABC):
    """A model with its optimizer. Methods are collective where they compute, and every rank gives as many layouts."""

    world: World
    replicas: RankGroup
    """Over whom samples are added up."""
    vocab_size: int
    is_scoring = True
    is_teller = True
    optimizer: Any
    """Counts its `num_updates`; has `forget_gradients`."""

    @property
    def num_updates(self) -> int:
        return self.optimizer.num_updates

    def cut(self, shard: TrainShard, *, skips_neutral: bool) -> list[list[MicroBatch[Any]]]:
        """[minibatch][micro-batch], without samples of advantage 0 if `skips_neutral`. Raises TrainError for a sample
        that contradicts itself."""
        check_samples(shard.samples, self.vocab_size)
        minibatches: list[list[MicroBatch[Any]]] = []
        for micros in shard.minibatches:
            members = [trained_members(shard, micro, skips_neutral=skips_neutral) for micro in micros]
            layouts = self.layouts(shard.samples, members)
            minibatches.append([batch_of(layout, shard.samples, self.world.device) for layout in layouts])
        return minibatches

    @abstractmethod
    def layouts(self, samples: Sequence[Sample], micros: Sequence[Sequence[int]]) -> list[Any]:
        """Of these members, filled up with empty ones to what a pass takes."""

    def fill_up(self, micro: MicroBatch[Any]) -> list[MicroBatch[Any]]:
        """With empty ones to what a pass takes."""
        none_S = None if micro.pair_S is None else micro.pair_S[:0]
        empty = (batch_of(layout, (), self.world.device) for layout in self.layouts((), [()])[1:])
        return [micro, *(replace(filler, pair_S=none_S) for filler in empty)]

    @abstractmethod
    def score(self, layouts: Sequence[Any]) -> list[Any]: ...

    @abstractmethod
    def parts(self) -> dict[str, Tensor]:
        """This rank's numbers, by name. Collective."""

    def score_start(self, layouts: Sequence[Any]) -> list[Any]:
        """At the step's start: `train` may replay what it chose."""
        return self.score(layouts)

    @abstractmethod
    def train(self, layouts: Sequence[Any], loss_of: LossOf, *, needs_entropy_grad: bool, replays: bool) -> None:
        """Forward and backward of all. `replays`: with the choices of `score_start`."""

    @abstractmethod
    def gradient_norm(self) -> Tensor:
        """Global 2-norm of all gradients, 0-dim, equal on all ranks, after the last backward pass of a mini-batch."""

    @abstractmethod
    def has_finite_gradient(self) -> bool:
        """Of what this rank's passes made, where that can be told apart from what others made."""

    @abstractmethod
    def update(self, norm: Tensor, rate: float, weight_decay: float, max_norm: float) -> None:
        """AdamW, with gradients of that norm scaled down to `max_norm`."""


@dataclass(slots=True)
class Learner:
    """One model's part of one mini-batch."""

    model: TrainedModel
    loss_of: Callable[[MicroBatch[Any], Any, MetricSums], Tensor]
    """Of a micro-batch, by what the model says of it; its metrics go into the tally."""
    needs_entropy_grad: bool = False
    replays: bool = False
    is_held: bool = False
    """Losses are computed and reported; no weight changes."""
    name: str = ""
    """Before the names of its metrics and in errors; empty for the policy."""
    norm: Tensor = field(default_factory=lambda: torch.zeros(()))
    bad_loss: int = -1
    """Number of this rank's first micro-batch whose loss is not finite; -1: none."""

    def passes(self, micros: Micros, tally: MetricSums) -> None:
        losses: list[Tensor] = []

        def loss_of(number: int, scores: Any) -> Tensor:
            loss = self.loss_of(micros[number], scores, tally)
            losses.append(loss.detach())
            return loss

        self.model.optimizer.forget_gradients()
        layouts = [micro.layout for micro in micros]
        if self.is_held:
            with torch.no_grad():
                for number, scores in enumerate(self.model.score(layouts)):
                    loss_of(number, scores)
        else:
            self.model.train(layouts, loss_of, needs_entropy_grad=self.needs_entropy_grad, replays=self.replays)
        self.bad_loss = first_not_finite(torch.stack(losses)) if losses else -1

    def update(self, rate: float, settings: OptimizerConfig, tally: MetricSums) -> None:
        if not self.is_held:
            self.model.update(self.norm, rate, settings.weight_decay, settings.max_grad_norm)
        share = 1.0 / self.model.replicas.size  # equal on all replicas, and the tally adds replicas up
        tally.add(f"{self.name}grad_norm", self.norm * share)
        tally.add(f"{self.name}lr", 0.0 if self.is_held else rate * share)


class MetricSums:
    """Named sums and maxima. All ranks must name the same ones, in any order."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sums)

    def add(self, name: str, value: Tensor | float) -> None:
        value = torch.as_tensor(value, dtype=torch.float64).detach()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def top(self, name: str, values: Tensor) -> None:
        """Raise a maximum to the largest of `values` (none: stays)."""
        floor = torch.full((1,), float("-inf"), dtype=torch.float64, device=values.device)
        value = torch.cat([values.detach().double(), floor]).max()
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def reduced(self, world: RankGroup) -> tuple[dict[str, float], dict[str, float]]:
        """(sums, maxima) over all ranks. Collective. A maximum over nothing is 0."""
        sums, maxima = sorted(self._sums), sorted(self._maxima)
        totals = floats(world.sum(_stack(self._sums, sums, world.device))) if sums else []
        tops = floats(world.max(_stack(self._maxima, maxima, world.device))) if maxima else []
        return (
            dict(zip(sums, totals, strict=True)),
            {name: (0.0 if top == float("-inf") else top) for name, top in zip(maxima, tops, strict=True)},
        )


def _stack(values: dict[str, Tensor], names: list[str], device: torch.device) -> Tensor:
    return torch.stack([values[name].to(device) for name in names])


RENAMED = {"approx_kl": "old_kl", "approx_kl_k3": "old_kl_k3"}
"""The objective's estimates of KL(old || live), old being what the loss clips around; `approx_kl` here is always
behaviour against live."""
COUNTS = ("num_tokens", "num_samples", "num_trained_samples", "num_computed_tokens")


def skips_neutral(objective: AlgoConfig) -> bool:
    """Whether samples of advantage 0 may go: if the policy loss is all there is, A = 0 makes loss and gradient 0."""
    return (
        not objective.is_given
        and not needs_whitening(objective)
        and objective.kl_coef == 0
        and objective.entropy_coef == 0
        and not objective.mis_normalise
        and not objective.loss_fn
    )


def charges_kl(objective: AlgoConfig) -> bool:
    return objective.kl_coef > 0 and objective.kl_in != "loss"


def fill_advantages(rows: MicroBatch[Any], algo: AlgoConfig, objective: AlgoConfig, start_M: Tensor | None) -> None:
    """Token advantages of one micro-batch, and the returns that go with them if there are values; `start_M` are
    log-probs at the step's start, needed if KL is charged."""
    kl_M: Tensor | None = None
    if charges_kl(objective) and start_M is not None and rows.reference_M is not None:
        kl_M = kl_terms(objective.kl_estimator, start_M, rows.reference_M)
    is_reward = objective.kl_in == "reward"
    if rows.given_M is not None:
        rows.advantages_M = rows.given_M
    else:
        estimate = partial(
            token_advantages,
            algo.kind,
            rows.scalar_S,
            rows.segments,
            kl_T=kl_M if is_reward else None,
            kl_coef=objective.kl_coef if is_reward else 0.0,
            gamma=algo.gamma,
            values_T=rows.values_M,
            turn_rewards_T=rows.turn_rewards_M,
        )
        rows.advantages_M = estimate(lam=algo.lam)
        if rows.values_M is not None:  # before a KL term that no return knows of, and before whitening
            wide = rows.advantages_M if algo.critic_lam == algo.lam else estimate(lam=algo.critic_lam)
            rows.returns_M = wide + rows.values_M
    if kl_M is not None and (not is_reward or rows.given_M is not None):
        rows.advantages_M = less_kl(rows.advantages_M, kl_M, objective.kl_coef)


def whiten_together(
    micros: Sequence[MicroBatch[Any]], sum_over_ranks: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    """Whiten the advantages over all loss tokens of the step, on all ranks. Collective."""
    counts = [len(m.advantages_M) for m in micros]
    joined = torch.cat([m.advantages_M for m in micros]) if micros else torch.zeros(0, device=device)
    is_drawn = torch.ones_like(joined, dtype=torch.bool)
    for start, micro in zip(np.cumsum([0, *counts]), micros, strict=False):
        if "sft" in micro.parts:
            is_drawn[start + micro.parts["sft"]] = False
    white = whiten(joined, is_drawn, sum_over_ranks)
    start = 0
    for micro, count in zip(micros, counts, strict=True):
        micro.advantages_M = white[start : start + count]
        start += count


def token_batch(rows: MicroBatch[Any], logprobs_M: Tensor, entropy_M: Tensor, part: LossPart = "algo") -> TokenBatch:
    """The loss tokens that belong to a part of the loss."""
    index = None
    if rows.parts or part != "algo":
        index = rows.parts.get(part, torch.zeros(0, dtype=torch.int64, device=logprobs_M.device))

    def optional_part(x_M: Tensor | None) -> Tensor | None:
        return x_M if x_M is None or index is None else x_M[index]

    def part_of(x_M: Tensor) -> Tensor:
        return x_M if index is None else x_M[index]

    return TokenBatch(
        logprobs_T=part_of(logprobs_M),
        behaviour_T=part_of(rows.behaviour_M),
        advantages_T=part_of(rows.advantages_M),
        segments=Segments(part_of(rows.segments.sample_T), rows.segments.num_samples),
        proximal_T=optional_part(rows.proximal_M),
        reference_T=optional_part(rows.reference_M),
        entropy_T=part_of(entropy_M),
        pair_S=rows.pair_S,
        weights_T=optional_part(rows.weights_M),
    )


def mean_weights(
    minibatches: Sequence[Sequence[MicroBatch[Any]]],
    objective: AlgoConfig,
    sum_over_ranks: Callable[[Tensor], Tensor],
    device: torch.device,
) -> list[float]:
    """Mean importance weight of each mini-batch over all ranks, by which `mis_normalise` divides; 1 without it, or
    where there is nothing to weigh. Weights of the step's start, so all are known before the first update.
    Collective if `mis_normalise` is on."""
    if not objective.mis_normalise:
        return [1.0] * len(minibatches)
    sums_B2 = torch.zeros((len(minibatches), 2), dtype=torch.float64, device=device)
    for number, micros in enumerate(minibatches):
        for rows in micros:
            if rows.proximal_M is not None:
                start_M = rows.proximal_M
                sums_B2[number] += weight_sums(token_batch(rows, start_M, torch.zeros_like(start_M)), objective)
    # one that is not finite is left to the loss, which names the groups that it comes from
    total_B, count_B = sum_over_ranks(sums_B2).unbind(1)
    return [mean if 0 < mean < math.inf else 1.0 for mean in floats(total_B / count_B.clamp(min=1.0))]


def tally_objective(
    tally: MetricSums, config: AlgoConfig, batch: TokenBatch, objective: Objective, *, is_first: bool
) -> None:
    """Losses, metric sums and maxima of one micro-batch. `is_first`: the weights are those of the step's start."""
    tally.add("loss", objective.loss)
    for name, part in objective.parts.items():
        tally.add(name, part)
    tally.add("tokens", float(len(batch.logprobs_T)))
    for name, total in objective.sums.items():
        tally.add(f"mean/{RENAMED.get(name, name)}", total)
    if config.is_given:
        return
    drift_M = batch.behaviour_T - batch.logprobs_T.detach()
    tally.add("mean/approx_kl", drift_M.sum())
    live_M = batch.logprobs_T.detach()
    old_M = batch.behaviour_T if config.correction == "behaviour" else batch.proximal_T
    tally.top("ratio_max", (torch.zeros_like(live_M) if old_M is None else live_M - old_M).exp())
    if is_first:
        start_M = batch.logprobs_T.detach() if batch.proximal_T is None else batch.proximal_T
        gap_M = (start_M - batch.behaviour_T).abs()
        tally.add("first_tokens", float(len(gap_M)))
        tally.add("first_gap", gap_M.sum())
        tally.top("logprob_diff_abs_max", gap_M)


@dataclass(slots=True)
class TrainingStep:
    """What stays the same from the first to the last update of a step, and what is counted in it."""

    shard: TrainShard
    settings: StepSettings
    objective: AlgoConfig
    tally: MetricSums
    num_updates: int = 0
    mean_weights: Sequence[float] = ()
    """Of each mini-batch; see the function of that name."""
    failure: UserCodeError | None = None

    @classmethod
    def begin(cls, shard: TrainShard, settings: StepSettings) -> Self:
        objective = objective_config(settings.algo, max(1, len(shard.minibatches)))
        if objective.kind == "reward":
            shard = msgspec.structs.replace(shard, samples=tuple(map(to_score, shard.samples)))
        return cls(shard, settings, objective, MetricSums())

    def normalisers(self, number: int) -> dict[LossPart, Normaliser]:
        """Denominators of each part of the loss that the mini-batch has on any rank."""
        parts = dict(self.shard.minibatch_parts[number]) if self.shard.minibatch_parts else {}
        parts["algo"] = self.shard.minibatch_tokens[number], self.shard.minibatch_rollouts[number]
        return {
            part: Normaliser(
                tokens=tokens,
                samples=rollouts,
                constant=max(rollouts, 1.0) * self.settings.max_new_tokens,
                mean_weight=self.mean_weights[number],
            )
            for part, (tokens, rollouts) in parts.items()
        }

    def policy_loss(
        self,
        rows: MicroBatch[Any],
        scores: TokenScores,
        normalisers: Mapping[LossPart, Normaliser],
        tally: MetricSums,
        *,
        is_first: bool,
    ) -> Tensor:
        """A micro-batch's share of the global loss, 0-dim, and its metrics into the tally."""
        losses = [self._part(part, rows, scores, norm, tally, is_first) for part, norm in normalisers.items()]
        if scores.mtp_loss is not None:
            mean = scores.mtp_loss / max(sum(norm.tokens for norm in normalisers.values()), 1.0)
            tally.add("mtp_loss", mean)
            losses.append(self.settings.mtp * mean)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _part(
        self,
        part: LossPart,
        rows: MicroBatch[Any],
        scores: TokenScores,
        normaliser: Normaliser,
        tally: MetricSums,
        is_first: bool,
    ) -> Tensor:
        batch = token_batch(rows, scores.logprobs_M, scores.entropy_M, part)
        config, functions = self.objective, self.settings.functions
        if part == "sft":
            config, functions = supervised(config), OPTIONS_OWN
        try:
            objective = policy_objective(batch, config, normaliser, functions)
        except UserCodeError as error:  # the other ranks are in the middle of their passes: all hear of it after them
            self.failure = self.failure or error
            return scores.logprobs_M.sum() * 0
        with torch.no_grad():
            if part == "sft":
                tally.add("loss", objective.loss)
                tally.add("sft_loss", objective.loss)
            else:
                tally_objective(tally, config, batch, objective, is_first=is_first)
        return objective.loss


def tally_counts(tally: MetricSums, shard: TrainShard, micros: Sequence[MicroBatch[Any]]) -> None:
    values = (
        sum(s.num_tokens for s in shard.samples),
        len(shard.samples),
        sum(m.segments.num_samples for m in micros),
        sum(m.num_tokens for m in micros),
    )
    for name, value in zip(COUNTS, values, strict=True):
        tally.add(name, float(value))


def report(sums: Mapping[str, float], maxima: Mapping[str, float], num_updates: int, step_s: float) -> dict[str, float]:
    """Metrics under `train/` from sums over all ranks: means over loss tokens, losses over `num_updates` updates."""
    means = dict(sums)
    tokens = max(1.0, means.pop("tokens", 0.0))
    first_tokens = means.pop("first_tokens", None)
    first_gap = means.pop("first_gap", 0.0)
    metrics = {f"train/{name}": value for name, value in maxima.items()}
    for name, value in means.items():
        if name.startswith("mean/"):
            metrics[f"train/{name[5:]}"] = value / tokens
        else:
            metrics[f"train/{name}"] = value if name in COUNTS else value / max(1, num_updates)
    if first_tokens is not None:
        metrics["train/logprob_diff_abs_mean"] = first_gap / max(1.0, first_tokens)
    metrics["train/num_loss_tokens"] = tokens
    metrics["train/step_s"] = step_s
    metrics["train/tokens_per_s"] = metrics["train/num_tokens"] / max(step_s, 1e-9)
    return metrics


MAX_NAMED = 16

REMEDY = "look at these groups' rewards and log-probs; if they are sound, lower the learning rate"


def first_not_finite(values_K: Tensor) -> int:
    """Index of the first NaN or infinity, -1 if there is none."""
    bad = torch.nonzero(~torch.isfinite(values_K))
    return int(bad[0]) if bad.numel() else -1


def accusation(world: World, quantity: str, place: str, micro: int, group_ids: Sequence[int]) -> TrainError | None:
    """The error all ranks raise if any of them found micro-batch `micro` (-1: none) bad; None if all are well.
    `quantity`: "loss" or "gradient"; `place`: step and mini-batch in words."""
    ids = ", ".join(map(str, group_ids[:MAX_NAMED]))
    more = f" and {len(group_ids) - MAX_NAMED} more" if len(group_ids) > MAX_NAMED else ""
    clause = f"micro-batch {micro} of rank {world.rank} (groups {ids}{more})" if micro >= 0 else ""
    clauses = [text for text in world.exchange(clause) if text]
    if not clauses:
        return None
    return TrainError(f"{place}: the {quantity} is not a finite number in {'; '.join(clauses)}", remedy=REMEDY)


Loaded = Mapping[str, UserFunction]
"""Key of the run file -> function, of those that it names."""


def load_functions(algo: AlgoConfig) -> Loaded:
    """Those that ranks call. Raises ConfigError or UserCodeError."""
    names = ((algo.loss_fn, LOSS_FN), (algo.weight_fn, WEIGHT_FN))
    return {expected.key: load_function(name, expected) for name, expected in names if name}


def agree_on_source(world: World, functions: Loaded) -> None:
    """Raise ConfigError on every rank unless all have the same text of each function. Collective if there is one."""
    for key, function in functions.items():
        digests = world.exchange(source_digest(function.fn))
        differing_ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if differing_ranks:
            raise world.agreed(
                ConfigError(
                    f'{key} = "{function.name}": rank {differing_ranks[0]} has another text of it than rank 0',
                    remedy="install the same version of the module everywhere, or name a file, which goes with the run",
                )
            )


def called(functions: Loaded) -> TokenFunctions:
    """The functions as `policy_objective` calls them. They raise UserCodeError, naming the function, for what it raises
    and for what cannot be trained on."""
    loss, weight = functions.get(LOSS_FN.key), functions.get(WEIGHT_FN.key)
    return TokenFunctions(
        loss=None if loss is None else lambda tokens: _loss(f'{LOSS_FN.key} = "{loss.name}"', loss, tokens),
        weight=None if weight is None else lambda tokens: _weight(f'{WEIGHT_FN.key} = "{weight.name}"', weight, tokens),
    )


def _loss(label: str, function: UserFunction, tokens: LossTokens) -> TokenLoss:
    live_T = tokens.live_T
    nowhere_T = torch.zeros_like(live_T, dtype=torch.bool)
    if not live_T.numel():  # an empty micro-batch that only pads the count
        return TokenLoss(live_T * 0, nowhere_T, nowhere_T)
    loss, metrics = _pair(_call(label, function, tokens), dict[str, Tensor]())
    loss_T = _row(label, "its loss", loss, tokens)
    if live_T.requires_grad and not loss_T.requires_grad:
        raise UserCodeError(
            f"{label} returned a loss without gradient", remedy="compute it from tokens.live_T, not detached"
        )
    if not isinstance(metrics, Mapping):
        raise UserCodeError(f"{label} returned metrics of type {type(metrics).__name__}", remedy=MEND)
    rows = {
        " ".join(str(key).split()): _row(label, f'its metric "{key}"', row, tokens, is_flag=True).detach()
        for key, row in cast("Mapping[object, object]", metrics).items()
    }
    return TokenLoss(loss_T, nowhere_T, nowhere_T, rows)


def _weight(label: str, function: UserFunction, tokens: LossTokens) -> TokenWeights:
    everywhere_T = torch.ones_like(tokens.live_T, dtype=torch.bool)
    if not tokens.live_T.numel():
        return TokenWeights(tokens.live_T.detach(), everywhere_T, ~everywhere_T)
    weight, keep = _pair(_call(label, function, tokens), everywhere_T)
    keep_T = _row(label, "what it keeps", keep, tokens, is_flag=True).bool()
    return TokenWeights(_row(label, "its weight", weight, tokens).detach(), keep_T, ~keep_T)


def _call(label: str, function: UserFunction, tokens: LossTokens) -> Any:
    try:
        return function.fn(tokens)
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{label} raised {what_was_raised(error)}", remedy=MEND) from error


def _pair(returned: Any, otherwise: object) -> tuple[Any, Any]:
    values = cast("tuple[Any, ...]", returned) if isinstance(returned, tuple) else ()
    return (values[0], values[1]) if len(values) == 2 else (cast(Any, returned), otherwise)


def _row(label: str, part: str, value: object, tokens: LossTokens, *, is_flag: bool = False) -> Tensor:
    """A value that must be one float for each token (`is_flag`: or a whole number, or a truth). One that is not finite
    is the function's doing only if what it was given was finite; else the step says from which groups it came."""
    live_T = tokens.live_T
    if not isinstance(value, Tensor):
        raise UserCodeError(f"{label}: {part} is of type {type(value).__name__}, not a tensor", remedy=MEND)
    if value.shape != live_T.shape:
        raise UserCodeError(
            f"{label}: {part} has shape {list(value.shape)} for {live_T.numel()} tokens",
            remedy="return one value for each token; means and masks come afterwards",
        )
    is_number = value.is_floating_point() or (is_flag and not value.is_complex())
    if not is_number or value.device != live_T.device:
        raise UserCodeError(
            f"{label}: {part} is {value.dtype} on {value.device}, the log-probs are {live_T.dtype} on {live_T.device}",
            remedy="return floats on the device of tokens.live_T",
        )
    given = (tokens.live_T, tokens.old_T, tokens.behaviour_T, tokens.advantages_T, tokens.reference_T, tokens.entropy_T)
    token = first_not_finite(value.detach())
    if token >= 0 and all(first_not_finite(row_T.detach()) < 0 for row_T in given if row_T is not None):
        raise UserCodeError(
            f"{label}: {part} is {float(value.detach()[token])} at token {token} of {live_T.numel()}",
            remedy="return finite numbers: bound what goes into exp, log and divisions",
        )
    return value


def failure_of_all(world: World, failure: UserCodeError | None, place: str) -> UserCodeError:
    """What every rank raises once one of them has `failure`: the words of the lowest rank. Collective."""
    messages = world.exchange("" if failure is None else failure.message)
    rank = next(rank for rank, text in enumerate(messages) if text)
    return UserCodeError(f"{place}, rank {rank}: {messages[rank]}", remedy=MEND)


def name_metrics_alike(world: World, tally: MetricSums, functions: TokenFunctions) -> None:
    """Every rank names the metrics that any rank's loss gave, so that they can be added up. Collective if there is a
    loss of the user's."""
    if functions.loss is None:
        return
    names = "\n".join(sorted(name for name in tally.names if name.startswith("mean/user/")))
    for name in {name for text in world.exchange(names) for name in text.splitlines()}:
        tally.add(name, 0.0)
