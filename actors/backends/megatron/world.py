"""The trainer gang under Megatron: process group, parallel groups of the layout, and who reports what.

Built on `World` (rendezvous, phases, blame, deadlines) and megatron.core's parallel state. Unlike the torch backend, a
gang of one has a process group too: Megatron asks for its groups at any size.

    scoring rank   holds the head and does the loss: last pipeline stage; all its tensor and context ranks agree
    teller         the scoring rank with tensor and context rank 0: what it counts is counted once per replica
"""

from __future__ import annotations

import contextlib
import logging
import resource
from datetime import timedelta

import torch
import torch.distributed as dist

from ....core.errors import LaunchError
from ..torch_backend.world import Gang, RankGroup, World
from . import mcore
from .layout import ParallelLayout

parallel_state = mcore.parallel_state
tensor_parallel = mcore.module("tensor_parallel")

MIN_DESCRIPTORS = 65536
"""Communicators of many groups hold thousands of descriptors; the usual soft limit of 1024 ends in "too many files"."""


class MegatronWorld(World):
    """`World` with Megatron's groups in it. Use `MegatronWorld.enter`."""

    def __init__(self, base: World) -> None:
        super().__init__(base.rank, base.size, base.device, base._store)
        self.grid = mcore.read_grid()
        self.replicas = RankGroup(self.grid.dp.size(), base.device, self.grid.dp)
        """The ranks with the same place in every replica: sums over them are sums over samples."""

    @staticmethod
    def enter(gang: Gang, device: torch.device, layout: ParallelLayout, seed: int) -> MegatronWorld:
        """Meet the other ranks and form all groups. Raises LaunchError as `World.join` does, ConfigError for a layout
        that the gang cannot have."""
        layout.dp(gang.world_size)
        logging.getLogger("megatron.core").setLevel(logging.WARNING)  # it logs every parameter
        _raise_descriptor_limit()
        base = World.join(gang, device)
        if gang.world_size == 1:
            _alone(gang, device)
        with base.phase("form Megatron's groups"):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                distributed_timeout_minutes=max(1, round((gang.collective_s or gang.timeout_s) / 60)),
                create_gloo_process_groups=False,
            )
            _seed(seed)
        return MegatronWorld(base)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            if self.size == 1 and dist.is_initialized():
                dist.destroy_process_group()
        super().close()
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            parallel_state.destroy_model_parallel()


def _alone(gang: Gang, device: torch.device) -> None:
    """No device is named: else every group of Megatron's would get a communicator at once, and each takes hundreds of
    MiB of the GPU without being used."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=gang.collective_s or gang.timeout_s),
    )


def _seed(seed: int) -> None:
    """Megatron's random states: the first thing of it that touches the device, so this reports if there is none."""
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    except (AssertionError, RuntimeError) as error:
        if torch.cuda.is_available():
            raise
        raise LaunchError(
            f"megatron-core runs on CUDA devices alone, and there is none here ({error})",
            remedy='set roles.trainer.devices, or roles.trainer.kind = "torch"',
        ) from error


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MIN_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MIN_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):  # a container that forbids it may still do without
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
