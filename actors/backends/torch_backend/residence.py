"""The torch trainer's parameters, gradients and moments on memory that can leave its device and come back.

    params      the float32 masters themselves: copied out, and in again, when they leave
    grads       always there between updates, zeroed instead of dropped; not copied, zeros when they come back
    optimizer   copied, unless no update happened since; comes back while forward and backward run: the update waits
    frozen      the reference model: copied out once, clean for ever

Knows arenas and torch tensors; must not know leases, steps or models. Fulfils `core.assets.AssetStore`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from ....core.assets import Moved, MovedBytes
from ....core.clock import Clock
from ....core.device_memory import Tag, TagPolicy, TagReport
from ....memory.arenas.arena import Arena
from ....memory.arenas.streams import Restoring
from ....memory.arenas.tensors import empty_tensors
from ....memory.arenas.torch_cache import vacate

POLICIES: dict[Tag, TagPolicy] = {"params": "backup", "grads": "discard", "optimizer": "backup", "frozen": "backup"}
LATE: Tag = "optimizer"
"""What may still be on its way when `restore` returns."""


class TorchResidence:
    """One rank's. All methods block and belong to the backend's thread, `report` to any."""

    def __init__(self, arena: Arena, clock: Clock) -> None:
        """The arena is closed by `close`."""
        self._arena = arena
        self._clock = clock
        self._coming: Restoring | None = None
        for tag, policy in POLICIES.items():
            arena.tag(tag, policy)

    # -- placing

    def house(self, tag: Tag, parameters: Sequence[nn.Parameter]) -> None:
        """Move parameters, contents included, onto memory of that tag; the objects stay the same."""
        tensors = self._empty(tag, [parameter.data for parameter in parameters])
        for parameter, tensor in zip(parameters, tensors, strict=True):
            tensor.copy_(parameter.data)
            parameter.data = tensor

    def zeros_like(self, tag: Tag, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Zeros of the same shapes and types on memory of that tag."""
        made = self._empty(tag, tensors)
        for tensor in made:
            tensor.zero_()
        return made

    def _empty(self, tag: Tag, like: Sequence[Tensor]) -> list[Tensor]:
        if not like:
            return []
        return empty_tensors(self._arena, tag, [(tuple(t.shape), t.dtype) for t in like], like[0].device)

    # -- use

    def ready(self) -> None:
        """Parameters come back whole."""

    def arrived(self) -> None:
        """Wait for what is still on its way. To be called before moments are read or written."""
        if self._coming is not None:
            self._coming.wait_all()
            self._coming = None

    def written(self) -> None:
        """Parameters and moments changed: their copies on the host are old."""
        self.arrived()
        self._arena.mark_dirty("params")
        self._arena.mark_dirty("optimizer")

    # -- leaving and coming back

    def report(self) -> tuple[TagReport, ...]:
        """See the protocol; tags that hold nothing are left out."""
        return tuple(report for report in self._arena.report() if report.num_bytes)

    def release(self, tags: Collection[Tag]) -> MovedBytes:
        """See the protocol."""
        self.arrived()
        vacate(self._arena.device)
        return self._arena.release(self._known(tags))

    def restore(self, tags: Collection[Tag]) -> MovedBytes:
        """See the protocol; the moments may still be on their way."""
        started = self._clock.monotonic()
        self.arrived()
        vacate(self._arena.device)
        known = self._known(tags)
        copied = sum(r.num_bytes for r in self.report() if r.tag in known and r.backing == "host")
        dropped = sum(r.num_bytes for r in self.report() if r.tag in known and r.backing == "discarded")
        self._coming = self._arena.begin_restore(known)
        for tag in known:
            if tag != LATE:
                self._coming.wait(tag)
        return Moved(copied_bytes=copied, dropped_bytes=dropped, seconds=self._clock.monotonic() - started)

    def _known(self, tags: Collection[Tag]) -> list[Tag]:
        return [report.tag for report in self.report() if report.tag in tags]

    def close(self) -> None:
        """Give everything back; no tensor on it may be used again."""
        self._coming = None
        self._arena.close()


def planned(num_parameters: int, *, has_reference: bool) -> dict[Tag, tuple[int, TagPolicy]]:
    """What a rank will hold: float32 masters, gradients of them, two moments, and the reference's parameters."""
    sizes: dict[Tag, int] = {
        "params": 4 * num_parameters,
        "grads": 4 * num_parameters,
        "optimizer": 8 * num_parameters,
        "frozen": 4 * num_parameters if has_reference else 0,
    }
    return {tag: (size, POLICIES[tag]) for tag, size in sizes.items() if size}
