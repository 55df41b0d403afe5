"""The critic of a trainer rank: values before the step, the loss of a micro-batch in it, metrics after it.

Knows its replica, its optimizer and the formulas (`algos/values.py`). Must not know the policy, or how a step goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ....algos.values import value_loss, value_metrics, value_sums
from ....core.config import CriticConfig, OptimizerConfig
from ....core.errors import TrainError
from ...models.hf_folder import ModelConfig
from .adamw import AdamW
from .layout import Layout
from .microbatch import MicroBatch
from .parallel import Replica
from .schedule import learning_rate
from .tally import Tally

SUMS = "critic/"
"""Prefix of what `metrics` takes out of a tally's sums."""


@dataclass(frozen=True, slots=True)
class Critic:
    """A value model and what trains it."""

    replica: Replica
    optimizer: AdamW
    config: CriticConfig
    layers: ModelConfig

    def trains_alone(self, step: int) -> bool:
        """Whether the policy still waits for the critic in step number `step`, from 0."""
        return step < self.config.warmup_steps

    def values(self, layout: Layout) -> Tensor:
        """float32 [M], without gradient."""
        with torch.no_grad():
            return cast(Tensor, self.replica.module(layout))

    def loss(self, micro: MicroBatch[Layout], num_tokens: float, tally: Tally) -> Tensor:
        """This micro-batch's share of the mean over `num_tokens` loss tokens of the mini-batch, 0-dim, and its metrics
        into the tally."""
        if micro.values_M is None or micro.returns_M is None:
            raise TrainError("a critic is trained on a batch without returns", remedy="a bug: values come first")
        values_M = cast(Tensor, self.replica.module(micro.layout))
        found = value_loss(values_M, micro.values_M, micro.returns_M, self.config.value_clip)
        loss = found.loss_T.sum() / max(num_tokens, 1.0)
        tally.add("value_loss", loss)
        tally.add(f"{SUMS}clipped", found.is_clipped_T.sum())
        return loss

    def count(self, micro: MicroBatch[Layout], tally: Tally) -> None:
        """How well the values of the step's start tell the returns, into the tally."""
        if micro.values_M is not None and micro.returns_M is not None:
            for name, total in value_sums(micro.values_M, micro.returns_M).items():
                tally.add(f"{SUMS}{name}", total)

    def rate(self, optimizer: OptimizerConfig) -> float:
        """Of the next update."""
        own = optimizer.model_copy(update={"lr": self.config.lr or optimizer.lr, "schedule": "constant"})
        return learning_rate(own, self.optimizer.num_updates, 0)


def take_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Metrics under `train/` from sums over all ranks, which are taken out of `sums`; none without a critic."""
    own = {name.removeprefix(SUMS): sums.pop(name) for name in list(sums) if name.startswith(SUMS)}
    if not own:
        return {}
    metrics = {f"train/{name}": value for name, value in value_metrics(own).items()}
    metrics["train/value_clip_fraction"] = own["clipped"] / max(1.0, own["count"])
    return metrics
