"""Whether a folder can be what a critic begins as: a decoder over the policy's vocabulary, maybe with a value head.

Knows model folders. Must not know torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...core.config import CriticConfig
from ...core.errors import ConfigError, ModelError
from ...core.protocols import NamedArray
from .hf_folder import open_weights
from .model_config import ModelConfig
from .second_model import read_second_model

HEADS = ("value_head", "score")
"""What a value head is called in a folder: by us, and by transformers' models for classification."""


def critic_config(critic: CriticConfig, model: ModelConfig) -> ModelConfig:
    """The configuration of the critic's layers, which have no vocabulary head: tied embeddings say so.

    Raises ConfigError for a `critic.path` that is no model folder, or one of another vocabulary.
    """
    if not critic.path:
        return replace(model, tie_word_embeddings=True)
    found = read_second_model("critic.path", critic.path, model, "the torch trainer's critic")
    return replace(found, tie_word_embeddings=True)


def check_critic(critic: CriticConfig, model: ModelConfig) -> None:
    """Raise ConfigError if a `critic.path` does not hold the weights that its configuration tells of, or a head that
    gives more than one value."""
    layers = critic_config(critic, model)
    try:
        with open_weights(critic.path, layers) as tensors:
            value_head_in(tensors, layers, critic.path)
    except ModelError as error:
        raise ConfigError(f"critic.path: {error.message}", remedy=error.remedy) from error


def value_head_in(tensors: Mapping[str, NamedArray], layers: ModelConfig, place: str) -> dict[str, NamedArray]:
    """`weight` and, where there is one, `bias` of the value head in a folder; empty if it has none. Raises ModelError
    for a head of another shape."""
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
    """How many parameters the critic has; 0 without one. A folder that cannot be read counts as one of the policy's
    own size: whoever needs its weights says what is wrong with it."""
    if not critic.enabled:
        return 0
    try:
        layers = critic_config(critic, model)
    except ConfigError:
        layers = critic_config(CriticConfig(), model)
    return layers.num_parameters + layers.hidden_size + 1
