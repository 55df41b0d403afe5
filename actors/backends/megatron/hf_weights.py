"""Weights between this gang's model chunks and a HuggingFace folder, in both directions.

`MappedWeight` is a parameter of this rank's chunks with the HuggingFace tensors that it is cut from.

Load: every rank reads from the mapped files the bytes that it needs; nothing is communicated. safetensors' `get_slice`
does the same; our reader also checks names and shapes against the config before anything is built.

Export: the weights under their HuggingFace names, whole, one at a time. Collective over the tensor-parallel,
expert-tensor-parallel and expert-parallel groups (and the pipeline, if every rank needs everything). At most one weight
is whole at a time; of a layer's experts, one of each expert-parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....core.errors import TrainError
from ....core.protocols import NamedArray
from ...models.hf_folder import open_weights
from ...models.model_config import EMBEDDING, HEAD, ROUTER_BIAS, ModelConfig
from ..adapters import is_adapter
from ..torch_backend.tensors import DTYPE_OF, from_array, integers
from .families import EXPERTS, MODEL, CutRequest, Piece, Rule, Shape, find_rule, layer_rules, put_together, vocabulary
from .mcore import Grid, Group, read_grid

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MTP = re.compile(r"after_next\.(transformer_layer\.)?(.+)")


@dataclass(frozen=True, slots=True)
class MappedWeight:
    """A parameter (or a router's correction, a buffer), or one expert's part of a parameter that holds all experts of
    this rank."""

    parameter: Tensor
    rule: Rule
    prefix: str
    """Before the rule's HuggingFace names; for experts it ends before the expert's number."""
    expert: int | None = None
    """Which of this rank's experts, from 0."""
    num_experts_here: int = 0
    is_tied_copy: bool = False
    """The head of a later stage that repeats the embedding: loaded from it, never exported."""

    def part(self, tensor: Tensor) -> Tensor:
        """The expert's part of a tensor shaped like the parameter, or all of it."""
        return tensor if self.expert is None else tensor[self.expert]

    def names(self, ep_rank: int) -> tuple[str, ...]:
        """HuggingFace names; for an expert those of its counterpart on an expert-parallel rank."""
        if self.expert is None:
            return tuple(self.prefix + name for name in self.rule.names)
        number = ep_rank * self.num_experts_here + self.expert
        return tuple(f"{self.prefix}{number}.{name}" for name in self.rule.names)

    def pieces(
        self, config: ModelConfig, shapes: Mapping[str, Shape], rank: int, size: int, ep_rank: int
    ) -> tuple[Piece, ...]:
        """What rank `rank` of the `size` that share this weight holds of the HuggingFace tensors."""
        return tuple(self.rule.cut(CutRequest(self.names(ep_rank), shapes, config, rank, size)))


def map_weights(chunks: Sequence[nn.Module], config: ModelConfig, grid: Grid) -> Iterator[MappedWeight]:
    """All weights of this rank in the order of its layers. Raises TrainError for a parameter that no rule knows."""
    rules = layer_rules(config.model_type)
    for chunk in chunks:
        model = unwrapped(chunk)
        corrections = (pair for pair in model.named_buffers() if pair[0].endswith(".expert_bias"))
        for name, parameter in chain(model.named_parameters(), corrections):
            match = _LAYER.fullmatch(name)
            if is_adapter(name):
                continue
            if mtp := _MTP.fullmatch(name):
                yield from _of_layer(rules, mtp[2], parameter, config.num_layers, config.num_experts, grid)
                continue
            if match is None:
                yield _of_model(name, parameter, config)
                continue
            layer = cast(Any, model).decoder.layers[int(match[1])]
            yield from _of_layer(rules, match[2], parameter, int(layer.layer_number) - 1, config.num_experts, grid)


def unwrapped(chunk: nn.Module) -> nn.Module:
    """The GPTModel inside of data-parallel and half-precision wrappers."""
    model = chunk
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def numbers_of(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers of this rank's chunks, by number of the chunk and name."""
    models = [unwrapped(chunk) for chunk in chunks]
    parts = (((*model.named_parameters(), *model.named_buffers())) for model in models)
    return {f"{number}.{name}": part.detach() for number, parameters in enumerate(parts) for name, part in parameters}


def _of_model(name: str, parameter: Tensor, config: ModelConfig) -> MappedWeight:
    rule = find_rule(MODEL, name)
    if config.tie_word_embeddings and rule.names == (HEAD,):
        return MappedWeight(parameter, replace(rule, names=(EMBEDDING,)), "", is_tied_copy=True)
    return MappedWeight(parameter, rule, "")


def _of_layer(
    rules: Sequence[Rule], name: str, parameter: Tensor, layer: int, num_experts: int, grid: Grid
) -> Iterator[MappedWeight]:
    prefix = f"model.layers.{layer}."
    if all(rule.parameter != name for rule in EXPERTS):
        yield MappedWeight(parameter, find_rule(rules, name), prefix)
        return
    num_local = num_experts // grid.ep.size()
    rule = find_rule(EXPERTS, name)
    for expert in range(num_local):
        yield MappedWeight(parameter, rule, f"{prefix}mlp.experts.", expert, num_local)


def load_hf_folder(chunks: Sequence[nn.Module], folder: str | Path, config: ModelConfig) -> None:
    """Fill this rank's parameters; table rows that only pad the vocabulary become zero. Not collective. Raises
    ModelError naming file and weight if the folder is not the config's."""
    grid = read_grid()
    shapes = config.tensor_shapes()
    with torch.no_grad(), open_weights(folder, config) as tensors:
        for weight in map_weights(chunks, config, grid):
            group = grid.tp if weight.expert is None else grid.etp
            pieces = weight.pieces(config, shapes, group.rank(), group.size(), grid.ep.rank())
            _fill(weight, [read_piece(tensors[piece.name], piece) for piece in pieces])


def _fill(weight: MappedWeight, parts: Sequence[Tensor]) -> None:
    target = weight.part(weight.parameter)
    source = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    num_rows = source.shape[0]
    is_padded = num_rows < target.shape[0] and weight.rule.cut is vocabulary
    if source.shape[1:] != target.shape[1:] or not (is_padded or num_rows == target.shape[0]):
        raise TrainError(
            f"{weight.prefix}{weight.rule.names[0]} gives {list(source.shape)} for {weight.rule.parameter} of "
            f"{list(target.shape)}",
            remedy="a bug in backends/megatron/families, or a megatron-core that cuts otherwise",
        )
    target[:num_rows].copy_(source)
    target[num_rows:].zero_()


def read_piece(array: NamedArray, piece: Piece) -> Tensor:
    """A copy of a rectangle of a tensor's bytes, as a CPU tensor of the same number type."""
    num_rows, *row_shape = array.spec.shape
    item_bytes = DTYPE_OF[array.spec.dtype].itemsize
    width = row_shape[0] if row_shape else 1
    first, last = piece.columns or (0, width)
    rows = np.frombuffer(array.data, dtype=np.uint8).reshape(num_rows, width * item_bytes)
    cells = rows[slice(*piece.rows), first * item_bytes : last * item_bytes]
    tensor = from_array(np.array(cells)).view(DTYPE_OF[array.spec.dtype])
    return tensor if row_shape else tensor.reshape(-1)


Named = tuple[str, Tensor]


def iter_hf_tensors(
    chunks: Sequence[nn.Module],
    config: ModelConfig,
    *,
    to_all: bool = False,
    pick: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Iterator[Named]:
    """(HuggingFace name, whole tensor on this rank's device) in a fixed order. Collective: every rank must run through
    to the end. Yields on the sending rank of each pipeline stage (first of its tensor, context and data-parallel
    groups) what the stage holds, elsewhere nothing; with `to_all` the whole model on every rank, stage by stage.
    Padding of the vocabulary is cut off and a tied head is left out, as in the folder. `pick` says which tensor, shaped
    like the parameter and of one number type for all but the routers' corrections (float32), to export: values,
    gradients, moments. A tensor may share memory with the picked one, so use it before training on."""
    grid = read_grid()
    exporter = _Exporter(
        config, config.tensor_shapes(), grid, pick, [w for w in map_weights(chunks, config, grid) if not w.is_tied_copy]
    )
    if to_all and grid.pp.size() > 1:
        yield from exporter.of_all_stages()
    else:
        yield from exporter.of_this_stage(yields=to_all or grid.is_sender)


@dataclass(frozen=True, slots=True)
class _Exporter:
    config: ModelConfig
    shapes: Mapping[str, Shape]
    grid: Grid
    pick: Callable[[Tensor], Tensor]
    weights: Sequence[MappedWeight]

    def of_this_stage(self, *, yields: bool) -> Iterator[Named]:
        for weight in self.weights:
            names = self._names(weight)
            for name, tensor in zip(names, self._tensors(weight), strict=True):
                if yields:
                    yield name, tensor

    def of_all_stages(self) -> Iterator[Named]:
        """Each stage's weights, broadcast along the pipeline."""
        group = self.grid.pp
        names = list(self.shapes)
        like = self.pick(self.weights[0].parameter)
        for stage, numbers in enumerate(self._held_by_stages(like.device)):
            source = cast(int, cast(Any, dist).get_global_rank(group, stage))
            weights = self.of_this_stage(yields=True) if stage == group.rank() else None
            for number in numbers:
                name = names[number]
                kind = torch.float32 if name.endswith(ROUTER_BIAS) else like.dtype
                tensor = next(weights)[1].contiguous() if weights else like.new_empty(self.shapes[name], dtype=kind)
                cast(Any, dist).broadcast(tensor, src=source, group=group)
                yield name, tensor

    def _held_by_stages(self, device: torch.device) -> list[list[int]]:
        """Which tensors (numbers in the order of `shapes`) each stage yields, in its order."""
        number_of = {name: number for number, name in enumerate(self.shapes)}
        held = [number_of[name] for weight in self.weights for name in self._names(weight)]
        row = torch.full((len(number_of),), -1, dtype=torch.int64, device=device)
        row[: len(held)] = torch.tensor(held, device=device)
        return [[n for n in integers(part) if n >= 0] for part in _gathered(row, self.grid.pp)]

    def _names(self, weight: MappedWeight) -> list[str]:
        ranks = range(1 if weight.expert is None else self.grid.ep.size())
        return [name for rank in ranks for name in weight.names(rank)]

    def _tensors(self, weight: MappedWeight) -> list[Tensor]:
        is_expert = weight.expert is not None
        group = self.grid.etp if is_expert else self.grid.tp
        shard = weight.part(self.pick(weight.parameter)).contiguous()
        weights = self._put_together(weight, _gathered(shard, group) if self._is_cut(weight, group) else [shard])
        if not is_expert:
            return weights
        by_rank = [_gathered(tensor.contiguous(), self.grid.ep) for tensor in weights]
        return [tensors[rank] for rank in range(self.grid.ep.size()) for tensors in by_rank]

    def _is_cut(self, weight: MappedWeight, group: Group) -> bool:
        """Whether ranks of the group hold different parts, rather than all of them the same."""
        if group.size() == 1:
            return False
        first, second = (weight.pieces(self.config, self.shapes, r, group.size(), 0) for r in (0, 1))
        return first != second

    def _put_together(self, weight: MappedWeight, shards: Sequence[Tensor]) -> list[Tensor]:
        names = weight.names(0)  # shapes are the same for all experts
        cuts = [weight.pieces(self.config, self.shapes, rank, len(shards), 0) for rank in range(len(shards))]
        if len(shards) == 1 and self._are_runs(cuts[0], names):
            ends = list(accumulate(self.shapes[name][0] for name in names))
            return [shards[0][start:end] for start, end in pairwise((0, *ends))]
        return list(put_together(names, self.shapes, cuts, shards).values())

    def _are_runs(self, pieces: Sequence[Piece], names: Sequence[str]) -> bool:
        """Whether the rank has the tensors whole, one behind the other: they need no copy."""
        whole_weights = [(name, (0, self.shapes[name][0]), None) for name in names]
        widths = {name: self.shapes[name][-1] for name in names}
        return whole_weights == [
            (piece.name, piece.rows, None if piece.columns in (None, (0, widths[piece.name])) else piece.columns)
            for piece in pieces
        ]


def _gathered(tensor: Tensor, group: Group) -> list[Tensor]:
    """The tensors of all ranks of the group. Collective."""
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    cast(Any, dist).all_gather(parts, tensor, group=group)
    return parts
