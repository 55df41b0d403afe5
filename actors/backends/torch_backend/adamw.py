"""AdamW on this rank's part of every parameter.

Learning rate and weight decay come with each update. Moments are plain tensors by parameter name, so a checkpoint reads
and writes them as they are.

Library considered: `torch.optim.AdamW`. Making one imports torch's whole compiler (1 s of CPU and 70 MB in every
trainer process, as much time as torch itself) and its state is private to it; the tests compare this file with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .offload import TorchOffload
from .tensors import local_part


class AdamW:
    """Decoupled weight decay (arXiv 1711.05101, algorithm 2); only matrices decay, vectors (norms, biases) never.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        betas: tuple[float, float],
        eps: float,
        offload: TorchOffload | None = None,
    ) -> None:
        """`offload`: where moments and gradients lie if they can leave the device."""
        self._parameters = tuple(parameters)
        self._betas = betas
        self._eps = eps
        self._offload = offload
        self.num_updates = 0
        parts = [local_part(p.detach()) for _, p in self._parameters]
        if offload is None:
            firsts, seconds = ([torch.zeros_like(part) for part in parts] for _ in range(2))
        else:
            firsts, seconds = offload.moments_like(parts)
        names = [name for name, _ in self._parameters]
        self._moments = dict(zip(names, zip(firsts, seconds, strict=True), strict=True))
        self._gradients = [] if offload is None else offload.gradients_like(parts)

    @property
    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> (first, second) moment of this rank's part. Waits for them if they are on their way back."""
        if self._offload is not None:
            self._offload.arrived()
        return self._moments

    def forget_gradients(self) -> None:
        """Drop all gradients; where they keep their memory, set them to zero."""
        if self._offload is None:
            for _, parameter in self._parameters:
                parameter.grad = None
        for (_, parameter), gradient in zip(self._parameters, self._gradients, strict=False):
            parameter.grad = gradient.zero_()

    @torch.no_grad()
    def update(self, lr: float, weight_decay: float) -> None:
        """One update from the gradients that are there; a parameter without gradient stays as it is."""
        self.num_updates += 1
        beta1, beta2 = self._betas
        rate = lr / (1 - beta1**self.num_updates)
        root = (1 - beta2**self.num_updates) ** 0.5
        moments = self.moments
        for name, parameter in self._parameters:
            if parameter.grad is None:
                continue
            part, gradient = local_part(parameter), local_part(parameter.grad)
            first, second = moments[name]
            if weight_decay and parameter.ndim > 1:
                part.mul_(1 - lr * weight_decay)
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            part.addcdiv_(first, second.sqrt().div_(root).add_(self._eps), value=-rate)
        if self._offload is not None:
            self._offload.written()
