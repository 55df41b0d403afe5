"""The run file: typed sections, loading with good messages, writing back. No torch, no sockets, fast to import."""

from __future__ import annotations

from .data import DataSettings, EvalSetSettings, EvalSettings, RewardSettings, SourceSettings
from .learning import (
    AlgoConfig,
    AlgoKind,
    AsyncSettings,
    CriticConfig,
    MegatronSettings,
    OptimizerConfig,
    TrainerConfig,
)
from .loading import Inspected, dump_config, inspect_config, load_config
from .rollout import EngineSettings, RolloutSettings
from .root import RunConfig, channel_conflicts
from .run import (
    GuardSettings,
    MemorySettings,
    ModelSettings,
    MonitorSettings,
    RestartPolicy,
    RoleName,
    RoleSettings,
    RolesSettings,
    RolloutRole,
    RunSettings,
    TrainerRole,
    WhenHung,
    parse_devices,
)
from .section import Conflict

__all__ = [
    "AlgoConfig",
    "AlgoKind",
    "AsyncSettings",
    "Conflict",
    "CriticConfig",
    "DataSettings",
    "EngineSettings",
    "EvalSetSettings",
    "EvalSettings",
    "GuardSettings",
    "Inspected",
    "MegatronSettings",
    "MemorySettings",
    "ModelSettings",
    "MonitorSettings",
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
    "SourceSettings",
    "TrainerConfig",
    "TrainerRole",
    "WhenHung",
    "channel_conflicts",
    "dump_config",
    "inspect_config",
    "load_config",
    "parse_devices",
]
