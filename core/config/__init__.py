"""The run file: typed sections, loading with good messages, writing back. No torch, no sockets, fast to import."""

from __future__ import annotations

from .data import RewardSettings
from .learning import AlgoConfig, CriticConfig, LoraConfig, OptimizerConfig, TrainerConfig
from .loading import dump_config, inspect_config, load_config
from .root import RunConfig
from .run import RoleName

__all__ = [
    "AlgoConfig", "CriticConfig", "LoraConfig", "OptimizerConfig", "RewardSettings", "RoleName", "RunConfig",
    "TrainerConfig", "dump_config", "inspect_config", "load_config",
]  # fmt: skip
