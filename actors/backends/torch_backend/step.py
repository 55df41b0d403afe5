"""One training step: score what must be scored before, then one optimizer update per mini-batch.

    before     proximal log-probs (weights of the step's start), reference log-probs, token advantages, whitening
    update     forward and backward of every micro-batch -> agreement that all numbers are finite -> clip -> AdamW
    after      sums over micro-batches and ranks become metrics

Knows the objective (`algos/`), the replica and the world. Must not know files, processes or engines. A micro-batch
computes its *share* of the mini-batch's global mean (denominators come with the shard), so shares add up over
micro-batches and ranks, and any cut of a batch gives the same gradient. All ranks walk through the same passes in the
same order, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ....algos.advantages import needs_whitening
from ....algos.objective import (
    Normaliser,
    ObjectiveConfig,
    needs_proximal,
    needs_reference,
    objective_config,
    policy_objective,
)
from ....core.chaos import reached
from ....core.clock import Clock
from ....core.errors import MyxaError, TrainError, UserCodeError
from ....core.protocols import StepStats
from ....core.samples import F32, TrainSample, TrainShard
from ..shown_scores import ShownScores
from .accounting import (
    charges_kl,
    fill_advantages,
    mean_weights,
    report,
    skips_neutral,
    tally_counts,
    tally_objective,
    token_batch,
    whiten_together,
)
from .adamw import AdamW
from .finite import accusation, first_not_finite
from .layout import Layout, plan_layout
from .microbatch import (
    Cutting,
    MicroBatch,
    check_samples,
    check_shard,
    cut_shard,
    left_out,
    plan_scoring,
    scatter_scores,
)
from .parallel import Replica
from .schedule import learning_rate
from .settings import StepSettings, with_knobs
from .tally import Tally
from .tensors import backward, floats
from .token_functions import failure_of_all, name_metrics_alike


@dataclass(slots=True)
class _Step:
    """What stays the same from the first to the last update of a step."""

    shard: TrainShard
    settings: StepSettings
    objective: ObjectiveConfig
    tally: Tally
    shown: ShownScores
    num_updates: int = 0
    mean_weights: Sequence[float] = ()
    """Of each mini-batch; see `accounting.mean_weights`."""
    failure: UserCodeError | None = None
    """Of a function of the user's, on this rank."""


