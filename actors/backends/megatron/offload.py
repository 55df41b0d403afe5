"""Megatron's parameters, gradients and optimizer on memory of the GPU that can leave it and come back.

    frozen      what the model's constructor allocates and nothing trains, the reference model; copied once,
                and when the reference was renewed
    params      the parameters, in Megatron's contiguous buffers: rebuilt from the float32 masters, or copied
    grads       the gradient buffers: dropped, zeros when they come back
    masters     float32 parameters, where they are apart from the parameters: copied, unless no step happened since
    optimizer   moments, in parts: copied like masters, and come back while forward and backward run

`CudaMemory` makes the allocations of a thread belong to a tag.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import nn

from ....core.config import TrainerConfig
from ....core.config.learning import MegatronSettings
from ....core.device_memory import OPTIMIZER_PARTS, Tag, TagPolicy
from ....core.errors import ConfigError
from ...models.model_config import ITEM_BYTES, ModelConfig
from ..offload import RankOffload
from .layout import ParallelLayout, optimizer_bytes, rank_parameters

if TYPE_CHECKING:
    from ....memory.arenas.cuda_memory import CudaMemory
    from .optimizer import MegatronOptimizer

Part = Literal["chunks", "buffers", "masters", "moments", "reference"]


class MegatronOffload(RankOffload):
    """Over memory that is opened in set-up, once the device is chosen."""

    def __init__(self, open_memory: Callable[[int], CudaMemory], settings: MegatronSettings, *, rebuilds: bool) -> None:
        """`open_memory(local GPU)`: called in set-up, once the device is chosen. `rebuilds`: parameters are rebuilt
        from masters instead of copied."""
        super().__init__()
        self._open = open_memory
        self._in_buffers = settings.distributed_optimizer
        self._params_policy: TagPolicy = "rematerialise" if rebuilds else "backup"
        self._optimizer: MegatronOptimizer | None = None
        self._is_any: Callable[[bool], bool] = bool
        self._buffers: list[Any] = []
        self._buffers_seen = 0
        self._is_stale = False
        """Parameters came back without contents."""

    def begin(self, local_gpu: int) -> None:
        self._movable = self._open(local_gpu)

    def region(self, part: Part) -> AbstractContextManager[None]:
        """Around building a part. With a distributed optimizer the parameters of the chunks move to Megatron's buffers
        afterwards, and only untrained ones stay; without, they stay where they are built."""
        if part == "buffers" or (part == "chunks" and not self._in_buffers):
            return self._home().region("params", self._params_policy)
        tags: dict[Part, Tag] = {"masters": "masters", "moments": OPTIMIZER_PARTS[0]}
        return self._home().region(tags.get(part, "frozen"), "backup")

    def move_grads(self, chunks: Sequence[nn.Module]) -> None:
        """Give the gradient buffers memory of their own tag. A storage keeps its views while its memory changes, so
        every `main_grad` and bucket follows."""
        for chunk in chunks:
            for buffer in _buffers(chunk):
                storage = buffer.grad_data.untyped_storage()
                num_bytes = storage.nbytes()
                storage.resize_(0)
                with self._home().region("grads", "discard"):
                    storage.resize_(num_bytes)
                buffer.grad_data.zero_()

    def built(self, optimizer: MegatronOptimizer, is_any: Callable[[bool], bool]) -> None:
        """Everything is there. `is_any`: whether a thing is so on any rank; collective. Raises ConfigError for
        optimizers that allocate in their first step."""
        parts: list[Any] = getattr(optimizer.megatron, "chained_optimizers", [optimizer.megatron])
        if len(list(optimizer.torch_optimizers())) != len(parts):
            raise ConfigError(
                'memory.share = "switch" needs torch\'s own AdamW under Megatron, so that the moments are there before '
                "the first step",
                remedy="leave apex and Transformer Engine's optimizers out of this environment",
            )
        from .hf_weights import unwrapped  # imports megatron-core, which plans and refusals do without

        self._optimizer, self._is_any = optimizer, is_any
        self._buffers = [cast("Any", buffer) for chunk in optimizer.chunks for buffer in unwrapped(chunk).buffers()]
        self._buffers_seen = self._num_buffer_writes()
        self._home().shrink(("frozen", "params", "grads", "masters", "optimizer"))
        self._home().divide(OPTIMIZER_PARTS)

    def _home(self) -> CudaMemory:
        return cast("CudaMemory", self._memory())

    def ready(self) -> None:
        """Before parameters are read: rebuild them from their masters if they came back empty on any rank. Collective:
        what left one device need not have left the others."""
        if self._params_policy != "rematerialise" or self._optimizer is None or not self._is_any(self._is_stale):
            return
        self._optimizer.rebuild_parameters()
        self._home().mark_dirty("params")
        self._is_stale = False

    def written(self) -> None:
        super().written()
        self._is_stale = False
        if self._in_buffers and (num := self._num_buffer_writes()) != self._buffers_seen:
            self._buffers_seen = num
            self._home().mark_dirty("frozen")

    def _came_back(self, tags: Collection[Tag]) -> None:
        self._is_stale = self._is_stale or ("params" in tags and self._params_policy == "rematerialise")

    def _num_buffer_writes(self) -> int:
        """Untrained buffers may count too: a router's statistics."""
        return sum(buffer._version for buffer in self._buffers)


def _buffers(chunk: nn.Module) -> list[Any]:
    ddp = cast("Any", chunk)
    return [*ddp.buffers, *getattr(ddp, "expert_parallel_buffers", [])]


def rebuilds_params(settings: MegatronSettings, trainer: TrainerConfig) -> bool:
    """Whether parameters are rebuilt from float32 masters, which there are beside bfloat16 ones."""
    return trainer.dtype == "bfloat16" and settings.distributed_optimizer


def planned(
    model: ModelConfig, settings: MegatronSettings, trainer: TrainerConfig, world_size: int, *, has_reference: bool
) -> dict[Tag, tuple[int, TagPolicy]]:
    """What a rank of the fullest stage will hold."""
    dense, expert = rank_parameters(model, ParallelLayout.of(settings), settings.model)
    num, item = dense + expert, ITEM_BYTES[trainer.dtype]
    masters, moments = optimizer_bytes(settings, item, dense, expert, world_size)
    plan: dict[Tag, tuple[int, TagPolicy]] = {
        "params": (item * num, "backup"),
        "grads": (4 * num, "discard"),
        "masters": (masters, "backup"),
        "optimizer": (moments, "backup"),
        "frozen": (item * num if has_reference else 0, "backup"),
    }
    return {tag: (size, policy) for tag, (size, policy) in plan.items() if size}
