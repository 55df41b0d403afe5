"""The torch trainer's parameters, gradients and moments on memory that can leave its device and come back.

params      the float32 masters themselves, a critic's too: copied out, and in again, when they leave
grads       always there between updates, zeroed instead of dropped; not copied, zeros when they come back
optimizer   in parts; copied, unless no update happened since; comes back while forward and backward run: the
            update waits
frozen      the reference model: copied out once, and when it was renewed
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ....core.device_memory import OPTIMIZER_PARTS, Tag, TagPolicy
from ....memory.arenas.arena import Arena
from ....memory.arenas.cuda_memory import vacate
from ....memory.arenas.tagged_memory import LEAST_GRANULES, shares
from ....memory.arenas.tensors import empty_tensors
from ..offload import RankOffload

POLICIES: dict[Tag, TagPolicy] = {"params": "backup", "grads": "discard", "optimizer": "backup", "frozen": "backup"}


class TorchOffload(RankOffload):
    """On arenas."""

    def __init__(self, arena: Arena) -> None:
        """The arena is closed by `close`."""
        super().__init__(arena)
        self._arena = arena
        for tag, policy in POLICIES.items():
            for part in OPTIMIZER_PARTS if tag == "optimizer" else (tag,):
                arena.tag(part, policy)

    def house(self, tag: Tag, parameters: Sequence[nn.Parameter]) -> None:
        """Move parameters, contents included, onto memory of that tag; the objects stay the same."""
        tensors = self._empty(tag, [parameter.data for parameter in parameters])
        for parameter, tensor in zip(parameters, tensors, strict=True):
            tensor.copy_(parameter.data)
            parameter.data = tensor

    def gradients_like(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return _zeroed(self._empty("grads", parameters))

    def moments_like(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """First and second moments, zeros of the same shapes and types; those of one parameter lie in one part."""
        sizes = [2 * parameter.nbytes for parameter in parameters]
        firsts, seconds = list(parameters), list(parameters)
        least_bytes = LEAST_GRANULES * self._arena.driver.granularity
        for part, indices in zip(OPTIMIZER_PARTS, shares(sizes, len(OPTIMIZER_PARTS), least_bytes), strict=False):
            group = [parameters[index] for index in indices]
            both = _zeroed(self._empty(part, [*group, *group]))
            for place, index in enumerate(indices):
                firsts[index], seconds[index] = both[place], both[len(group) + place]
        return firsts, seconds

    def _empty(self, tag: Tag, like: Sequence[Tensor]) -> list[Tensor]:
        if not like:
            return []
        return empty_tensors(self._arena, tag, [(tuple(t.shape), t.dtype) for t in like], like[0].device)

    def _vacate(self) -> None:
        vacate(self._arena.device)


def _zeroed(tensors: list[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        tensor.zero_()
    return tensors


def planned(num_parameters: int, *, num_reference: int) -> dict[Tag, tuple[int, TagPolicy]]:
    """What a rank will hold: float32 masters (the policy's and a critic's together), gradients of them, two moments,
    and the reference's parameters (0: there is none)."""
    sizes: dict[Tag, int] = {
        "params": 4 * num_parameters,
        "grads": 4 * num_parameters,
        "optimizer": 8 * num_parameters,
        "frozen": 4 * num_reference,
    }
    return {tag: (size, POLICIES[tag]) for tag, size in sizes.items() if size}
