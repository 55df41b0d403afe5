"""Low-rank adapters on a model that stays as it is: how both trainers begin, leave out and merge them.

Here the torch trainer's, own decoder or transformers': each adapted module holds `lora_A` and `lora_B` as parameters,
and a hook adds what they give to what the module gives. Megatron's, which are cut over ranks: `megatron/adapters.py`.

Library considered: peft. Not used to train: it knows neither FSDP's shards nor Megatron's cuts, and imports for
seconds; it judges what is exported in the tests.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.config import LoraConfig
from ...core.errors import ConfigError
from ..models.adapters import PARTS, Matrices, adapted_matrices, read_adapter
from .torch_backend.accounting import ScoringModel
from .torch_backend.tensors import from_bytes


class Adapters:
    """Of one model, or one rank's part of it."""

    def __init__(self, lora: LoraConfig, matrices: Matrices, seed: int) -> None:
        """Raises ConfigError and ModelError for a `lora.path` that does not fit."""
        self.matrices = matrices
        self.scale = lora.alpha / lora.rank
        self.is_on = True
        self._rank, self._seed = lora.rank, seed
        arrays = read_adapter(lora, matrices) if lora.path else {}
        self._given = {name: from_bytes(array).float() for name, array in arrays.items()}

    def first(self, name: str) -> tuple[Tensor, Tensor]:
        """float32 A [rank, columns] and B [rows, rank] to begin with: those that were given, else A at random, B zero.
        The same on every rank, in every layout."""
        if self._given:
            return self._given[f"{name}.{PARTS[0]}"], self._given[f"{name}.{PARTS[1]}"]
        rows, columns = self.matrices[name]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        bound = columns**-0.5
        return (
            torch.empty(self._rank, columns).uniform_(-bound, bound, generator=generator),
            torch.zeros(rows, self._rank),
        )


@dataclass(frozen=True, slots=True)
class WithoutAdapters:
    """The model that a policy's adapters are added to: a reference model that takes no memory."""

    policy: ScoringModel
    adapters: Adapters

    def score(self, layouts: Sequence[Any]) -> list[Any]:
        self.adapters.is_on = False
        try:
            return self.policy.score(layouts)
        finally:
            self.adapters.is_on = True

    def parts(self) -> dict[str, Tensor]:
        return {}

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return []


class TorchAdapters(Adapters):
    """Of a model whose weights are whole on this rank, or sharded by FSDP."""

    def __init__(self, lora: LoraConfig, body: nn.Module, seed: int) -> None:
        """Freezes all of `body`'s parameters and gives the chosen matrices adapters. Raises as `Adapters`, and
        ConfigError for a target that is no `Linear`."""
        body.requires_grad_(requires_grad=False)
        shapes = {name: tuple(parameter.shape) for name, parameter in body.named_parameters()}
        super().__init__(lora, adapted_matrices(lora, shapes), seed)
        self._modules: dict[str, nn.Module] = {name: body.get_submodule(name) for name in self.matrices}
        for name, module in self._modules.items():
            if not type(module).__name__.endswith("Linear"):
                kind = type(module).__name__
                raise ConfigError(
                    f"lora.target_modules: {name} is a {kind}, which gets no adapter", remedy="name Linear modules"
                )
            for part, value in zip(PARTS, self.first(name), strict=True):
                module.register_parameter(part, nn.Parameter(value.clone()))
            module.register_forward_hook(self._added)

    def _added(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not self.is_on:
            return output
        x = args[0].reshape(-1, args[0].shape[-1])  # in two dimensions a product is the same with and without gradient
        low, rows = functional.linear(x, module.lora_A.to(x.dtype)), output.reshape(-1, output.shape[-1])
        # The product adds to `rows` itself: no more large tensors, and half as many kernels to compile.
        return torch.addmm(rows, low, module.lora_B.to(x.dtype).t(), alpha=self.scale).reshape(output.shape)

    def merged(self, name: str, weight: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """A weight, put together from all ranks' parts, as engines get it. Collective."""
        module: Any = self._modules.get(name.removesuffix(".weight"))
        if module is None or not name.endswith(".weight"):
            return weight
        return merged(weight, gather(module.lora_A.detach()), gather(module.lora_B.detach()), self.scale)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale B A, added up in float32, in the type of W."""
    return (weight.float() + (b.float() @ a.float()) * scale).to(weight.dtype)


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name is part of one."""
    return name.rpartition(".")[2].startswith(PARTS)
