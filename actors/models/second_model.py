"""The torch trainer's second models, a reference and a critic: each is built by itself, of any shape, and reads the
policy's tokens. Knows model folders' configurations. Must not know weights, or what the model is for.
"""

from __future__ import annotations

from ...core.errors import ConfigError, ModelError
from .hf_folder import read_config
from .model_config import ModelConfig


def read_second_model(key: str, path: str, model: ModelConfig, reader: str) -> ModelConfig:
    """The configuration of the folder that the run file's `key` names; `reader` is whose it is to be.

    Raises ConfigError unless it is a plain decoder over the vocabulary of `model`.
    """
    try:
        found = read_config(path)
        found.require_plain(reader)
    except ModelError as error:
        raise ConfigError(f"{key}: {error.message}", remedy=error.remedy) from error
    if found.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{key} = {path}: its vocab_size is {found.vocab_size}, that of model.path is {model.vocab_size}",
            remedy="name a model of the same family: it reads the policy's tokens",
        )
    return found