class Stepper:
    """Trains a replica, shard by shard."""

    def __init__(
        self,
        replica: Replica,
        reference: Replica | None,
        optimizer: AdamW,
        settings: StepSettings,
        cutting: Cutting,
        clock: Clock,
    ) -> None:
        self._replica = replica
        self._reference = reference
        self._optimizer = optimizer
        self._settings = settings
        self._cutting = cutting
        self._clock = clock
        self._world = replica.world

    def settings_for(self, knobs: dict[str, float]) -> StepSettings:
        """The settings with live values put in; needs no other rank. Raises ConfigError for impossible ones."""
        return with_knobs(self._settings, knobs, has_reference=self._reference is not None)

    def train(self, shard: TrainShard, settings: StepSettings) -> StepStats:
        """One update per mini-batch; returns metrics, equal on all ranks except for times, and what is shown.

        Raises TrainError, on all ranks and before the update concerned, if a loss or gradient is not finite, and
        UserCodeError likewise for a function of the user's that failed.
        """
        started_s = self._clock.monotonic()
        objective = objective_config(settings.algo, max(1, len(shard.minibatches)))
        step = _Step(shard, settings, objective, Tally(), ShownScores(shard))
        minibatches = cut_shard(shard, self._cutting_for(objective))
        self._score_before(step, minibatches)
        for number, micros in enumerate(minibatches):
            if micros:  # fewer groups than mini-batches: the last ones are empty on every rank
                problem = self._update(step, number, micros)
                if problem is not None:
                    self._optimizer.forget_gradients()
                    raise self._world.agreed(problem)
        return StepStats(metrics=self._metrics(step, minibatches, started_s), scores=step.shown.told())

    def score_shard(self, shard: TrainShard) -> list[F32]:
        """Log-probs of each sample's loss tokens, float32 [R] (0 where the mask is 0), through exactly the passes that
        `train` would make of this shard: with unchanged weights the numbers are the same to the last bit."""
        objective = objective_config(self._settings.algo, max(1, len(shard.minibatches)))
        cutting = self._cutting_for(objective)
        check_shard(shard, cutting.vocab_size)
        scores = [np.zeros(len(s.loss_mask), dtype=np.float32) for s in shard.samples]
        for minibatch in cut_shard(shard, cutting):
            for micro in minibatch:
                scores_M = self._replica.score(micro.layout).logprobs_M
                scatter_scores(scores_M, micro.layout, scores)
        if cutting.skips_neutral:
            self._score_micros(shard.samples, left_out(shard), scores)
        return scores

    def score(self, samples: Sequence[TrainSample], max_tokens: int) -> list[F32]:
        """Log-probs of each sample's loss tokens, float32 [R] (0 where the mask is 0); ranks may differ in samples."""
        check_samples(samples, self._cutting.vocab_size)
        scores = [np.zeros(len(s.loss_mask), dtype=np.float32) for s in samples]
        micros = plan_scoring(samples, max_tokens)
        longest = int(self._world.max(torch.tensor([len(micros)])).item())
        self._score_micros(samples, micros + [[] for _ in range(longest - len(micros))], scores)
        return scores

    def _score_micros(self, samples: Sequence[TrainSample], micros: Sequence[Sequence[int]], into: list[F32]) -> None:
        for members in micros:
            layout = plan_layout(samples, members, linear_cost=self._cutting.linear_cost, device=self._cutting.device)
            scores_M = self._replica.score(layout).logprobs_M
            scatter_scores(scores_M, layout, into)

    def _cutting_for(self, objective: ObjectiveConfig) -> Cutting:
        return replace(self._cutting, skips_neutral=skips_neutral(objective))

    # -- before the first update

    def _score_before(self, step: _Step, minibatches: Sequence[Sequence[MicroBatch[Layout]]]) -> None:
        """Fill in proximal and reference log-probs and the advantages of every token, and what is known of the weights
        of all of them."""
        objective = step.objective
        micros = [micro for minibatch in minibatches for micro in minibatch]
        for micro in micros:
            needs_start = needs_proximal(objective) or charges_kl(objective)
            start_M = self._replica.score(micro.layout).logprobs_M if needs_start else None
            if needs_proximal(objective):
                micro.proximal_M = start_M
            if needs_reference(objective) and self._reference is not None:
                micro.reference_M = self._reference.score(micro.layout).logprobs_M
            fill_advantages(micro, step.settings.algo, objective, start_M)
        if needs_whitening(objective.kind):
            whiten_together(micros, self._world.sum, self._world.device)
        step.mean_weights = mean_weights(minibatches, objective, self._world.sum, self._world.device)

    # -- one update

    def _update(self, step: _Step, number: int, micros: Sequence[MicroBatch[Layout]]) -> MyxaError | None:
        """Gradient of one mini-batch and an AdamW update; or the error that all ranks agreed on, and no update."""
        settings = step.settings
        place = f"step {step.shard.step}, mini-batch {number}"
        normaliser = Normaliser(
            tokens=step.shard.minibatch_tokens[number],
            samples=step.shard.minibatch_samples[number],
            constant=step.shard.minibatch_samples[number] * settings.max_new_tokens,
            mean_weight=step.mean_weights[number],
        )
        self._optimizer.forget_gradients()
        losses: list[Tensor] = []
        for micro in micros:
            loss = self._loss(step, micro, normaliser, is_first=number == 0)
            backward(loss * self._replica.loss_scale)
            losses.append(loss.detach())
        reached("trainer.all_reduce")
        self._replica.share_gradients()
        bad = first_not_finite(torch.stack(losses))
        norm = self._replica.gradient_norm()
        trouble = torch.tensor([step.failure is not None, bad >= 0, not torch.isfinite(norm)], dtype=torch.float32)
        has_failed, loss_is_bad, gradient_is_bad = floats(self._world.max(trouble))
        if has_failed:
            return failure_of_all(self._world, step.failure, place)
        if loss_is_bad:
            return accusation(self._world, "loss", place, bad, micros[bad].group_ids if bad >= 0 else ())
        if gradient_is_bad:
            return self._find_bad_gradient(step, micros, normaliser, place)
        rate = learning_rate(settings.optimizer, self._optimizer.num_updates, settings.total_updates)
        self._replica.clip(norm, settings.optimizer.max_grad_norm)
        reached("trainer.optimizer")
        self._optimizer.update(rate, settings.optimizer.weight_decay)
        step.num_updates += 1
        share = 1.0 / self._world.size  # equal on all ranks, and the tally adds ranks up
        step.tally.add("grad_norm", norm * share)
        step.tally.add("lr", rate * share)
        return None

    def _loss(self, step: _Step, micro: MicroBatch[Layout], normaliser: Normaliser, *, is_first: bool) -> Tensor:
        """This micro-batch's share of the global loss, 0-dim, and its metrics into the tally."""
        needs_entropy_grad = step.objective.entropy_coef > 0
        reached("trainer.forward")
        scores = self._replica.forward(micro.layout, needs_entropy_grad=needs_entropy_grad)
        step.shown.take(micro.layout, scores.logprobs_M)
        batch = token_batch(micro, scores.logprobs_M, scores.entropy_M)
        try:
            objective = policy_objective(batch, step.objective, normaliser, step.settings.functions)
        except UserCodeError as error:  # the other ranks are in the middle of their passes: all hear of it after them
            step.failure = step.failure or error
            return scores.logprobs_M.sum() * 0
        with torch.no_grad():
            tally_objective(step.tally, step.objective, batch, objective, is_first=is_first)
        return objective.loss

    def _find_bad_gradient(
        self, step: _Step, micros: Sequence[MicroBatch[Layout]], normaliser: Normaliser, place: str
    ) -> TrainError:
        """All losses are finite but the gradient is not: repeat the passes one by one to find where it comes from."""
        bad = -1
        for k, micro in enumerate(micros):
            self._optimizer.forget_gradients()
            spare = _Step(step.shard, step.settings, step.objective, Tally(), ShownScores(step.shard))
            backward(self._loss(spare, micro, normaliser, is_first=False))
            if bad < 0 and not self._replica.local_gradient_is_finite():
                bad = k
        found = accusation(self._world, "gradient", place, bad, micros[bad].group_ids if bad >= 0 else ())
        return found or TrainError(
            f"{place}: the gradient is not a finite number, though that of every micro-batch is",
            remedy="lower the learning rate or the loss: their sum overflows",
        )

    # -- metrics

    def _metrics(
        self, step: _Step, minibatches: Sequence[Sequence[MicroBatch[Layout]]], started_s: float
    ) -> dict[str, float]:
        """Everything reduced over ranks, under `train/`; see `report`."""
        tally_counts(step.tally, step.shard, [micro for minibatch in minibatches for micro in minibatch])
        name_metrics_alike(self._world, step.tally, step.settings.functions)
        sums, maxima = step.tally.reduced(self._world)
        metrics = report(sums, maxima, step.num_updates, self._clock.monotonic() - started_s)
        metrics["train/num_updates"] = float(self._optimizer.num_updates)
        return metrics
