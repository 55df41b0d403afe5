"""Whether a folder can be the reference model of a KL term: its log-probs are compared token by token with those of the
model that is trained. Megatron's trainer runs both by the same code, in the same cut, so they must be of one shape; the
torch trainer builds each by itself.

Knows model folders' configurations. Must not know weights.
"""

from __future__ import annotations

from dataclasses import fields

from ...core.config import AlgoConfig
from ...core.errors import ConfigError, ModelError
from .hf_folder import read_config
from .model_config import ModelConfig
from .second_model import read_second_model

MAY_DIFFER = frozenset({"dtype", "context_length", "eos_token_ids", "source"})


def check_reference(algo: AlgoConfig, model: ModelConfig, *, is_any_shape: bool) -> ModelConfig:
    """The reference's configuration, that of the model without an `algo.ref_path`. Raises ConfigError if that is not a
    folder of a model of the same shape, or, if it may be of any, of the same vocabulary."""
    if not algo.ref_path:
        return model
    if is_any_shape:
        return read_second_model("algo.ref_path", algo.ref_path, model, "the torch trainer's reference model")
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


def reference_parameters(algo: AlgoConfig, model: ModelConfig) -> int:
    """How many parameters the reference model of the torch trainer has; 0 where it keeps none. A folder that cannot be
    read counts as one of the model's own size: whoever needs its weights says what is wrong with it."""
    if not algo.keeps_reference:
        return 0
    try:
        return check_reference(algo, model, is_any_shape=True).num_parameters
    except ConfigError:
        return model.num_parameters
