"""The critic of a trainer rank: values before the step, the loss of a micro-batch in it, metrics after it.

The formulas are in `algos/losses.py`. The critic's model is the policy's decoder with one number read off each state,
in float32; its parameters are named as in the policy's folder, the head is `value_head`. A reward model is the same
with a head `score`, in the policy's place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from ....algos.losses import value_loss, value_metrics, value_sums
from ....core.config import CriticConfig, OptimizerConfig
from ....core.errors import TrainError
from ...models.hf_folder import open_weights, value_head_in
from ...models.model_config import ModelConfig
from ..vocab_scores import TokenScores
from .accounting import MetricSums, learning_rate
from .layout import Layout, MicroBatch
from .model import Linear, PackedModel
from .parallel import TorchModel
from .tensors import from_bytes

SUMS = "critic/"


@dataclass(frozen=True, slots=True)
class Critic:
    """A value model and what trains it."""

    model: TorchModel
    config: CriticConfig

    def trains_alone(self, step: int) -> bool:
        """Whether the policy still waits for the critic in step number `step`, from 0."""
        return step < self.config.warmup_steps

    def values(self, layout: Layout) -> Tensor:
        """float32 [M], without gradient."""
        return cast(Tensor, self.model.score([layout])[0])

    def loss(self, micro: MicroBatch[Layout], values_M: Tensor, num_tokens: float, tally: MetricSums) -> Tensor:
        """This micro-batch's share of the mean over `num_tokens` loss tokens of the mini-batch, 0-dim, and its metrics
        into the tally."""
        if micro.values_M is None or micro.returns_M is None:
            raise TrainError("a critic is trained on a batch without returns", remedy="a bug: values come first")
        loss_M, is_clipped_M = value_loss(values_M, micro.values_M, micro.returns_M, self.config.value_clip)
        loss = loss_M.sum() / max(num_tokens, 1.0)
        tally.add("value_loss", loss)
        tally.add(f"{SUMS}clipped", is_clipped_M.sum())
        return loss

    def count(self, micro: MicroBatch[Layout], tally: MetricSums) -> None:
        """How well the values of the step's start predict the returns, into the tally."""
        if micro.values_M is not None and micro.returns_M is not None:
            for name, total in value_sums(micro.values_M, micro.returns_M).items():
                tally.add(f"{SUMS}{name}", total)

    def rate(self, optimizer: OptimizerConfig) -> float:
        schedule = optimizer.model_copy(update={"lr": self.config.lr or optimizer.lr, "schedule": "constant"})
        return learning_rate(schedule, self.model.num_updates, 0)


def take_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Metrics under `train/` from sums over all ranks, which are taken out of `sums`; none without a critic."""
    value_sums = {name.removeprefix(SUMS): sums.pop(name) for name in list(sums) if name.startswith(SUMS)}
    if not value_sums:
        return {}
    metrics = {f"train/{name}": value for name, value in value_metrics(value_sums).items()}
    metrics["train/value_clip_fraction"] = value_sums["clipped"] / max(1.0, value_sums["count"])
    return metrics


class ScalarModel(PackedModel):
    """The decoder with one number read off each state, by a head in float32."""

    HEAD: ClassVar[str]
    HAS_BIAS: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, recomputes: bool = False) -> None:
        super().__init__(config, dtype=dtype, recomputes=recomputes)
        self.add_module(self.HEAD, Linear(config.hidden_size, 1, has_bias=self.HAS_BIAS))

    @property
    def head(self) -> nn.Module:
        return self.get_submodule(self.HEAD)

    def exact_parts(self) -> tuple[nn.Module, ...]:
        return (self.head,)

    def numbers(self, layout: Layout) -> Tensor:
        """float32 [M]: of the state before each of a layout's loss tokens."""
        return self.head(self.hidden_Mh(layout).float()).squeeze(-1).clone()  # FSDP hooks no views


class ValueModel(ScalarModel):
    """`forward` gives the value of the state before each of a layout's loss tokens."""

    HEAD, HAS_BIAS = "value_head", True

    def forward(self, layout: Layout, needs_entropy_grad: bool = False) -> Tensor:
        """float32 [M]. It has no entropy, and no temperature: values are expectations, not draws."""
        return self.numbers(layout)


class ScoreModel(ScalarModel):
    """A reward model. `forward` gives the score of the text before each of a layout's loss tokens, in place of the
    token's log-prob."""

    HEAD = "score"

    def forward(self, layout: Layout, needs_entropy_grad: bool = False) -> TokenScores:
        score_M = self.numbers(layout)
        return TokenScores(score_M, torch.zeros_like(score_M))


def load_value_model(module: ScalarModel, folder: str, layers: ModelConfig) -> None:
    """Copy a folder's weights into the float32 masters; what its head does not hold begins at zero. Raises ModelError
    if they do not fit."""
    parameters = dict(module.named_parameters())
    with torch.no_grad(), open_weights(folder, layers) as tensors:
        for name in layers.tensor_shapes():
            parameters[name].copy_(from_bytes(tensors[name]))
        head = value_head_in(tensors, layers, folder)
        for name, parameter in module.head.named_parameters():
            parameter.copy_(from_bytes(head[name])) if name in head else parameter.zero_()
