"""What a step does beside the model: advantages before it, the objective's metrics in it, the report after it.

`MetricSums` adds up sums and maxima over micro-batches and then over ranks; nothing is read from the device until
`reduced`. `accusation` lets all ranks agree on a loss or gradient that is not finite, with the names of what caused it:
every rank says what it saw, and either all raise or none, so no rank takes an optimizer step that another refuses.
Both training backends use these functions, so for one batch they report the same numbers under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ....algos.advantages import less_kl, token_advantages, whiten
from ....algos.kl import kl_terms
from ....algos.objective import (
    OPTIONS_OWN,
    Normaliser,
    Objective,
    TokenBatch,
    needs_whitening,
    objective_config,
    policy_objective,
    supervised,
    weight_sums,
)
from ....algos.segments import Segments
from ....core.config import AlgoConfig
from ....core.errors import TrainError, UserCodeError
from ....core.samples import LossPart, TrainShard
from ..vocab_scores import TokenScores
from .microbatch import MicroBatch
from .settings import StepSettings
from .tensors import floats
from .world import RankGroup, World


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
        objective.loss != "sft"
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
    where = None
    if rows.parts or part != "algo":
        where = rows.parts.get(part, torch.zeros(0, dtype=torch.int64, device=logprobs_M.device))

    def own(x_M: Tensor | None) -> Tensor | None:
        return x_M if x_M is None or where is None else x_M[where]

    def chosen(x_M: Tensor) -> Tensor:
        return x_M if where is None else x_M[where]

    return TokenBatch(
        logprobs_T=chosen(logprobs_M),
        behaviour_T=chosen(rows.behaviour_M),
        advantages_T=chosen(rows.advantages_M),
        segments=Segments(chosen(rows.segments.sample_T), rows.segments.num_samples),
        proximal_T=own(rows.proximal_M),
        reference_T=own(rows.reference_M),
        entropy_T=chosen(entropy_M),
        weights_T=own(rows.weights_M),
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
    if config.loss == "sft":
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
        losses = [self._part(part, rows, scores, one, tally, is_first) for part, one in normalisers.items()]
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
    left = dict(sums)
    tokens = max(1.0, left.pop("tokens", 0.0))
    first_tokens = left.pop("first_tokens", None)
    first_gap = left.pop("first_gap", 0.0)
    metrics = {f"train/{name}": value for name, value in maxima.items()}
    for name, value in left.items():
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


def accusation(world: World, what: str, place: str, micro: int, group_ids: Sequence[int]) -> TrainError | None:
    """The error all ranks raise if any of them found micro-batch `micro` (-1: none) bad; None if all are well. `what`:
    "loss" or "gradient"; `place`: step and mini-batch in words."""
    ids = ", ".join(map(str, group_ids[:MAX_NAMED]))
    more = f" and {len(group_ids) - MAX_NAMED} more" if len(group_ids) > MAX_NAMED else ""
    own = f"micro-batch {micro} of rank {world.rank} (groups {ids}{more})" if micro >= 0 else ""
    clauses = [text for text in world.exchange(own) if text]
    if not clauses:
        return None
    return TrainError(f"{place}: the {what} is not a finite number in {'; '.join(clauses)}", remedy=REMEDY)
