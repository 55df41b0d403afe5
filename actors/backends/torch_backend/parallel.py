"""One model on several ranks: how gradients are shared, measured and bounded.

    alone   the module itself
    ddp     every rank has all of it; gradients of a mini-batch are summed over ranks once, after its last backward
    fsdp    parameters, gradients and moments are sharded over ranks, layer by layer (FSDP2, `fully_shard`); gradients
            are summed as the backward pass goes

Losses are shares of one global mean, so gradients add up. Every rank must run the same number of passes; micro-batches
without loss tokens see to that.

Libraries considered: DistributedDataParallel for ddp. Not used: its constructor imports torch's whole compiler (1 s of
CPU and 70 MB per rank), it averages where we add, and what it is good at, hiding the exchange behind the backward pass,
acts in the last micro-batch only. Where the exchange costs, fsdp is the strategy to take. `torch.optim.AdamW` imports
the compiler too, and its state is private to it: on a GPU we call its kernel, and the tests compare ours with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from ....core.config import OptimizerConfig
from ....core.errors import TrainError
from ....core.samples import Sample, TrainSample
from ...models.model_config import frozen_names
from .accounting import LossOf, TrainedModel
from .layout import Layout, plan_layout
from .model import PolicyModel
from .offload import TorchOffload
from .tensors import floats, local_part, pieces, whole_tensor
from .world import World

Strategy = Literal["ddp", "fsdp"]

BUCKET_NUMBERS = 1 << 26
"""Gradients summed over ranks in one go (256 MiB of float32)."""


@dataclass(eq=False)
class AdamW:
    """Decoupled weight decay (arXiv 1711.05101, algorithm 2); only matrices decay, vectors (norms, biases) never.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    parameters: Sequence[tuple[str, nn.Parameter]]
    betas: tuple[float, float]
    eps: float
    offload: TorchOffload | None = None
    """Where moments and gradients lie if they can leave the device."""
    is_fused: bool | None = None
    """Whether torch's kernel for many tensors makes the update; None: on a GPU, which touches each number once then."""

    def __post_init__(self) -> None:
        self.parameters = tuple(self.parameters)
        self.num_updates = 0
        parts = [local_part(p.detach()) for _, p in self.parameters]
        if self.offload is None:
            firsts, seconds = ([torch.zeros_like(part) for part in parts] for _ in range(2))
        else:
            firsts, seconds = self.offload.moments_like(parts)
        names = [name for name, _ in self.parameters]
        self._moments = dict(zip(names, zip(firsts, seconds, strict=True), strict=True))
        self._gradients = [] if self.offload is None else self.offload.gradients_like(parts)

    @property
    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> (first, second) moment of this rank's part. Waits for them if they are on their way back."""
        if self.offload is not None:
            self.offload.arrived()
        return self._moments

    def forget_gradients(self) -> None:
        """Drop all gradients; where they keep their memory, set them to zero."""
        if self.offload is None:
            for _, parameter in self.parameters:
                parameter.grad = None
        for (_, parameter), gradient in zip(self.parameters, self._gradients, strict=False):
            parameter.grad = gradient.zero_()

    @torch.no_grad()
    def update(self, lr: float, weight_decay: float) -> None:
        """One update from the gradients that are there; a parameter without gradient stays as it is."""
        self.num_updates += 1
        moments = self.moments
        trained = [
            (weight_decay if p.ndim > 1 else 0.0, (local_part(p), local_part(p.grad), *moments[name]))
            for name, p in self.parameters
            if p.grad is not None
        ]
        is_fused = any(row[0].is_cuda for _, row in trained) if self.is_fused is None else self.is_fused
        (self._update_fused if is_fused else self._update_each)(lr, trained)
        if self.offload is not None:
            self.offload.written()

    def _update_fused(self, lr: float, trained: Sequence[tuple[float, tuple[Tensor, ...]]]) -> None:
        beta1, beta2 = self.betas
        for decay in {decay for decay, _ in trained}:
            rows = [parts for rate, parts in trained if rate == decay]
            columns = [list(column) for column in zip(*rows, strict=True)]
            count = torch.full((), float(self.num_updates), device=columns[0][0].device)
            cast(Any, torch)._fused_adamw_(
                *columns, [], [count] * len(columns[0]), lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay,
                eps=self.eps, amsgrad=False, maximize=False,
            )  # fmt: skip

    def _update_each(self, lr: float, trained: Sequence[tuple[float, tuple[Tensor, ...]]]) -> None:
        beta1, beta2 = self.betas
        rate = lr / (1 - beta1**self.num_updates)
        root = (1 - beta2**self.num_updates) ** 0.5
        for decay, (part, gradient, first, second) in trained:
            if decay:
                part.mul_(1 - lr * decay)
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            part.addcdiv_(first, second.sqrt().div_(root).add_(self.eps), value=-rate)


