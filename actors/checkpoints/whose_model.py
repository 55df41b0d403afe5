"""Which model a checkpoint is of. No torch: the launcher asks before it starts a run, the ranks when they load."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...core.errors import TrainError
from ..models.model_config import ModelConfig
from .folder import Manifest


def identity_of(config: ModelConfig) -> dict[str, Any]:
    """What makes the weights of one model useless to another."""
    names = (
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
        "head_dim", "tie_word_embeddings", "rope_theta", "rms_norm_eps",
    )  # fmt: skip
    scaling = None if config.rope_scaling is None else asdict(config.rope_scaling)
    return {name: getattr(config, name) for name in names} | {"rope_scaling": scaling}


def check_model(path: Path, manifest: Manifest, config: ModelConfig, backend: str) -> None:
    """Raise TrainError if a checkpoint holds weights of another model, or was written by the other trainer."""
    for name, ours in identity_of(config).items():
        theirs = manifest.model.get(name)
        if theirs != ours:
            raise TrainError(
                f"checkpoint {path} is of another model: {name} is {theirs!r}, here it is {ours!r}",
                remedy="resume with the model folder that the run began with",
            )
    if manifest.backend != backend:
        raise TrainError(
            f"checkpoint {path} was written by the {manifest.backend} trainer",
            remedy=f'set roles.trainer.kind = "{manifest.backend}", or start from its exported model folder',
        )
