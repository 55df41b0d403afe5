"""One training step, for both trainers: score what must be scored before, then one optimizer update per mini-batch.

    before     proximal log-probs (weights of the step's start), reference log-probs, a critic's values, token
               advantages, whitening
    epochs     all of the batch so often; what was scored before stays
    update     forward and backward of every micro-batch -> agreement that all numbers are finite -> clip -> AdamW,
               for the policy and for the critic, if there is one
    after      the policy becomes the reference, where that is due; sums over micro-batches and ranks become metrics,
               the same on every rank

A micro-batch computes its *share* of the mini-batch's global mean (denominators come with the shard), so shares add up
over micro-batches and ranks, and any cut of a batch gives the same gradient. All ranks run the same passes in the same
order, whatever they hold. All models have their gradients before any is updated, so that all are or none is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...algos.objective import Normaliser, needs_proximal, needs_whitening
from ...core.clock import Clock
from ...core.config.learning import AlgoConfig
from ...core.errors import MyxaError, TrainError
from ...core.protocols import StepStats
from ...core.samples import LossPart, TrainShard
from .torch_backend.accounting import (
    Learner,
    MetricSums,
    Micros,
    ReferenceModel,
    StepSettings,
    TrainedModel,
    TrainingStep,
    accusation,
    charges_kl,
    failure_of_all,
    fill_advantages,
    learning_rate,
    mean_weights,
    name_metrics_alike,
    report,
    skips_neutral,
    tally_counts,
    whiten_together,
    with_knobs,
)
from .torch_backend.critic import Critic, take_metrics
from .torch_backend.layout import MicroBatch, group_numbers, served_reference
from .torch_backend.tensors import floats
from .vocab_scores import TokenScores


@dataclass(frozen=True, slots=True)
class Stepper:
    """Trains a policy, shard by shard."""

    policy: TrainedModel
    reference: ReferenceModel[Any] | None
    settings: StepSettings
    clock: Clock
    critic: Critic | None = None

    def settings_for(self, knobs: dict[str, float]) -> StepSettings:
        """The settings with live values put in; needs no other rank. Raises ConfigError for impossible ones."""
        reference = self.reference
        can_renew = reference is not None and reference.can_renew
        return with_knobs(self.settings, knobs, has_reference=reference is not None, can_renew=can_renew)

    def train(self, shard: TrainShard, settings: StepSettings) -> StepStats:
        """One update per mini-batch and epoch; returns metrics, equal on all ranks except for times, and what is shown.
        Ranks of one replica give the same shard. Raises TrainError, on all ranks and before the update concerned, if a
        loss or gradient is not finite, and UserCodeError likewise for a function of the user's that failed."""
        started_s = self.clock.monotonic()
        step = TrainingStep.begin(shard, settings)
        if shard.is_held_out:
            return StepStats(metrics=self._evaluate(step, started_s))
        minibatches = self.policy.cut(step.shard, skips_neutral=skips_neutral(step.objective))
        self._score_before(step, minibatches)
        for number, micros in list(enumerate(minibatches)) * settings.algo.epochs:
            if micros:  # fewer groups than mini-batches: the last ones are empty on every rank
                problem = self._update(step, number, micros)
                if problem is not None:
                    for model in [self.policy] if self.critic is None else [self.policy, self.critic.model]:
                        model.optimizer.forget_gradients()
                    raise self.policy.world.agreed(problem)
        version, period = shard.step + 1, settings.algo.ref_update_every
        if self.reference is not None and period and version % period == 0:
            self.reference.renew(self.policy, version)
        return StepStats(metrics=self._metrics(step, minibatches, started_s))

    @torch.no_grad()
    def _evaluate(self, step: TrainingStep, started_s: float) -> dict[str, float]:
        """Loss and metrics under the weights as they are."""
        minibatches = self.policy.cut(step.shard, skips_neutral=False)
        self._score_before(step, minibatches)
        for number, micros in enumerate(minibatches):
            scores = self.policy.score([micro.layout for micro in micros])
            normalisers = step.normalisers(number)
            for micro, micro_scores in zip(micros, scores, strict=False):  # none on ranks that do not score
                step.policy_loss(micro, micro_scores, normalisers, step.tally, is_first=False)
            step.num_updates += 1
        return self._metrics(step, minibatches, started_s)

    def _score_before(self, step: TrainingStep, minibatches: Sequence[Micros]) -> None:
        """Fill in proximal and reference log-probs, values, and the advantages of every token, and what is known of
        the weights of all of them."""
        objective, policy, critic, device = step.objective, self.policy, self.critic, self.policy.world.device
        micros = [micro for minibatch in minibatches for micro in minibatch]
        layouts = [micro.layout for micro in micros]
        step.mean_weights = [1.0] * len(minibatches)  # ranks that do not score have no use for another
        starts = policy.score_start(layouts) if _needs_start(objective) else []
        reference = self.reference if objective.uses_reference else None
        references: list[Any] = reference.model.score(layouts) if reference else []
        if not policy.is_scoring:
            return
        for number, micro in enumerate(micros):
            start_M = starts[number].logprobs_M if starts else None
            if needs_proximal(objective):
                micro.proximal_M = start_M
            if references:
                micro.reference_M = references[number].logprobs_M
            elif objective.uses_reference:
                micro.reference_M = served_reference(micro.layout, step.shard.samples, device)
            if objective.learns_pairs:
                micro.pair_S = group_numbers(micro.layout, step.shard.samples, device)
            if critic is not None:
                micro.values_M = critic.values(micro.layout)
            fill_advantages(micro, step.settings.algo, objective, start_M)
            if critic is not None:
                critic.count(micro, step.tally)
        if needs_whitening(objective):
            whiten_together(micros, policy.replicas.sum, device)
        step.mean_weights = mean_weights(minibatches, objective, policy.replicas.sum, device)

    def _update(self, step: TrainingStep, number: int, micros: Micros) -> MyxaError | None:
        """Gradients of one mini-batch and updates of policy and critic; or the error that all ranks agreed on,
        and no update of either."""
        settings = step.settings.optimizer
        learners = self._learners(step, step.normalisers(number))
        for learner in learners:
            learner.passes(micros, step.tally)
        for learner in learners:
            if not learner.is_held:
                learner.norm = learner.model.gradient_norm()
        problem = self._fault(step, learners, micros, f"step {step.shard.step}, mini-batch {number}")
        if problem is not None:
            return problem
        rates = [learning_rate(settings, self.policy.num_updates, step.settings.total_updates)]
        if self.critic is not None:
            rates.append(self.critic.rate(settings))
        for learner, rate in zip(learners, rates, strict=True):
            learner.update(rate, settings, step.tally)
        step.num_updates += 1
        return None

    def _learners(self, step: TrainingStep, normalisers: Mapping[LossPart, Normaliser]) -> list[Learner]:
        policy, critic, is_first = self.policy, self.critic, step.num_updates == 0

        def policy_loss(micro: MicroBatch[Any], scores: TokenScores, tally: MetricSums) -> Tensor:
            return step.policy_loss(micro, scores, normalisers, tally, is_first=is_first)

        is_held = critic is not None and critic.trains_alone(step.shard.step)
        learners = [
            Learner(policy, policy_loss, step.objective.entropy_coef > 0, _needs_start(step.objective), is_held)
        ]
        if critic is not None:

            def critic_loss(micro: MicroBatch[Any], values_M: Tensor, tally: MetricSums) -> Tensor:
                return critic.loss(micro, values_M, normalisers["algo"].tokens, tally)

            learners.append(Learner(critic.model, critic_loss, name="critic_"))
        return learners

    def _fault(self, step: TrainingStep, learners: Sequence[Learner], micros: Micros, place: str) -> MyxaError | None:
        """What any rank found to be wrong with any model, in the words of all; None if all is well. Collective."""
        flags = [step.failure is not None]
        for learner in learners:
            flags += [learner.bad_loss >= 0, not bool(torch.isfinite(learner.norm))]
        has_failed, *faults = floats(self.policy.world.max(torch.tensor(flags, dtype=torch.float32)))
        if has_failed:
            return failure_of_all(self.policy.world, step.failure, place)
        for k, learner in enumerate(learners):
            whose = "critic's " if learner.name else ""
            if faults[2 * k]:
                return self._accuse(f"{whose}loss", place, learner.bad_loss, micros)
            if faults[2 * k + 1]:
                return self._bad_gradient(learner, micros, f"{whose}gradient", place)
        return None

    def _accuse(self, quantity: str, place: str, bad: int, micros: Micros) -> TrainError | None:
        accused = bad if self.policy.is_teller else -1
        return accusation(self.policy.world, quantity, place, accused, micros[bad].group_ids if bad >= 0 else ())

    def _bad_gradient(self, learner: Learner, micros: Micros, quantity: str, place: str) -> TrainError:
        """All losses are finite but the gradient is not: the passes one by one again, to find the first micro-batch
        that it comes from. A pipeline sums gradients over replicas as they are made: the micro-batches of one round are
        then accused together."""
        bad = -1
        for number, micro in enumerate(micros):
            learner.passes(self.policy.fill_up(micro), MetricSums())
            if not learner.model.has_finite_gradient() and bad < 0:
                bad = number
        return self._accuse(quantity, place, bad, micros) or TrainError(
            f"{place}: the {quantity} is not a finite number, though that of every micro-batch is",
            remedy="lower the learning rate or the loss: their sum overflows",
        )

    def _metrics(self, step: TrainingStep, minibatches: Sequence[Micros], started_s: float) -> dict[str, float]:
        """Everything reduced over replicas, under `train/`; see `report`."""
        tally_counts(step.tally, step.shard, [micro for minibatch in minibatches for micro in minibatch])
        name_metrics_alike(self.policy.world, step.tally, step.settings.functions)

        totals = step.tally.reduced(self.policy.replicas) if self.policy.is_scoring else ()
        texts = self.policy.world.exchange(json.dumps(totals) if totals else "")
        sums, maxima = json.loads(next(text for text in texts if text))  # all that score say the same
        values = take_metrics(sums)
        metrics = {**report(sums, maxima, step.num_updates, self.clock.monotonic() - started_s), **values}
        metrics["train/num_updates"] = float(self.policy.num_updates)
        if self.reference is not None:
            metrics["train/reference_version"] = float(self.reference.version)
        return metrics


def _needs_start(objective: AlgoConfig) -> bool:
    return needs_proximal(objective) or charges_kl(objective)
