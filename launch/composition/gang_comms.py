"""How the communicators of a trainer gang leave their devices when engines have them: chosen before the gang meets,
made after it has. Part of the composition root; imports torch, so it is imported by trainers alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__

from ...actors.backends.torch_backend.world import Gang
from ...core.config import RunConfig
from ...core.errors import ConfigError
from ...memory.communicators.probe import choose
from ...memory.communicators.residency import CommResidency
from .weight_channels import choose_channel

FEW_CHANNELS = ("NCCL_MAX_NCHANNELS", "1")
"""A gang of one speaks with nobody: 10 MiB of the GPU a group instead of 512. Not where weights go to engines by
NCCL: both ends of a group must have the same number, or its messages are cut short."""
MakeComms = Callable[[], CommResidency | None]
STORE_PREFIX = "myxa-comms"


def stay() -> CommResidency | None:
    """Communicators that stay on their devices."""
    return None


def gang_comms(config: RunConfig, gang: Gang, *, on_gpus: bool) -> tuple[Gang, MakeComms]:
    """The gang as it has to meet, and what makes its residency once it has. A gang of one has nothing to give back.

    Raises ConfigError for a way that this process has not.
    """
    if gang.world_size == 1 and on_gpus and choose_channel(config) != "nccl":
        os.environ.setdefault(*FEW_CHANNELS)
    if config.memory.share == "none" or gang.world_size == 1:
        return gang, stay
    rung = choose(config.memory.communicators, environment=os.environ)
    if rung.kind == "rebuild":
        raise ConfigError(
            'memory.communicators = "rebuild": trainers keep their groups for a whole run',
            remedy='use "reload", which makes them anew inside, or "auto"',
        )
    if rung.kind == "reload":
        from ...memory.communicators.reload import ReloadComms, proxied_name

        comms = ReloadComms()
        comms.register()
        return replace(gang, backend=proxied_name("nccl" if on_gpus else "gloo")), lambda: comms
    return gang, (lambda: _suspending(gang, rung.way)) if rung.kind == "suspend" else stay


def _suspending(gang: Gang, way: str) -> CommResidency:
    from ...memory.communicators.ctypes_suspend import NcclLibrary, ctypes_comms
    from ...memory.communicators.native import native_comms
    from ...memory.communicators.peers import Peers

    store = PrefixStore(STORE_PREFIX, dist.distributed_c10d._get_default_store())  # pyright: ignore[reportPrivateUsage]
    peers = Peers.over(store, gang.rank, range(gang.world_size))
    return native_comms(peers) if way == "native" else ctypes_comms(peers, NcclLibrary())
