"""Which training backend a trainer rank gets, and which ranks train a shard together. Part of the composition root:
beside `program.py`, the only place that names concrete backends. Imports them where they are built: each brings torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...core.clock import Clock
from ...core.config import RunConfig
from ...core.protocols import TrainBackend
from ..actor_spec import ActorSpec
from .memory_parts import megatron_residence, torch_residence

if TYPE_CHECKING:
    from ...actors.backends.torch_backend.world import Gang


REPEATABLE_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}
"""For libraries that choose kernels and the order of sums by what they time or see."""


def make_backend(spec: ActorSpec, config: RunConfig, gang: Gang, clock: Clock) -> TrainBackend:
    """The rank's backend, not set up yet. In a deterministic run on GPUs an operation without a deterministic kernel
    raises: torch names it."""
    if config.rollout.deterministic and spec.devices:
        _use_repeatable_kernels()
    return (_megatron if spec.kind == "megatron" else _torch)(spec, config, gang, clock)


def _use_repeatable_kernels() -> None:
    """Before CUDA starts."""
    import torch
    from torch.utils import deterministic

    for name, value in REPEATABLE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that was not written.
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] -- set by a property


def shard_of_rank(spec: ActorSpec, config: RunConfig, world_size: int) -> tuple[int, ...]:
    """The shard that each rank trains: its own, or that of the replica of which it holds a part."""
    if spec.kind != "megatron":
        return tuple(range(world_size))
    from ...actors.backends.megatron.settings import layout_of

    layout = layout_of(config.megatron)
    return tuple(layout.dp_rank_of(rank, world_size) for rank in range(world_size))


def _torch(spec: ActorSpec, config: RunConfig, gang: Gang, clock: Clock) -> TrainBackend:
    from ...actors.backends.rank_backend import RankSettings
    from ...actors.backends.torch_backend.backend import TorchBackend

    residence = torch_residence(spec, config, clock)
    return TorchBackend(RankSettings(**_told(spec, config, gang)), clock, residence=residence)


def _megatron(spec: ActorSpec, config: RunConfig, gang: Gang, clock: Clock) -> TrainBackend:
    from ...actors.backends.megatron.backend import MegatronBackend
    from ...actors.backends.megatron.settings import MegatronRankSettings

    if spec.devices:  # before CUDA starts: one queue, so that overlapped collectives run in the order of their calls
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    megatron = config.megatron
    if config.rollout.deterministic:  # else its embedding sums gradients in any order
        megatron = megatron.model_copy(update={"model": {"deterministic_mode": True, **megatron.model}})
    told = MegatronRankSettings(megatron=megatron, **_told(spec, config, gang))
    return MegatronBackend(told, clock, residence=megatron_residence(spec, config, clock))


def _told(spec: ActorSpec, config: RunConfig, gang: Gang) -> dict[str, Any]:
    """The fields of `RankSettings`."""
    return {
        "model_path": config.model.path,
        "algo": config.algo,
        "optimizer": config.optimizer,
        "trainer": config.trainer,
        "critic": config.critic,
        "max_new_tokens": config.rollout.max_new_tokens,
        "num_steps": config.run.num_steps,
        "seed": config.run.seed,
        "device": "cuda" if spec.devices else "cpu",
        "num_threads": spec.threads,
        "gang": gang,
        "serving_dtype": _serving_dtype(config),
    }


def _serving_dtype(config: RunConfig) -> str:
    """The engines' number type, for servers, to which tensors may go from device to device; else the trainer's own."""
    return config.engine.dtype if config.roles.rollout.kind == "sglang" else ""
