"""One training step under Megatron: the torch backend's step, with passes that run through a pipeline.

    before     proximal and reference log-probs (forward only), token advantages, whitening
    update     forward and backward of all micro-batches -> agreement that all numbers are finite -> clip -> AdamW
    after      sums over micro-batches and replicas become metrics, the same on every rank

The loss is made on scoring ranks (last pipeline stage); tensor and context ranks of one replica make the same loss of
the same scores. Metrics, denominators and refusals are those of the torch backend, by the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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
from ..torch_backend.accounting import (
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
from ..torch_backend.microbatch import (
    check_samples,
    left_out,
    plan_scoring,
    scatter_scores,
    served_reference,
)
from ..torch_backend.settings import StepSettings, learning_rate, with_knobs
from ..torch_backend.tensors import floats, from_array
from ..torch_backend.token_functions import failure_of_all, name_metrics_alike
from ..vocab_scores import TokenScores
from .batch import Pack, PackCutting, PackedBatch, cut_shard, pack_samples
from .optimizer import MegatronAdamW
from .schedule import Pipeline
from .world import MegatronWorld


class MegatronStepper:
    """Trains a pipeline, shard by shard."""

    def __init__(
        self,
        pipeline: Pipeline,
        reference: Pipeline | None,
        optimizer: MegatronAdamW,
        settings: StepSettings,
        cutting: PackCutting,
        world: MegatronWorld,
        clock: Clock,
    ) -> None:
        self._pipeline = pipeline
        self._reference = reference
        self._optimizer = optimizer
        self._settings = settings
        self._cutting = cutting
        self._world = world
        self._clock = clock

    @property
    def has_reference(self) -> bool:
        return self._reference is not None

    def settings_for(self, knobs: dict[str, float]) -> StepSettings:
        """The settings with live values put in; needs no other rank. Raises ConfigError for impossible ones."""
        return with_knobs(self._settings, knobs, has_reference=self._reference is not None)

    def train(self, shard: TrainShard, settings: StepSettings) -> StepStats:
        """One update per mini-batch; returns metrics, equal on all ranks except for times, and what is shown. Ranks of
        one replica give the same shard. Raises TrainError, on all ranks and before the update concerned, if a loss or
        gradient is not finite, and UserCodeError likewise for a function of the user's that failed."""
        started_s = self._clock.monotonic()
        step = TrainingStep.begin(shard, settings)
        minibatches = cut_shard(shard, self._cutting_for(step.objective))
        self._score_before(step, minibatches)
        for number, micros in enumerate(minibatches):
            if micros:  # fewer groups than mini-batches: the last ones are empty on every rank
                problem = self._update(step, number, micros)
                if problem is not None:
                    self._optimizer.forget_gradients()
                    raise self._world.agreed(problem)
        return StepStats(metrics=self._metrics(step, minibatches, started_s), scores=step.shown.scores())

    def score_shard(self, shard: TrainShard) -> list[F32]:
        """Log-probs of each sample's loss tokens, float32 [R] (0 where the mask is 0), through exactly the passes that
        `train` would make of this shard: with unchanged weights the numbers are the same to the last bit."""
        objective = objective_config(self._settings.algo, max(1, len(shard.minibatches)))
        cutting = self._cutting_for(objective)
        scores = [np.zeros(len(s.loss_mask), dtype=np.float32) for s in shard.samples]
        for micros in cut_shard(shard, cutting):
            self._score_packs([micro.layout for micro in micros], scores)
        if cutting.skips_neutral:
            rest = [pack_samples(shard.samples, members, cutting) for members in left_out(shard)]
            self._score_packs(self._even(rest), scores)
        return self._on_all_ranks(scores)

    def score(self, samples: Sequence[TrainSample], max_tokens: int) -> list[F32]:
        """Log-probs of each sample's loss tokens, float32 [R] (0 where the mask is 0); replicas may differ in samples,
        ranks of one replica may not."""
        check_samples(samples, self._cutting.vocab_size)
        scores = [np.zeros(len(s.loss_mask), dtype=np.float32) for s in samples]
        packs = [pack_samples(samples, members, self._cutting) for members in plan_scoring(samples, max_tokens)]
        longest = int(self._world.max(torch.tensor([len(packs)])).item())
        self._score_packs(self._even(packs, longest), scores)
        return self._on_all_ranks(scores)

    def _score_packs(self, packs: Sequence[Pack], into: list[F32]) -> None:
        found = self._pipeline.score(packs)
        for pack, scores in zip(packs, found, strict=False):  # empty on ranks that do not score
            scatter_scores(scores.logprobs_M, pack, into)

    def _on_all_ranks(self, scores: list[F32]) -> list[F32]:
        joined = from_array(np.concatenate([*scores, np.zeros(0, np.float32)]))
        whole = self._world.shared(joined).cpu().numpy()
        bounds = np.cumsum([len(s) for s in scores])[:-1]
        return np.split(whole, bounds) if scores else []

    def _even(self, packs: Sequence[Pack], at_least: int = 0) -> list[Pack]:
        """Filled up with empty packs to what the schedule takes."""
        count = max(len(packs), at_least)
        missing = -(-count // self._cutting.multiple_of_micros) * self._cutting.multiple_of_micros - len(packs)
        return [*packs, *(pack_samples((), (), self._cutting) for _ in range(missing))]

    def _cutting_for(self, objective: ObjectiveConfig) -> PackCutting:
        return replace(self._cutting, skips_neutral=skips_neutral(objective))

    def _score_before(self, step: TrainingStep, minibatches: Sequence[Sequence[PackedBatch]]) -> None:
        """Fill in proximal and reference log-probs and the advantages of every token, and what is known of the weights
        of all of them."""
        objective = step.objective
        micros = [micro for minibatch in minibatches for micro in minibatch]
        step.mean_weights = [1.0] * len(minibatches)  # ranks that do not score have no use for another
        packs = [micro.layout for micro in micros]
        starts: list[TokenScores] = []
        references: list[TokenScores] = []
        if needs_proximal(objective) or charges_kl(objective):
            with self._pipeline.routed("record"):
                starts = self._pipeline.score(packs)
        if needs_reference(objective) and self._reference is not None:
            references = self._reference.score(packs)
        if not self._world.place.is_scoring:
            return
        for number, micro in enumerate(micros):
            start_M = starts[number].logprobs_M if starts else None
            if needs_proximal(objective):
                micro.proximal_M = start_M
            if references:
                micro.reference_M = references[number].logprobs_M
            elif needs_reference(objective):
                micro.reference_M = served_reference(micro.layout, step.shard.samples, self._world.device)
            fill_advantages(micro, step.settings.algo, objective, start_M)
        if needs_whitening(objective):
            whiten_together(micros, self._world.replicas.sum, self._world.device)
        step.mean_weights = mean_weights(minibatches, objective, self._world.replicas.sum, self._world.device)

    def _update(self, step: TrainingStep, number: int, micros: Sequence[PackedBatch]) -> MyxaError | None:
        """Gradient of one mini-batch and an AdamW update; or the error that all ranks agreed on, and no update."""
        settings, optimizer, world = step.settings, self._optimizer, self._world
        place = f"step {step.shard.step}, mini-batch {number}"
        normaliser = step.normaliser(number)
        losses = self._passes(step, micros, normaliser, is_first=number == 0)
        bad = first_not_finite(torch.stack(losses)) if losses else -1
        norm = optimizer.gradient_norm()
        trouble = torch.tensor([step.failure is not None, bad >= 0, not math.isfinite(norm)], dtype=torch.float32)
        has_failed, loss_is_bad, gradient_is_bad = floats(world.max(trouble))
        if has_failed:
            return failure_of_all(world, step.failure, place)
        if loss_is_bad:
            named = bad if world.place.is_teller else -1
            return accusation(world, "loss", place, named, micros[bad].group_ids if bad >= 0 else ())
        if gradient_is_bad:
            return self._find_bad_gradient(step, micros, normaliser, place)
        rate = learning_rate(settings.optimizer, optimizer.num_updates, settings.total_updates)
        optimizer.update(rate, settings.optimizer.weight_decay, settings.optimizer.max_grad_norm)
        step.num_updates += 1
        share = 1.0 / world.place.dp_size  # equal on all replicas, and the tally adds replicas up
        step.tally.add("grad_norm", norm * share)
        step.tally.add("lr", rate * share)
        return None

    def _passes(
        self, step: TrainingStep, micros: Sequence[PackedBatch], normaliser: Normaliser, *, is_first: bool
    ) -> list[Tensor]:
        losses: list[Tensor] = []

        def loss_of(number: int, scores: TokenScores) -> Tensor:
            if self._world.place.is_teller:
                step.shown.take(micros[number].layout, scores.logprobs_M)
            loss = step.policy_loss(micros[number], scores, normaliser, step.tally, is_first=is_first)
            losses.append(loss.detach())
            return loss

        self._optimizer.forget_gradients()
        has_choices = needs_proximal(step.objective) or charges_kl(step.objective)
        with self._pipeline.routed("replay" if has_choices else "off"):
            self._pipeline.train(
                [micro.layout for micro in micros], loss_of, needs_entropy_grad=step.objective.entropy_coef > 0
            )
        return losses

    def _find_bad_gradient(
        self, step: TrainingStep, micros: Sequence[PackedBatch], normaliser: Normaliser, place: str
    ) -> TrainError:
        """All losses are finite but the gradient is not: repeat the passes one by one to find where it comes from.
        Gradients are summed over replicas as they are made, so the micro-batches of one round are accused together."""
        for k, micro in enumerate(micros):
            spare = TrainingStep.begin(step.shard, step.settings)
            alone = [micro, *self._empty(self._cutting.multiple_of_micros - 1)]
            self._passes(spare, alone, normaliser, is_first=False)
            if not math.isfinite(self._optimizer.gradient_norm()):
                named = k if self._world.place.is_teller else -1
                found = accusation(self._world, "gradient", place, named, micro.group_ids)
                if found is not None:
                    return found
        return TrainError(
            f"{place}: the gradient is not a finite number, though that of every micro-batch is",
            remedy="lower the learning rate or the loss: their sum overflows",
        )

    def _empty(self, count: int) -> list[PackedBatch]:
        nothing = TrainShard(
            step=0, samples=(), minibatches=(((),) * count,), minibatch_tokens=(0.0,), minibatch_samples=(0.0,)
        )
        return cut_shard(nothing, self._cutting)[0][:count] if count else []

    def _metrics(
        self, step: TrainingStep, minibatches: Sequence[Sequence[PackedBatch]], started_s: float
    ) -> dict[str, float]:
        """Everything reduced over replicas, under `train/`; see `report`."""
        tally_counts(step.tally, step.shard, [micro for minibatch in minibatches for micro in minibatch])

        name_metrics_alike(self._world, step.tally, step.settings.functions)

        def reduced() -> dict[str, Any]:
            sums, maxima = step.tally.reduced(self._world.replicas)
            return {"sums": sums, "maxima": maxima}

        joined = self._world.broadcast(reduced)
        metrics = report(joined["sums"], joined["maxima"], step.num_updates, self._clock.monotonic() - started_s)
        metrics["train/num_updates"] = float(self._optimizer.num_updates)
        return metrics
