"""The run file: typed sections, loading with good messages, writing back. No torch, no sockets, fast to import."""

from __future__ import annotations

from .conflict import Conflict
from .critic import CriticConfig
from .data import DataSettings, SourceSettings
from .dumping import dump_config
from .evaluation import EvalSetSettings, EvalSettings
from .learning import AlgoConfig, AlgoKind, AsyncSettings, OptimizerConfig, TrainerConfig
from .loading import Inspected, inspect_config, load_config
from .megatron import MegatronSettings
from .memory import MemorySettings
from .presence import missing_paths
from .rewarding import RewardSettings
from .roles import (
    RestartPolicy,
    RoleName,
    RoleSettings,
    RolesSettings,
    RolloutRole,
    TrainerRole,
    WhenHung,
    parse_devices,
)
from .root import RunConfig, channel_conflicts
from .settings import (
    EngineSettings,
    GuardSettings,
    ModelSettings,
    MonitorSettings,
    RolloutSettings,
    RunSettings,
)

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
    "missing_paths",
    "parse_devices",
]
