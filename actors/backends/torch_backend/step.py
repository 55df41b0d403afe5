"""One training step: score what must be scored before, then one optimizer update per mini-batch.

    before     proximal log-probs (weights of the step's start), reference log-probs, a critic's values, token
               advantages, whitening
    update     forward and backward of every micro-batch -> agreement that all numbers are finite -> clip -> AdamW,
               for the policy and for the critic, if there is one
    after      sums over micro-batches and ranks become metrics

A micro-batch computes its *share* of the mini-batch's global mean (denominators come with the shard), so shares add up
over micro-batches and ranks, and any cut of a batch gives the same gradient. All ranks run the same passes in the same
order, whatever they hold. A `Learner` is one model's update; all learners have their gradients before any is updated,
so that all are or none is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ....algos.objective import (
    Normaliser,
    ObjectiveConfig,
    needs_proximal,
    needs_reference,
    needs_whitening,
    objective_config,
)
from ....core.clock import Clock
from ....core.errors import MyxaError, TrainError
from ....core.protocols import StepStats
from ....core.samples import F32, TrainSample, TrainShard
from .accounting import (
    MetricSums,
    TrainingStep,
    accusation,
    charges_kl,
    fill_advantages,
    first_not_finite,
    mean_weights,
    report,
    skips_neutral,
    tally_counts,
    whiten_together,
)
from .adamw import AdamW
from .critic import Critic, take_metrics
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
    served_reference,
)
from .parallel import Replica
from .settings import StepSettings, learning_rate, with_knobs
from .tensors import backward, floats
from .token_functions import failure_of_all, name_metrics_alike

LossOf = Callable[[MicroBatch[Layout], MetricSums], Tensor]
"""A micro-batch's share of the mini-batch's loss, 0-dim; its metrics go into the tally."""


class Learner:
    """Of one mini-batch."""

    def __init__(
        self, replica: Replica, optimizer: AdamW, loss_of: LossOf, *, name: str = "", is_held: bool = False
    ) -> None:
        """`name`: before the names of its metrics and in errors; empty for the policy. `is_held`: losses are computed
        and reported; no weight changes."""
        self.name = name
        self._replica = replica
        self._optimizer = optimizer
        self._loss_of = loss_of
        self._is_held = is_held
        self._losses: list[Tensor] = []
        self._norm = torch.zeros(())

    def backward(self, micros: Sequence[MicroBatch[Layout]], tally: MetricSums) -> None:
        self._optimizer.forget_gradients()
        for micro in micros:
            with torch.set_grad_enabled(not self._is_held):
                loss = self._loss_of(micro, tally)
            if not self._is_held:
                backward(loss * self._replica.loss_scale)
            self._losses.append(loss.detach())

    def share(self) -> None:
        """Gradients of all ranks, and their norm. Collective."""
        if not self._is_held:
            self._replica.share_gradients()
            self._norm = self._replica.gradient_norm()

    def bad_loss(self) -> int:
        """Number of this rank's first micro-batch whose loss is not finite; -1: none."""
        return first_not_finite(torch.stack(self._losses))

    def has_bad_gradient(self) -> bool:
        return not bool(torch.isfinite(self._norm))

    def find_bad_gradient(self, micros: Sequence[MicroBatch[Layout]]) -> int:
        """All losses are finite but the gradient is not: the passes one by one again, to find this rank's first
        micro-batch that it comes from; -1: none. Collective under fsdp."""
        bad = -1
        for number, micro in enumerate(micros):
            self._optimizer.forget_gradients()
            backward(self._loss_of(micro, MetricSums()))
            if bad < 0 and not self._replica.local_gradient_is_finite():
                bad = number
        return bad

    def update(self, rate: float, max_grad_norm: float, weight_decay: float, tally: MetricSums) -> None:
        if not self._is_held:
            self._replica.clip(self._norm, max_grad_norm)
            self._optimizer.update(rate, weight_decay)
        share = 1.0 / self._replica.world.size  # equal on all ranks, and the tally adds ranks up
        tally.add(f"{self.name}grad_norm", self._norm * share)
        tally.add(f"{self.name}lr", 0.0 if self._is_held else rate * share)


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
        critic: Critic | None = None,
    ) -> None:
        self._replica = replica
        self._reference = reference
        self._optimizer = optimizer
        self._settings = settings
        self._cutting = cutting
        self._clock = clock
        self._critic = critic
        self._world = replica.world

    def settings_for(self, knobs: dict[str, float]) -> StepSettings:
        """The settings with live values put in; needs no other rank. Raises ConfigError for impossible ones."""
        return with_knobs(self._settings, knobs, has_reference=self._reference is not None)

    def train(self, shard: TrainShard, settings: StepSettings) -> StepStats:
        """One update per mini-batch; returns metrics, equal on all ranks except for times, and what is shown. Raises
        TrainError, on all ranks and before the update concerned, if a loss or gradient is not finite, and UserCodeError
        likewise for a function of the user's that failed."""
        started_s = self._clock.monotonic()
        step = TrainingStep.begin(shard, settings)
        minibatches = cut_shard(shard, self._cutting_for(step.objective))
        self._score_before(step, minibatches)
        for number, micros in enumerate(minibatches):
            if micros:  # fewer groups than mini-batches: the last ones are empty on every rank
                problem = self._update(step, number, micros)
                if problem is not None:
                    self._optimizer.forget_gradients()
                    if self._critic is not None:
                        self._critic.optimizer.forget_gradients()
                    self._reshard()
                    raise self._world.agreed(problem)
        self._reshard()
        return StepStats(metrics=self._metrics(step, minibatches, started_s), scores=step.shown.scores())

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
        self._reshard()
        return scores

    def score(self, samples: Sequence[TrainSample], max_tokens: int) -> list[F32]:
        """Log-probs of each sample's loss tokens, float32 [R] (0 where the mask is 0); ranks may differ in samples."""
        check_samples(samples, self._cutting.vocab_size)
        scores = [np.zeros(len(s.loss_mask), dtype=np.float32) for s in samples]
        micros = plan_scoring(samples, max_tokens)
        longest = int(self._world.max(torch.tensor([len(micros)])).item())
        self._score_micros(samples, micros + [[] for _ in range(longest - len(micros))], scores)
        self._reshard()
        return scores

    def _score_micros(self, samples: Sequence[TrainSample], micros: Sequence[Sequence[int]], into: list[F32]) -> None:
        for members in micros:
            layout = plan_layout(samples, members, linear_cost=self._cutting.linear_cost, device=self._cutting.device)
            scores_M = self._replica.score(layout).logprobs_M
            scatter_scores(scores_M, layout, into)

    def _reshard(self) -> None:
        self._replica.reshard()
        if self._critic is not None:
            self._critic.replica.reshard()

    def _cutting_for(self, objective: ObjectiveConfig) -> Cutting:
        return replace(self._cutting, skips_neutral=skips_neutral(objective))

    def _score_before(self, step: TrainingStep, minibatches: Sequence[Sequence[MicroBatch[Layout]]]) -> None:
        """Fill in proximal and reference log-probs, values, and the advantages of every token, and what is known of
        the weights of all of them."""
        objective = step.objective
        micros = [micro for minibatch in minibatches for micro in minibatch]
        for micro in micros:
            needs_start = needs_proximal(objective) or charges_kl(objective)
            start_M = self._replica.score(micro.layout).logprobs_M if needs_start else None
            if needs_proximal(objective):
                micro.proximal_M = start_M
            if needs_reference(objective):
                if self._reference is None:  # it came with the samples
                    micro.reference_M = served_reference(micro.layout, step.shard.samples, self._world.device)
                else:
                    micro.reference_M = self._reference.score(micro.layout).logprobs_M
            if self._critic is not None:
                micro.values_M = self._critic.values(micro.layout)
            fill_advantages(micro, step.settings.algo, objective, start_M)
            if self._critic is not None:
                self._critic.count(micro, step.tally)
        if needs_whitening(objective):
            whiten_together(micros, self._world.sum, self._world.device)
        step.mean_weights = mean_weights(minibatches, objective, self._world.sum, self._world.device)

    def _update(self, step: TrainingStep, number: int, micros: Sequence[MicroBatch[Layout]]) -> MyxaError | None:
        """Gradients of one mini-batch and AdamW updates of policy and critic; or the error that all ranks agreed on,
        and no update of either."""
        settings = step.settings
        place = f"step {step.shard.step}, mini-batch {number}"
        normaliser = step.normaliser(number)
        learners = self._learners(step, normaliser, is_first=number == 0)
        for learner in learners:
            learner.backward(micros, step.tally)
        for learner in learners:
            learner.share()
        problem = self._trouble(step, learners, micros, place)
        if problem is not None:
            return problem
        rates = [learning_rate(settings.optimizer, self._optimizer.num_updates, settings.total_updates)]
        if self._critic is not None:
            rates.append(self._critic.rate(settings.optimizer))
        for learner, rate in zip(learners, rates, strict=True):
            learner.update(rate, settings.optimizer.max_grad_norm, settings.optimizer.weight_decay, step.tally)
        step.num_updates += 1
        return None

    def _learners(self, step: TrainingStep, normaliser: Normaliser, *, is_first: bool) -> list[Learner]:
        critic = self._critic

        def policy_loss(micro: MicroBatch[Layout], tally: MetricSums) -> Tensor:
            needs_entropy_grad = step.objective.entropy_coef > 0
            scores = self._replica.forward(micro.layout, needs_entropy_grad=needs_entropy_grad)
            step.shown.take(micro.layout, scores.logprobs_M)
            return step.policy_loss(micro, scores, normaliser, tally, is_first=is_first)

        is_held = critic is not None and critic.trains_alone(step.shard.step)
        learners = [Learner(self._replica, self._optimizer, policy_loss, is_held=is_held)]
        if critic is not None:

            def critic_loss(micro: MicroBatch[Layout], tally: MetricSums) -> Tensor:
                return critic.loss(micro, normaliser.tokens, tally)

            learners.append(Learner(critic.replica, critic.optimizer, critic_loss, name="critic_"))
        return learners

    def _trouble(
        self, step: TrainingStep, learners: Sequence[Learner], micros: Sequence[MicroBatch[Layout]], place: str
    ) -> MyxaError | None:
        """What any rank found to be wrong with any learner, in the words of all; None if all is well. Collective."""
        bad = [learner.bad_loss() for learner in learners]
        own = [step.failure is not None]
        for learner, micro in zip(learners, bad, strict=True):
            own += [micro >= 0, learner.has_bad_gradient()]
        has_failed, *found = floats(self._world.max(torch.tensor(own, dtype=torch.float32)))
        if has_failed:
            return failure_of_all(self._world, step.failure, place)
        for k, learner in enumerate(learners):
            whose = "critic's " if learner.name else ""
            if found[2 * k]:
                groups = micros[bad[k]].group_ids if bad[k] >= 0 else ()
                return accusation(self._world, f"{whose}loss", place, bad[k], groups)
            if found[2 * k + 1]:
                return self._bad_gradient(learner, micros, f"{whose}gradient", place)
        return None

    def _bad_gradient(
        self, learner: Learner, micros: Sequence[MicroBatch[Layout]], what: str, place: str
    ) -> TrainError:
        bad = learner.find_bad_gradient(micros)
        found = accusation(self._world, what, place, bad, micros[bad].group_ids if bad >= 0 else ())
        return found or TrainError(
            f"{place}: the {what} is not a finite number, though that of every micro-batch is",
            remedy="lower the learning rate or the loss: their sum overflows",
        )

    def _metrics(
        self, step: TrainingStep, minibatches: Sequence[Sequence[MicroBatch[Layout]]], started_s: float
    ) -> dict[str, float]:
        """Everything reduced over ranks, under `train/`; see `report`."""
        tally_counts(step.tally, step.shard, [micro for minibatch in minibatches for micro in minibatch])
        name_metrics_alike(self._world, step.tally, step.settings.functions)
        sums, maxima = step.tally.reduced(self._world)
        values = take_metrics(sums)
        metrics = {**report(sums, maxima, step.num_updates, self._clock.monotonic() - started_s), **values}
        metrics["train/num_updates"] = float(self._optimizer.num_updates)
        return metrics
