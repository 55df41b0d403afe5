"""Whether a folder can be the reference model of a KL term: its log-probs are compared token by token with those of the
model that is trained, by the same code, in the same cut.

Knows model folders' configurations. Must not know weights.
"""

from __future__ import annotations

from dataclasses import fields

from ...core.config import AlgoConfig
from ...core.errors import ConfigError, ModelError
from .hf_folder import read_config
from .model_config import ModelConfig

MAY_DIFFER = frozenset({"dtype", "context_length", "eos_token_ids", "source"})


def check_reference(algo: AlgoConfig, model: ModelConfig) -> ModelConfig:
    """The model's configuration again. Raises ConfigError unless `algo.ref_path`, if there is one, names a folder of a
    model of the same shape."""
    if not algo.ref_path:
        return model
    try:
        reference = read_config(algo.ref_path)
    except ModelError as error:
        raise ConfigError(f"algo.ref_path: {error.message}", remedy=error.remedy) from error
    for field in fields(ModelConfig):
        own, other = getattr(model, field.name), getattr(reference, field.name)
        if own != other and field.name not in MAY_DIFFER:
            raise ConfigError(
                f"algo.ref_path = {algo.ref_path}: its {field.name} is {other}, that of model.path is {own}",
                remedy="name a folder of a model of the same shape, such as an earlier checkpoint's export",
            )
    return model