class Replica:
    """This rank's part of a model. `module` holds the parameters under their HuggingFace names."""

    def __init__(
        self, module: PolicyModel, world: World, strategy: Strategy, *, is_trained: bool, freeze: Sequence[str] = ()
    ) -> None:
        """`freeze`: patterns of the names of parameters that are not trained. Raises ConfigError for one that fits
        none."""
        self.module = module
        self.world = world
        self.is_sharded = world.size > 1 and strategy == "fsdp"
        if not is_trained:
            module.requires_grad_(requires_grad=False)
        for name in frozen_names(freeze, [name for name, _ in module.named_parameters()]):
            module.get_parameter(name).requires_grad = False
        _check_same_weights(module, world)
        if self.is_sharded:
            _shard(module, world)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters (shards of them under fsdp), in a fixed order; tied weights once."""
        return list(self.module.named_parameters())

    def kept(self) -> list[tuple[str, nn.Parameter]]:
        """What a checkpoint holds: all parameters, or the adapters, where they are what is trained."""
        has_adapters = self.module.adapters is not None
        return [(name, p) for name, p in self.parameters() if p.requires_grad or not has_adapters]

    def parts(self) -> dict[str, Tensor]:
        return {name: local_part(parameter.detach()) for name, parameter in self.parameters()}

    def score(self, layouts: Sequence[Layout]) -> list[Any]:
        """Without gradient: the same operations on the same shapes, hence the same bits."""
        with torch.no_grad():
            scores = [self.module(layout) for layout in layouts]
        if self.is_sharded:  # no backward pass will: the outermost parameters are whole, in the compute type
            cast(Any, self.module).reshard()
        return scores


class TorchModel(Replica, TrainedModel):
    """A replica that is trained."""

    optimizer: AdamW

    def __init__(
        self,
        module: PolicyModel,
        world: World,
        strategy: Strategy,
        *,
        vocab_size: int,
        linear_cost: float | None,
        packs_rows: bool = False,
        freeze: Sequence[str] = (),
    ) -> None:
        """`linear_cost`, `packs_rows`: see `plan_layout`."""
        super().__init__(module, world, strategy, is_trained=True, freeze=freeze)
        self.replicas = world
        self.vocab_size = vocab_size
        self._layout = partial(plan_layout, linear_cost=linear_cost, packs_rows=packs_rows, device=world.device)
        # FSDP averages over ranks; this makes it a sum again.
        self._loss_scale = float(world.size) if self.is_sharded else 1.0

    def make_optimizer(self, config: OptimizerConfig, offload: TorchOffload | None) -> None:
        """Once the parameters are where they stay. `offload`: where moments and gradients lie if they can leave."""
        self.optimizer = AdamW(self._trained_parameters(), config.betas, config.eps, offload)

    def layouts(self, samples: Sequence[Sample], micros: Sequence[Sequence[int]]) -> list[Layout]:
        return [self._layout(samples, members) for members in micros]

    def train(self, layouts: Sequence[Layout], loss_of: LossOf, *, needs_entropy_grad: bool, replays: bool) -> None:
        for number, layout in enumerate(layouts):
            loss = loss_of(number, self.module(layout, needs_entropy_grad))
            cast(Any, loss * self._loss_scale).backward()

    def warm_up(self, num_tokens: int) -> None:
        """Have compiled what a GPU runs compiled (`fused`), for tokens that lie in order and for such that are moved,
        while engines start: the first step would wait 10 to 30 s for it. Leaves all as it was. Collective.

        `num_tokens`: of a micro-batch, about. The compiler chooses by the sizes that it sees first how sums are split,
        and compiles again where it has bound itself to small ones.
        """
        copies = max(1, num_tokens // sum(16 + length for _, length in _STAND_INS[2:]))
        samples = [sample for copy in range(copies) for sample in _stand_ins(copy)]
        starts = range(0, len(samples), len(_STAND_INS))
        micros = [[start + k for start in starts for k in members] for members in ((0, 1), (2, 3, 4))]
        layouts = self.layouts(samples, micros)
        self.score(layouts)

        def total(_: int, output: Any) -> Tensor:
            return cast(Tensor, output if isinstance(output, Tensor) else output.logprobs_M).sum()  # values, or scores

        self.train(layouts, total, needs_entropy_grad=False, replays=False)
        self.optimizer.forget_gradients()

    def gradient_norm(self) -> Tensor:
        if self.world.size > 1 and not self.is_sharded:
            self._share_gradients()
        return whole_tensor(torch.nn.utils.get_total_norm(self._gradients()))

    def has_finite_gradient(self) -> bool:
        return bool(torch.isfinite(torch.nn.utils.get_total_norm([local_part(g) for g in self._gradients()])))

    def update(self, norm: Tensor, rate: float, weight_decay: float, max_norm: float) -> None:
        torch.nn.utils.clip_grads_with_norm_([p for _, p in self._trained_parameters()], max_norm, norm)
        self.optimizer.update(rate, weight_decay)

    def _trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.parameters() if parameter.requires_grad]

    def _gradients(self) -> list[Tensor]:
        return [p.grad for _, p in self._trained_parameters() if p.grad is not None]

    def _share_gradients(self) -> None:
        """Sum gradients over ranks, after the last backward pass of a mini-batch. Collective."""
        for bucket in self._buckets():
            total = self.world.sum(
                torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
            )
            for parameter, part in zip(bucket, pieces(total, [p.numel() for p in bucket]), strict=True):
                if parameter.grad is None:
                    parameter.grad = part.view_as(parameter)
                else:  # into the memory that is there: it may be a kind that leaves the device
                    parameter.grad.copy_(part.view_as(parameter))

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """Trained parameters in their order, in groups of at most BUCKET_NUMBERS numbers (a larger one alone)."""
        bucket: list[nn.Parameter] = []
        size = 0
        for _, parameter in self._trained_parameters():
            if bucket and size + parameter.numel() > BUCKET_NUMBERS:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.numel()
        yield bucket


_STAND_INS = ((0, 24), (1, 40), (2, 24), (2, 40), (3, 9))
"""Number of the prompt, and tokens of the answer: of unequal lengths, two of them to one prompt."""


def _stand_ins(copy: int) -> list[TrainSample]:
    """Prompts of each copy are others."""
    prompts = [np.array([*divmod(copy, 64), *[number] * (14 + number)], np.int32) for number in range(4)]
    return [
        TrainSample(
            group_id=prompt, index=number, prompt_ids=prompts[prompt],
            response_ids=np.ones(length, np.int32), logprobs=np.zeros(length, np.float32),
            loss_mask=np.ones(length, np.uint8), versions=np.zeros(length, np.int32), finish="stop", advantage=1.0,
        )
        for number, (prompt, length) in enumerate(_STAND_INS)
    ]  # fmt: skip


def _check_same_weights(module: PolicyModel, world: World) -> None:
    """Raise TrainError on every rank if their model folders hold other weights: they would train a mixture."""
    sums = [torch.stack([p.detach().double().sum(), p.detach().double().square().sum()]) for p in module.parameters()]
    marks = [floats(mark) for mark in world.gather(torch.stack(sums).sum(dim=0))]
    strangers = [str(rank) for rank, mark in enumerate(marks) if mark != marks[0]]
    if strangers:
        raise world.agreed(
            TrainError(
                f"the model folder of rank {', '.join(strangers)} holds other weights than that of rank 0",
                remedy="every host needs the same files at model.path, and at algo.ref_path and critic.path if set",
            )
        )


def _shard(module: PolicyModel, world: World) -> None:
    """Shard each layer, then the rest. Computation in the module's type, reduction in float32."""
    # Imported here: half a second and 70 MB, which only sharded runs need.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=module.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    for part in module.exact_parts():
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(part, mesh=mesh, mp_policy=exact)
    fully_shard(module, mesh=mesh, mp_policy=policy)
