"""How trainer and engine share the memory of devices that both of them name."""

from __future__ import annotations

from typing import Literal

from .section import CountInt, NonNegativeFloat, PositiveFloat, PositiveInt, Section

ShareMode = Literal["none", "switch"]
ArenaBackend = Literal["auto", "cuda_vmm", "torch_memory_saver", "host_vmm"]
CommunicatorWay = Literal["auto", "keep", "suspend", "reload", "rebuild"]
ParamsPolicy = Literal["auto", "rematerialise", "backup"]


class MemorySettings(Section, frozen=True):
    """How trainer and engine share the memory of devices that both of them name."""

    share: ShareMode = "none"
    """none (each has its own memory, both run at the same time) or switch (they take turns: a memory manager has
    one of them leave the devices before the other comes back; nothing that is generated is lost)."""
    backend: ArenaBackend = "auto"
    """What the trainer's memory is made of: cuda_vmm (the driver's virtual memory, by GPU), torch_memory_saver (the
    library of that name; Megatron only), host_vmm (memory of the host that stands for a device, so that a machine
    without a GPU runs the same protocol). "auto": cuda_vmm where the trainer has GPUs, else host_vmm."""
    communicators: CommunicatorWay = "auto"
    """What becomes of the trainer's communicators while it is off the device: keep (they stay), suspend (NCCL's own,
    2.29.7 or later), reload (a proxy backend drops and rebuilds them), rebuild (for programs of one's own; runs
    refuse it). "auto": the best that works here. A trainer of one rank has none to give back."""
    host_pool_gb: NonNegativeFloat = 0.0
    """GiB of host memory per trainer rank for what leaves its device, taken once at start and pinned on GPUs; what does
    not fit is refused. 0 = what leaves by being copied (parameters, optimizer, reference model) and 5 % more: with one
    Megatron rank in bfloat16 14 bytes a parameter. Not used by torch_memory_saver."""
    capacity_mb: CountInt = 0
    """MiB of each stand-in device of runs on the CPU (host_vmm), which must be set there."""
    host_devices: PositiveInt = 1
    """Stand-in devices of runs on the CPU, "host:0", "host:1" and so on, each of `capacity_mb`. Trainer ranks and
    engines are dealt out among them as among GPUs: several actors on one, or several devices for one engine."""
    reserve_mb: CountInt = 1024
    """MiB of each GPU that are never granted: contexts, workspaces, fragments. The stand-in device has no such."""
    workspace_mb: CountInt = 0
    """MiB of each device that a trainer rank needs beside parameters, gradients and optimizer while it has its turn:
    activations and logits of its largest micro-batch. The engine makes that much room, too. Must be set on GPUs."""
    switch_s: PositiveFloat = 120.0
    """Seconds one change of hands may take; then the lease is refused with who holds what, and asked for again. When
    that was refused three times the trainer gang fails. The start of an engine has `engine.start_s` more."""
    params: ParamsPolicy = "auto"
    """How parameters leave the device: rematerialise (dropped, and rebuilt from float32 masters) or backup (copied to
    the host). "auto": rematerialise where there are masters, else backup."""
