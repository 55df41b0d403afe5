"""How new weights get from the trainer to the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .section import CountInt, NonNegativeFloat, PathText, PositiveFloat, PositiveInt, Section

ChannelName = Literal["auto", "shm", "disk", "nccl", "cuda_ipc"]


class WeightSettings(Section, frozen=True):
    """How new weights get from the trainer to the engines."""

    channel: ChannelName = "auto"
    """shm (shared memory, for embedded engines on the trainer's nodes), disk (folders), nccl (broadcast from the
    trainer's GPU into the servers'; by gloo where the trainer is on CPUs), cuda_ipc (servers whose GPUs
    each have a trainer rank read the memory of that rank). "auto": cuda_ipc where both roles name a same GPU and every
    engine's GPU has a rank (disk where only some have), nccl where the roles' GPUs are others, else shm or disk."""
    bucket_mb: Annotated[int, Field(ge=1, le=65536)] = 2048
    """MiB of weights sent at once. A server needs up to twice that beside its weights while it loads."""
    verify_every: CountInt = 0
    """Weight versions (nccl, cuda_ipc) after which some weights are read back from each server and compared; 0 =
    never. Digests of what was received are always compared where the server tells them."""
    join_s: PositiveFloat = 30.0
    """Seconds a server may take to join the trainer's process group."""
    transfer_s: PositiveFloat = 30.0
    """Seconds one transfer may take; a failed one is repeated once through a new group."""
    adopt_at_once: PositiveInt = 1
    """Engines that bring a new version in at the same time; the others serve meanwhile. More: all have it sooner, and
    fewer generate while they wait for it."""
    stall_s: NonNegativeFloat = 20.0
    """Seconds without any progress after which an engine's update is given up and the engine built anew, before the
    deadline of the whole phase; 0 = the deadlines only."""
    served_folder: PathText = ""
    """Model folder that the servers were started with, if it is not `model.path`; if its weights are FP8 in blocks,
    weights are quantised likewise on the way (nccl, cuda_ipc)."""
