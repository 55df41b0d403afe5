"""What a run writes to disk, and whether there is room for it. Pure.

    checkpoint, torch       12 bytes a parameter: float32 masters and two moments; the same for a critic
    checkpoint, megatron    bfloat16: 2 + 4 + 8 = 14 (weights, masters, moments); float32: 12
    export                  bytes of trainer.dtype a parameter
    weights by disk         bytes of trainer.dtype a parameter, for each version in flight (three)

While a checkpoint is written the older ones still exist: keep_last + 1 of them. Logs, metrics, traces and the ledger
are not counted: a few MB for every thousand steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...actors.models.hf_folder import export_dtype
from ...actors.models.model_config import ModelConfig
from ...actors.models.second_model import critic_parameters
from ...core.config import RunConfig
from ...core.errors import ConfigError
from ...memory.budget import ITEM_BYTES
from ..composition.weight_channels import choose_channel
from ..memory_part import Part, count_text, size_text, total
from .finding import ConfigFinding

VERSIONS_ON_DISK = 3
FEW_BYTES = 256 << 20
"""Must be free for logs and metrics."""


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """Needed and free bytes at `run.dir`."""

    folder: str
    parts: tuple[Part, ...]
    free_bytes: int | None
    """None: not asked."""

    @property
    def needed_bytes(self) -> int:
        """At the fullest moment."""
        return total(self.parts)


def checkpoint_bytes(config: RunConfig, model: ModelConfig) -> int:
    """Of one checkpoint, all ranks together."""
    item = ITEM_BYTES[config.trainer.dtype]
    has_masters = config.roles.trainer.kind == "megatron" and item == 2
    return (14 if has_masters else 12) * _num_saved(config, model)


def _num_saved(config: RunConfig, model: ModelConfig) -> int:
    return model.num_parameters + critic_parameters(config.critic, model)


def written(config: RunConfig, model: ModelConfig) -> Iterator[Part]:
    """Everything large that the run writes."""
    num, item = count_text(model.num_parameters), ITEM_BYTES[config.trainer.dtype]
    if config.trainer.checkpoint_every:
        one = checkpoint_bytes(config, model)
        kept = config.trainer.keep_last + 1
        if config.run.num_steps:
            kept = min(kept, max(1, config.run.num_steps // config.trainer.checkpoint_every))
        saved = _num_saved(config, model)
        how = f"{kept} at a time x {one // saved} B x {count_text(saved)} = {size_text(one)} each"
        yield Part("checkpoints", kept * one, how)
    if config.trainer.export_at_end:
        name = export_dtype(config.trainer.export_dtype, model, config.trainer.dtype)
        yield Part("export", ITEM_BYTES[name] * model.num_parameters, f"{name} {ITEM_BYTES[name]} B x {num}")
    if choose_channel(config) == "disk" and config.algo.kind != "sft":
        how = f"{VERSIONS_ON_DISK} versions x {item} B x {num}"
        yield Part("weight versions", VERSIONS_ON_DISK * item * model.num_parameters, how)


def disk_of(config: RunConfig, model: ModelConfig, free_bytes: int | None) -> DiskNeed:
    """Needed and free."""
    return DiskNeed(config.run.dir, tuple(written(config, model)), free_bytes)


def disk_findings(disk: DiskNeed) -> Iterator[ConfigFinding]:
    """A disk without room for what will be written."""
    if disk.free_bytes is None or disk.free_bytes >= disk.needed_bytes + FEW_BYTES:
        return
    parts = ", ".join(f"{part.name} {size_text(part.num_bytes)}" for part in disk.parts) or "logs and metrics"
    error = ConfigError(
        f"run.dir: {size_text(disk.free_bytes)} are free at {disk.folder}, the run will write "
        f"{size_text(disk.needed_bytes + FEW_BYTES)} ({parts})",
        remedy="set run.dir to another disk, or lower trainer.keep_last",
    )
    yield ConfigFinding("run.dir", error)
