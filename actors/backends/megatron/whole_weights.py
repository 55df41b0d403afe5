"""The weights inside a checkpoint of a Megatron gang, whole and under HuggingFace names: by one process, on the CPU.

Megatron's shards know their place in tensors of the whole model, so any layout's checkpoint reads alike: what lies in
layers is one tensor with the layers in front, what lies in experts has the experts behind them. The cuts that loading
uses say where each row belongs; nothing of megatron-core is imported.

Library considered: torch.distributed.checkpoint reads the format and does so here; its index is a pickle, so convert
checkpoints of your own runs only.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ....core.errors import TrainError
from ...models.model_config import ModelConfig
from .families.decoder import HEAD
from .families.rule import Family, Rule
from .families.table import family_of
from .weight_cut import CutRequest

_LAYERS = re.compile(r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<name>.+)")
"""Layers that are alike lie in one tensor; a mixture of experts has each by itself."""


def read_whole_weights(folder: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(HuggingFace name, whole CPU tensor), one Megatron parameter of the file read at a time; no order is promised.

    Raises TrainError naming the parameter that is missing or that no rule knows.
    """
    reader = FileSystemReader(folder)
    index = cast("Mapping[str, Any]", reader.read_metadata().state_dict_metadata)
    shapes = config.tensor_shapes()
    cutter = _Cutter(config, shapes)
    for key, entry in index.items():
        if not hasattr(entry, "size") or key.startswith(("optimizer.", "rng_state", "rerun_state")):
            continue
        rule, has_experts = _rule_of(family_of(config.model_type), key)
        if rule.names == (HEAD,) and config.tie_word_embeddings:
            continue
        tensor_of_all = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that one process reads is the point
            cast(Any, checkpoint).load({key: tensor_of_all}, storage_reader=reader, no_dist=True)
        for prefix, tensor in _parts(key, tensor_of_all, has_experts):
            yield from cutter.names_and_tensors(rule, prefix, tensor)


def _rule_of(family: Family, key: str) -> tuple[Rule, bool]:
    """The rule of a parameter of the checkpoint, and whether it is one of experts."""
    match = _LAYERS.fullmatch(key)
    name = match["name"] if match else key
    for rule in (*family.layer, *family.expert) if match else family.model:
        if rule.parameter == name:
            return rule, rule in family.expert
    raise TrainError(
        f"no rule says which HuggingFace weights {key} of the checkpoint is made of",
        remedy="a bug in backends/megatron/families, or a checkpoint of another model than it says",
    )


def _parts(key: str, tensor: Tensor, has_experts: bool) -> Iterator[tuple[str, Tensor]]:
    """(prefix of HuggingFace names, the parameter as one layer or one expert has it)."""
    match = _LAYERS.fullmatch(key)
    if match is None:
        yield "", tensor
        return
    layers = enumerate(tensor) if match["layer"] is None else [(int(match["layer"]), tensor)]
    for layer, of_layer in layers:
        prefix = f"model.layers.{layer}."
        if not has_experts:
            yield prefix, of_layer
            continue
        for number, of_expert in enumerate(of_layer):
            gates_apart = of_expert.ndim == 3  # [gate or up, inner, hidden]
            yield f"{prefix}mlp.experts.{number}.", of_expert.flatten(0, 1) if gates_apart else of_expert


class _Cutter:
    """Puts the rows of one parameter back into the HuggingFace tensors that it was cut from."""

    def __init__(self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._config = config
        self._shapes = shapes

    def names_and_tensors(self, rule: Rule, prefix: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        names = [prefix + name for name in rule.names]
        whole = {name: tensor.new_empty(self._shapes[name]) for name in names}
        row = 0
        for piece in rule.cut(CutRequest(names, self._shapes, self._config, 0, 1)):
            target = whole[piece.name][slice(*piece.rows)]
            target.copy_(tensor[row : row + target.shape[0]])
            row += target.shape[0]
        yield from whole.items()
