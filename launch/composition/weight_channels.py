"""Which way new weights take in this run, and how long that may take: pure choice from the run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.config import RunConfig
from ...core.config.root import handle_conflicts, rank_conflicts
from ...core.messages import WeightChannel

if TYPE_CHECKING:
    from ...actors.models.fp8 import Fp8Format
    from ...actors.models.model_config import ModelConfig
    from ...actors.weights.rollout_update import AdoptionLimits

MARGIN_S = 10.0
"""For everything around the phases that have their own deadlines."""


def choose_channel(config: RunConfig) -> WeightChannel:
    """What `weights.channel` means here; see its description."""
    channel = config.weights.channel
    if config.data.is_recorded or config.lora.rollout == "adapter":  # no weights travel, or small folders
        return "disk"
    if channel != "auto":
        return channel
    rollout, trainer = config.roles.rollout, config.roles.trainer
    is_spread = rollout.nodes == "*" or set(rollout.nodes) != set(trainer.nodes)
    if rollout.kind == "embedded":
        return "disk" if is_spread else "shm"
    if not (rollout.device_ids and trainer.device_ids):
        return "disk"
    if rollout.nodes != trainer.nodes or not set(rollout.device_ids) & set(trainer.device_ids):
        return "disk" if any(rank_conflicts(config)) else "nccl"
    return "disk" if any(handle_conflicts(config)) else "cuda_ipc"


def has_reader(config: RunConfig, local_rank: int) -> bool:
    """Whether engines read the memory of that trainer rank of a node: those on its GPU, of a node's first rank also
    those on GPUs without one. If the run file names no GPUs of engines, they are with the only rank."""
    engines, ranks = config.roles.rollout.device_ids, config.roles.trainer.rank_devices
    return not engines or ranks[local_rank] in engines or (not local_rank and not set(engines) <= set(ranks))


def ranks_read(config: RunConfig, node: int, devices: Sequence[int]) -> tuple[str, ...]:
    """For each of an engine's GPUs the trainer rank (actor name) whose memory it reads; empty: there is none here."""
    trainer = config.roles.trainer
    here = {device: local for local, device in enumerate(trainer.rank_devices)}
    if (trainer.nodes != "*" and node not in trainer.nodes) or not here:
        return ()
    first = (node if trainer.nodes == "*" else trainer.nodes.index(node)) * trainer.count
    return tuple(f"trainer/{first + here.get(device, 0)}" for device in devices)


def seen_by_servers(config: RunConfig, env: Mapping[str, str], devices: Sequence[int]) -> dict[str, str]:
    """The environment of a rollout actor's server, which sees the GPU whose memory it reads after its own."""
    ranks = config.roles.trainer.rank_devices
    if choose_channel(config) != "cuda_ipc" or set(devices) <= set(ranks):
        return dict(env)
    return {**env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, dict.fromkeys((*devices, *ranks[:1]))))}


def held_fp8(config: RunConfig, model: ModelConfig) -> Fp8Format | None:
    """How engines hold FP8 weights; None: they hold others, or their folder is not here. Raises ConfigError, ModelError
    for a folder that nothing can be sent for."""
    from ...actors.models.fp8 import served_fp8
    from ...actors.models.hf_folder import CONFIG, read_json

    if not config.weights.served_folder:
        return model.fp8
    place = Path(config.weights.served_folder) / CONFIG
    return served_fp8(read_json(place, remedy="see weights.served_folder"), str(place)) if place.exists() else None


COMMIT_S = 30.0


def adoption_limits(config: RunConfig) -> AdoptionLimits:
    """How long one engine may take with a version."""
    from ...actors.weights.rollout_update import AdoptionLimits

    weights, has_servers = config.weights, config.roles.rollout.kind == "sglang"
    fetch_s = weights.transfer_s if weights.channel == "tcp" else 0.0
    return AdoptionLimits(
        prepare_s=max(60.0, weights.join_s + MARGIN_S, fetch_s + MARGIN_S),
        commit_s=max(COMMIT_S, weights.transfer_s) if has_servers else COMMIT_S,  # a server reads all of it then
        # a transfer, and once more through a new group; an embedded engine is never sent any
        sent_commit_s=2 * weights.transfer_s + weights.join_s + MARGIN_S if has_servers else 0.0,
        stall_s=weights.stall_s,
    )
