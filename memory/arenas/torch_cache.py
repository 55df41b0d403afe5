"""What torch hoards on a GPU although nobody uses it. Knows torch's caching allocator and nothing of arenas."""

from __future__ import annotations

import gc

import torch


def trim_torch_cache(ordinal: int, *, keeps_workspaces: bool = False) -> None:
    """Give it back to GPU `ordinal`: memory that other processes let go of, cuBLAS's scratch memory unless it is kept,
    and segments without a living tensor. Cycles of Python objects are the caller's to collect."""
    if not keeps_workspaces:
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
    with torch.cuda.device(ordinal):
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def vacate(device: str) -> None:
    """What torch hoards on the current GPU, tensors in young cycles included; nothing on a stand-in ("host:<n>")."""
    if not device.startswith("host:"):
        gc.collect(1)
        trim_torch_cache(torch.cuda.current_device())
