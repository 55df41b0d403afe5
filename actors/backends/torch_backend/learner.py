"""One model's way through an update: gradients of all micro-batches, their sum over ranks, AdamW.

Knows a replica, its optimizer and a loss. Must not know what the loss means, or whether there are other learners: the
stepper lets all of them have their gradients before any is updated, so that all are or none is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .adamw import AdamW
from .finite import first_not_finite
from .layout import Layout
from .microbatch import MicroBatch
from .parallel import Replica
from .tally import Tally
from .tensors import backward

LossOf = Callable[[MicroBatch[Layout], Tally], Tensor]
"""A micro-batch's share of the mini-batch's loss, 0-dim; its metrics go into the tally."""


class Learner:
    """Of one mini-batch."""

    def __init__(
        self, replica: Replica, optimizer: AdamW, loss_of: LossOf, *, name: str = "", is_held: bool = False
    ) -> None:
        """`name`: before the names of its metrics and in errors; empty for the policy. `is_held`: losses are computed
        and told, and nothing is learnt."""
        self.name = name
        self._replica = replica
        self._optimizer = optimizer
        self._loss_of = loss_of
        self._is_held = is_held
        self._losses: list[Tensor] = []
        self._norm = torch.zeros(())

    def backward(self, micros: Sequence[MicroBatch[Layout]], tally: Tally) -> None:
        """This rank's gradients."""
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
        """Whether the sum over ranks is not finite."""
        return not bool(torch.isfinite(self._norm))

    def find_bad_gradient(self, micros: Sequence[MicroBatch[Layout]]) -> int:
        """All losses are finite but the gradient is not: the passes one by one again, to find this rank's first
        micro-batch that it comes from; -1: none. Collective under fsdp."""
        bad = -1
        for number, micro in enumerate(micros):
            self._optimizer.forget_gradients()
            backward(self._loss_of(micro, Tally()))
            if bad < 0 and not self._replica.local_gradient_is_finite():
                bad = number
        return bad

    def update(self, rate: float, max_grad_norm: float, weight_decay: float, tally: Tally) -> None:
        """Clip, and AdamW."""
        if not self._is_held:
            self._replica.clip(self._norm, max_grad_norm)
            self._optimizer.update(rate, weight_decay)
        share = 1.0 / self._replica.world.size  # equal on all ranks, and the tally adds ranks up
        tally.add(f"{self.name}grad_norm", self._norm * share)
        tally.add(f"{self.name}lr", 0.0 if self._is_held else rate * share)
