"""The second models of a trainer: which folder can be the reference model of a KL term, and which a critic's beginning.

Both have the policy's shape: one set of layers and one cut serve all of them. A critic has no vocabulary head, but its
folder may have a value head. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from ...core.config import CriticConfig
from ...core.errors import ConfigError, ModelError
from ...core.protocols import NamedArray
from .hf_folder import open_weights, read_config
from .model_config import ModelConfig

MAY_DIFFER = frozenset({"dtype", "context_length", "eos_token_ids", "source", "foreign"})
HEADS = ("value_head", "score")
"""What a value head is called in a folder: by us, and by transformers' models for classification."""


def check_second_model(key: str, path: str, model: ModelConfig) -> None:
    """Raise ConfigError unless the folder `path`, which the run file's `key` names, holds a model of the shape of
    `model`. No path: it is that of `model` itself."""
    if not path:
        return
    try:
        found = read_config(path)
    except ModelError as error:
        raise ConfigError(f"{key}: {error.message}", remedy=error.remedy) from error
    if key == "critic.path":
        found, model = critic_layers(found), critic_layers(model)
    for field in fields(ModelConfig):
        own, other = getattr(model, field.name), getattr(found, field.name)
        if own != other and field.name not in MAY_DIFFER:
            raise ConfigError(
                f"{key} = {path}: its {field.name} is {other}, that of model.path is {own}",
                remedy="name a folder of a model of the same shape, such as an earlier checkpoint's export",
            )


def critic_layers(model: ModelConfig) -> ModelConfig:
    """The configuration of a critic's layers: no vocabulary head, which tied embeddings say."""
    return replace(model, tie_word_embeddings=True)


def check_critic(critic: CriticConfig, model: ModelConfig) -> None:
    """Raise ConfigError if a `critic.path` does not hold weights of the policy's shape, or has a head that gives more
    than one value."""
    check_second_model("critic.path", critic.path, model)
    layers = critic_layers(model)
    try:
        with open_weights(critic.path, layers) as tensors:
            value_head_in(tensors, layers, critic.path)
    except ModelError as error:
        raise ConfigError(f"critic.path: {error.message}", remedy=error.remedy) from error


def value_head_in(tensors: Mapping[str, NamedArray], layers: ModelConfig, place: str) -> dict[str, NamedArray]:
    """`weight` and perhaps `bias` of a folder's value head; empty: it has none. Raises ModelError for another shape."""
    name = next((name for name in HEADS if f"{name}.weight" in tensors), "")
    found = {part: tensors[f"{name}.{part}"] for part in ("weight", "bias") if f"{name}.{part}" in tensors}
    shapes = {"weight": (1, layers.hidden_size), "bias": (1,)}
    for part, array in found.items():
        if array.spec.shape != shapes[part]:
            raise ModelError(
                f"{place}: {name}.{part} has shape {list(array.spec.shape)}, a value head's is {list(shapes[part])}",
                remedy="name a model that gives one value for each token",
            )
    return found


def critic_parameters(critic: CriticConfig, model: ModelConfig) -> int:
    """How many parameters the critic has; 0 without one."""
    return critic_layers(model).num_parameters + model.hidden_size + 1 if critic.enabled else 0
