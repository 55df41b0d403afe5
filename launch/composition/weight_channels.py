"""Which way new weights take in this run, and how long that may take: pure choice from the run file."""

from __future__ import annotations

from ...core.config import RunConfig
from ...core.messages import WeightChannel

MARGIN_S = 10.0
"""For everything around the phases that have deadlines of their own."""


def choose_channel(config: RunConfig) -> WeightChannel:
    """What `weights.channel` means here; see its description."""
    named = config.weights.channel
    if named != "auto":
        return named
    rollout, trainer = config.roles.rollout, config.roles.trainer
    is_spread = rollout.nodes == "*" or set(rollout.nodes) != set(trainer.nodes)
    if rollout.kind == "embedded":
        return "disk" if is_spread else "shm"
    if not (rollout.device_ids and trainer.device_ids):
        return "disk"
    shares_a_gpu = rollout.nodes == trainer.nodes and set(rollout.device_ids) & set(trainer.device_ids)
    return "cuda_ipc" if shares_a_gpu else "nccl"


def is_between_devices(channel: WeightChannel) -> bool:
    """Whether weights are sent, not read."""
    return channel in ("nccl", "cuda_ipc")


def prepare_s(config: RunConfig) -> float:
    """How long one engine may prepare a version."""
    return max(60.0, config.weights.join_s + MARGIN_S)


def commit_s(config: RunConfig) -> float:
    """How long one engine may take a version in: a transfer, and once more through a new group."""
    if not is_between_devices(choose_channel(config)):
        return 30.0
    return 2 * config.weights.transfer_s + config.weights.join_s + MARGIN_S
