"""NCCL's suspend through torch (>= 2.12): `Backend.suspend`, `resume`, `memory_stats` of each group's backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from .peers import Peers
from .suspend import SuspendComms


@dataclass(frozen=True, slots=True)
class NativeComm:
    """One group's backend, as `Suspendable`."""

    name: str
    ranks: tuple[int, ...]
    backend: Any

    def is_built(self) -> bool:
        """A group that was never used has no communicator yet, and NCCL refuses to suspend it."""
        told = getattr(self.backend, "_is_initialized", None)
        return bool(told()) if callable(told) else False

    def suspend(self) -> None:
        self.backend.suspend()

    def resume(self) -> None:
        self.backend.resume()

    def abort(self) -> None:
        self.backend.abort()

    def memory(self) -> dict[str, int]:
        return {str(name): int(value) for name, value in self.backend.memory_stats().items()}


def nccl_backends() -> Iterable[tuple[str, tuple[int, ...], Any]]:
    """(name, ranks, backend) of every group of this process whose CUDA half is NCCL.

    torch has no public list of groups; its table of names is read, never written.
    """
    world: Any = cast(Any, dist.distributed_c10d)._world
    device = torch.device("cuda")
    for group, name in list(world.pg_names.items()):
        if device in group._device_types:
            backend = group._get_backend(device)
            if backend.name() == "nccl":
                yield str(name), tuple(dist.get_process_group_ranks(group)), backend


def native_comms(
    peers: Peers, find: Callable[[], Iterable[tuple[str, tuple[int, ...], Any]]] = nccl_backends
) -> SuspendComms:
    """Residency of this process's NCCL groups. `find`: which they are."""
    return SuspendComms(lambda: [NativeComm(*each) for each in find()], peers, prepare=device_of_caller)


def device_of_caller() -> Callable[[], None] | None:
    """What makes another thread use the caller's device; None where CUDA is not used."""
    if not torch.cuda.is_initialized():
        return None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)
