"""The run file: typed sections, loading with good messages, writing back. No torch, no sockets, fast to import."""

from __future__ import annotations

from .data import DataSettings, RewardSettings
from .learning import (
    AlgoConfig,
    AlgoKind,
    CriticConfig,
    MegatronSettings,
    OptimizerConfig,
    TrainerConfig,
)
from .loading import Inspected, dump_config, inspect_config, load_config
from .root import RunConfig, channel_conflicts
from .run import (
    GuardSettings,
    ModelSettings,
    RestartPolicy,
    RoleName,
    RoleSettings,
    RolesSettings,
    RolloutRole,
    RolloutSettings,
    RunSettings,
    WhenHung,
    parse_devices,
)

__all__ = [
    "AlgoConfig",
    "AlgoKind",
    "CriticConfig",
    "DataSettings",
    "GuardSettings",
    "Inspected",
    "MegatronSettings",
    "ModelSettings",
    "OptimizerConfig",
    "RestartPolicy",
    "RewardSettings",
    "RoleName",
    "RoleSettings",
    "RolesSettings",
    "RolloutRole",
    "RolloutSettings",
    "RunConfig",
    "RunSettings",
    "TrainerConfig",
    "WhenHung",
    "channel_conflicts",
    "dump_config",
    "inspect_config",
    "load_config",
    "parse_devices",
]
