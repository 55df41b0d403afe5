"""What a Megatron trainer rank needs to know, and the check of verbatim names against the installed megatron-core.

The three tables `[megatron.model]`, `[megatron.ddp]` and `[megatron.optimizer]` pass fields of megatron-core's own
dataclasses through by their own names; see `verbatim.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ....core.config.learning import MegatronSettings
from ....core.errors import ConfigError
from ..rank_backend import RankSettings
from .layout import ParallelLayout
from .verbatim import check_table

OTHER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_num_layers")
"""Fields of TransformerConfig that add to the loss inside the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRankSettings(RankSettings):
    """With the `[megatron]` table."""

    megatron: MegatronSettings = field(default_factory=MegatronSettings)

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout.of(self.megatron)


def checked_fields(name: str, table: Mapping[str, Any], record: type, owned: Mapping[str, str]) -> dict[str, Any]:
    """The table, if every name in it is a field of `record` and not myxa's own; see `check_table`."""
    check_table(name, table, {f.name for f in fields(record)}, owned)
    return dict(table)


def model_fields(settings: MegatronSettings) -> dict[str, Any]:
    chosen: dict[str, Any] = {} if settings.recompute == "none" else {"recompute_granularity": settings.recompute}
    if settings.recompute == "full":
        chosen |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if settings.routing_replay:
        chosen["moe_enable_routing_replay"] = True
    return {**chosen, **settings.model}


def check_settings(config: MegatronRankSettings) -> None:
    """Raise ConfigError for settings that do not go together."""
    settings, trainer = config.megatron, config.trainer
    if trainer.strategy != "ddp":
        raise ConfigError(
            f'trainer.strategy = "{trainer.strategy}" is the torch trainer\'s',
            remedy="leave it out; megatron.distributed_optimizer splits optimizer state",
        )
    if settings.offload_optimizer and trainer.dtype != "bfloat16":
        raise ConfigError(
            f"megatron.offload_optimizer = {settings.offload_optimizer} needs float32 masters beside the weights",
            remedy='set trainer.dtype = "bfloat16"',
        )
    if settings.offload_optimizer and (trainer.checkpoint_every or trainer.resume):
        raise ConfigError(
            f"megatron.offload_optimizer = {settings.offload_optimizer} does not go with checkpoints yet",
            remedy="leave out trainer.checkpoint_every and trainer.resume, or offload_optimizer",
        )
    for name in OTHER_LOSSES:
        if settings.model.get(name):
            raise ConfigError(
                f"megatron.model.{name} = {settings.model[name]}: losses that Megatron adds by itself are not "
                "normalised like the policy's",
                remedy="leave it out",
            )
    if trainer.activation_checkpointing and settings.recompute == "none":
        raise ConfigError(
            "trainer.activation_checkpointing is the torch trainer's", remedy='set megatron.recompute = "full"'
        )
