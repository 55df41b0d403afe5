"""One model on several ranks: how gradients are shared, measured and bounded, and how whole tensors come back.

    alone   the module itself
    ddp     every rank has all of it; gradients are averaged over ranks in the last backward pass of a mini-batch
    fsdp    parameters, gradients and optimizer state are sharded over ranks, layer by layer (FSDP2, `fully_shard`)

Both average gradients over ranks, whereas our losses are shares of one global mean and add up: `loss_scale` makes up
for it. Every rank must run the same number of forward and backward passes; empty micro-batches see to that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .layout import Layout
from .logprobs import TokenScores
from .model import CausalLM
from .tensors import local_part, whole_tensor
from .world import World

Strategy = Literal["ddp", "fsdp"]


class Replica:
    """This rank's part of a model. `module` holds the parameters under their HuggingFace names."""

    def __init__(self, module: CausalLM, world: World, strategy: Strategy, *, is_trained: bool = True) -> None:
        self.module = module
        self.world = world
        self.is_sharded = world.size > 1 and strategy == "fsdp"
        self._ddp: DistributedDataParallel | None = None
        if not is_trained:
            module.requires_grad_(requires_grad=False)
        if self.is_sharded:
            _shard(module, world)
        elif world.size > 1 and is_trained:
            self._ddp = DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)

    @property
    def loss_scale(self) -> float:
        """Factor on the loss that turns the average over ranks into a sum."""
        return float(self.world.size)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters (shards of them under fsdp), in a fixed order; tied weights once."""
        return list(self.module.named_parameters())

    def forward(self, layout: Layout, temperature: float, *, needs_entropy_grad: bool = False) -> TokenScores:
        """Score a layout with gradient."""
        runner: nn.Module = self.module if self._ddp is None else self._ddp
        return cast(TokenScores, runner(layout, temperature, needs_entropy_grad))

    def score(self, layout: Layout, temperature: float) -> TokenScores:
        """Score a layout without gradient: the same operations on the same shapes, hence the same bits."""
        with torch.no_grad():
            return cast(TokenScores, self.module(layout, temperature))

    @contextlib.contextmanager
    def accumulating(self, *, is_last: bool) -> Generator[None]:
        """Around forward and backward of a micro-batch: gradients travel with the last one only (ddp)."""
        if self._ddp is None or is_last:
            yield
            return
        with self._ddp.no_sync():
            yield

    def gradient_norm(self) -> Tensor:
        """Global 2-norm of all gradients, 0-dim, equal on all ranks; NaN or infinite if any gradient is."""
        return whole_tensor(torch.nn.utils.get_total_norm(self._gradients()))

    def local_gradient_is_finite(self) -> bool:
        """Whether all gradients that this rank holds are finite."""
        return bool(torch.isfinite(torch.nn.utils.get_total_norm([local_part(g) for g in self._gradients()])))

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Scale gradients down so that their global norm is at most `max_norm`."""
        torch.nn.utils.clip_grads_with_norm_([p for _, p in self.parameters()], max_norm, norm)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for _, p in self.parameters() if p.grad is not None]


def _shard(module: CausalLM, world: World) -> None:
    """Shard each layer, then the rest. Computation in the module's type, reduction in float32."""
    # Imported here: half a second and 70 MB, which only sharded runs need.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=module.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
