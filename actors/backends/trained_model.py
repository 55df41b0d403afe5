"""A model as a step uses it: its passes over micro-batches, their gradients, its update; and one mini-batch of it.

One module on this rank (`torch_backend/parallel.py`), or a pipeline over several (`megatron/schedule.py`). Losses are
made on scoring ranks; what the teller of a replica counts is counted once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ...core.config import OptimizerConfig
from ...core.samples import Sample, TrainShard
from .torch_backend.accounting import MetricSums, first_not_finite
from .torch_backend.layout import MicroBatch, batch_of, check_samples, trained_members
from .torch_backend.world import RankGroup, World

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

    @torch.no_grad()
    def renew(self, policy: TrainedModel, version: int) -> None:
        """Become the policy as it is now. Collective."""
        theirs = policy.parts()
        for name, own in self.model.parts().items():
            own.copy_(theirs[name])
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

    @property
    @abstractmethod
    def num_updates(self) -> int: ...

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

    def filled_up(self, micro: MicroBatch[Any]) -> list[MicroBatch[Any]]:
        """With empty ones to what a pass takes."""
        empty = self.layouts((), [()])[1:]
        return [micro, *(batch_of(layout, (), self.world.device) for layout in empty)]

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

    @abstractmethod
    def forget_gradients(self) -> None: ...


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

        self.model.forget_gradients()
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
