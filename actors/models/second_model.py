"""The second models of a trainer: which folder can be the reference model of a KL term, and which a critic's beginning.

A reference and a critic need the policy's vocabulary. Megatron runs policy and reference in the same cut, so they must
be of one shape; the torch trainer takes any. A critic's folder may have a value head. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from ...core.config import AlgoConfig, CriticConfig
from ...core.errors import ConfigError, ModelError
from ...core.protocols import NamedArray
from .hf_folder import open_weights, read_config
from .model_config import ModelConfig


def read_second_model(key: str, path: str, model: ModelConfig, reader: str) -> ModelConfig:
    """The configuration of the folder that the run file's `key` names; `reader` is whose it is to be. Raises
    ConfigError unless it is a plain decoder over the vocabulary of `model`."""
    try:
        found = read_config(path)
        if not model.foreign:
            found.require_plain(reader)
    except ModelError as error:
        raise ConfigError(f"{key}: {error.message}", remedy=error.remedy) from error
    if found.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{key} = {path}: its vocab_size is {found.vocab_size}, that of model.path is {model.vocab_size}",
            remedy="name a model of the same family: it reads the policy's tokens",
        )
    return found


MAY_DIFFER = frozenset({"dtype", "context_length", "eos_token_ids", "source"})


def check_reference(algo: AlgoConfig, model: ModelConfig, *, is_any_shape: bool) -> ModelConfig:
    """The reference's configuration, that of the model without an `algo.ref_path`. Raises ConfigError if that is not a
    folder of a model of the same shape, or, if it may be of any, of the same vocabulary. Shapes are compared for the
    Megatron trainer: raises ModelError for a model that is foreign to it."""
    if not is_any_shape:
        model.require_own("the Megatron trainer")
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
    read counts as one of the model's own size: loading its weights reports what is wrong with it."""
    if not algo.keeps_reference:
        return 0
    try:
        return check_reference(algo, model, is_any_shape=True).num_parameters
    except ConfigError:
        return model.num_parameters


HEADS = ("value_head", "score")
"""What a value head is called in a folder: by us, and by transformers' models for classification."""


def critic_config(critic: CriticConfig, model: ModelConfig) -> ModelConfig:
    """The configuration of the critic's layers, which have no vocabulary head: tied embeddings say so. Raises
    ConfigError for a `critic.path` that is no model folder, or one of another vocabulary."""
    if not critic.path:
        return replace(model, tie_word_embeddings=True)
    found = read_second_model("critic.path", critic.path, model, "the torch trainer's critic")
    return replace(found, tie_word_embeddings=True)


def check_critic(critic: CriticConfig, model: ModelConfig) -> None:
    """Raise ConfigError if a `critic.path` does not hold the weights of its configuration, or has a head that gives
    more than one value."""
    layers = critic_config(critic, model)
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
    """How many parameters the critic has; 0 without one. A folder that cannot be read counts as one of the policy's
    own size: loading its weights reports what is wrong with it."""
    if not critic.enabled:
        return 0
    try:
        layers = critic_config(critic, model)
    except ConfigError:
        layers = critic_config(CriticConfig(), model)
    return layers.num_parameters + layers.hidden_size + 1
