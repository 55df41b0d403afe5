"""Low-rank adapters on megatron-core's linear layers, cut as the weights are that they are added to.

Each HuggingFace matrix has its own pair, though Megatron holds several in one parameter. Of rank r of n:

    cut by rows (qkv, fc1)       A is whole everywhere; B is the rank's rows of each matrix, in the parameter's order
    cut by columns (proj, fc2)   A is the rank's columns; B is whole everywhere; what A gives is added up over ranks

Between A and B a sequence is `rank` numbers wide: there it is gathered, scattered or added up, so adapters send little.
What is whole everywhere gets the same gradient on every tensor-parallel rank, or, under sequence parallelism, the part
of its rows, which Megatron adds up (`sequence_parallel`). What a layer holds of B comes in pieces that follow one
another in the whole, so checkpoints of any layout load into any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....core.config import LoraConfig
from ...models.adapters import ADAPTERS, PARTS, adapted_matrices, adapter_shapes
from ...models.model_config import ModelConfig
from ..adapters import Adapters
from . import mcore
from .families import Piece, check_adapted, columns
from .hf_weights import MappedWeight, map_weights, unwrapped
from .mcore import Grid, read_grid
from .provider import NormedRowParallelLinear

tensor_parallel = mcore.module("tensor_parallel")


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter: rows or columns from `start` on of a whole part of an adapter."""

    name: str
    parameter: nn.Parameter
    is_cut: bool = False
    """Whether tensor-parallel ranks hold others."""
    axis: int = 0
    start: int = 0


@dataclass(slots=True)
class Adapted:
    """A layer with the adapters of its matrices."""

    module: Any
    scale: float
    is_cut_by_rows: bool
    pairs: list[tuple[Shard, list[Shard]]] = field(default_factory=list[tuple[Shard, list[Shard]]])
    """Of each matrix A, and the pieces of B."""
    order: Tensor | None = None
    """int64 [rows here]: which row of all pieces, one behind the other, belongs to a row of the weight; a number beyond
    them: none does. None: they lie so already."""

    def added(self, x: Tensor, output: Tensor) -> Tensor:
        """The layer's output [tokens, 1, rows] for x [tokens, 1, columns] with what the adapters add to it, by
        megatron-core's rules of what is split."""
        is_split = bool(self.module.sequence_parallel)
        # In two dimensions: with more, torch chooses the product by who wants a gradient, and scores lose their bits.
        low = functional.linear(x.flatten(0, -2), torch.cat([a.parameter for a, _ in self.pairs]))
        if not self.is_cut_by_rows:
            way = "reduce_scatter_to_sequence_parallel" if is_split else "reduce_from_tensor_model_parallel"
            low = getattr(tensor_parallel, f"{way}_region")(low)
        elif is_split:
            low = tensor_parallel.gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        else:
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low)
        # All in one product that adds to the output itself: what is as large as that is read and written once.
        return torch.addmm(output.flatten(0, -2), low, self._rows().t(), alpha=self.scale).view_as(output)

    def _rows(self) -> Tensor:
        """B of all matrices, [rows of the weight here, matrices * rank]: each beside the others' zeros."""
        if self.order is None and [len(pieces) for _, pieces in self.pairs] == [1]:
            return self.pairs[0][1][0].parameter
        rank, last = self.pairs[0][0].parameter.shape[0], len(self.pairs) - 1
        parts = [
            functional.pad(piece.parameter, (number * rank, (last - number) * rank))
            for number, (_, pieces) in enumerate(self.pairs)
            for piece in pieces
        ]
        return self._ordered(torch.cat(parts))

    def merged(self, weight: Tensor) -> Tensor:
        parts = [(p.parameter.detach(), a.parameter.detach()) for a, pieces in self.pairs for p in pieces]
        product = torch.cat([b.float() @ a.float() for b, a in parts])
        return (weight.float() + self._ordered(product) * self.scale).to(weight.dtype)

    def _ordered(self, rows: Tensor) -> Tensor:
        if self.order is None:
            return rows
        return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).index_select(0, self.order)


class MegatronAdapters(Adapters):
    """Of this rank's chunks. Freezes all of their parameters; to be made before data parallelism is put around them."""

    def __init__(self, lora: LoraConfig, seed: int, chunks: Sequence[nn.Module], model: ModelConfig) -> None:
        """Raises as `Adapters`, and ConfigError for matrices of layers that get none here."""
        super().__init__(lora, adapted_matrices(lora, model.tensor_shapes()), seed)
        check_adapted(self.matrices, model)
        self._grid: Grid = read_grid()
        self._model = model
        self._rank = lora.rank
        self._layers: dict[int, Adapted] = {}
        modules = {id(p): m for chunk in chunks for m in chunk.modules() for p in m.parameters(recurse=False)}
        for chunk in chunks:
            chunk.requires_grad_(requires_grad=False)
            embedding = getattr(unwrapped(chunk), "embedding", None)
            if embedding is not None:
                embedding.register_forward_hook(_with_gradient)
        for weight in list(map_weights(chunks, model, self._grid)):
            names = [name.removesuffix(".weight") for name in weight.names(0)]
            if any(name in self.matrices for name in names):
                self._adapt(weight, modules[id(weight.parameter)])

    def weight_of(self, parameter: Tensor) -> Tensor:
        """A parameter as engines get it: this rank's part of the model with the adapters merged."""
        layer = self._layers.get(id(parameter))
        return parameter.detach() if layer is None else layer.merged(parameter.detach())

    def whole(self, total: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(a trainer's name, whole float32 tensor) on every rank. `total(tensor)`: its sum over ranks. Collective."""
        grid = self._grid
        numbers = {name: torch.zeros(shape) for name, shape in adapter_shapes(self._rank, self.matrices).items()}
        for shard in self._shards() if grid.cp.rank() == grid.dp.rank() == 0 else ():
            if shard.is_cut or grid.tp.rank() == 0:
                length = shard.parameter.shape[shard.axis]
                numbers[shard.name].narrow(shard.axis, shard.start, length).copy_(shard.parameter.detach())
        return ((name, total(tensor)) for name, tensor in numbers.items())

    def sharded(self) -> dict[str, Any]:
        """What megatron-core's checkpoints know of them, by key and place."""
        kind: Any = mcore.module("dist_checkpointing.mapping").ShardedTensor
        shapes = adapter_shapes(self._rank, self.matrices)
        group = mcore.parallel_state.get_data_parallel_group(with_context_parallel=True)
        shards: dict[str, Any] = {}
        for shard in self._shards():
            length = shard.parameter.shape[shard.axis]
            place = (shard.axis, shard.start // length, shapes[shard.name][shard.axis] // length)
            replica = (0, 0 if shard.is_cut else self._grid.tp.rank(), group.rank())
            shards[f"{shard.name}@{shard.start}"] = kind.from_rank_offsets(
                f"{ADAPTERS}{shard.name}", shard.parameter, place, replica_id=replica
            )
        return shards

    @torch.no_grad()
    def restore(self, loaded: Mapping[str, Tensor]) -> None:
        """Take over what was loaded for `sharded`."""
        for shard in self._shards():
            shard.parameter.copy_(loaded[f"{shard.name}@{shard.start}"])

    def _shards(self) -> Iterator[Shard]:
        for layer in self._layers.values():
            for a, pieces in layer.pairs:
                yield a
                yield from pieces

    def _adapt(self, weight: MappedWeight, module: Any) -> None:
        tp = self._grid.tp
        layer = Adapted(module, self.scale, is_cut_by_rows=weight.rule.cut is not columns)
        pieces = weight.pieces(self._model, self._model.tensor_shapes(), tp.rank(), tp.size(), 0)
        rows, start = dict[str, list[tuple[int, int]]](), 0
        for piece in pieces:  # name -> where its rows lie in the parameter
            rows.setdefault(piece.name, []).append((start, piece.rows[1] - piece.rows[0]))
            start += piece.rows[1] - piece.rows[0]
        places: list[int] = []
        for full in weight.names(0):
            name = full.removesuffix(".weight")
            if name in self.matrices:
                layer.pairs.append(self._pair(name, module, [p for p in pieces if p.name == full]))
                places += [row for first, number in rows[full] for row in range(first, first + number)]
        if layer.is_cut_by_rows and places != list(range(start)):
            order = torch.full((start,), len(places))
            order[torch.tensor(places)] = torch.arange(len(places))
            layer.order = order.to(weight.parameter.device)
        self._layers[id(weight.parameter)] = layer

        def added(x: Tensor, output: Tensor) -> Tensor:
            return layer.added(x, output) if self.is_on else output

        def hook(_: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
            return added(args[0], output[0]), output[1]

        if isinstance(module, NormedRowParallelLinear):
            cast(Any, module).adapter = added
        else:
            module.register_forward_hook(hook)

    def _pair(self, name: str, module: Any, pieces: Sequence[Piece]) -> tuple[Shard, list[Shard]]:
        (a, b), (whole_a, whole_b) = (f"{name}.{part}" for part in PARTS), self.first(name)
        part = pieces[0].columns
        if part is not None:  # the layer's results are added up over ranks
            cut_a = self._make(module, a, whole_a[:, slice(*part)], 1, part[0])
            return cut_a, [self._make(module, b, whole_b)]
        runs: list[tuple[int, int]] = []
        for first, last in (piece.rows for piece in pieces):
            runs = [*runs[:-1], (runs[-1][0], last)] if runs and runs[-1][1] == first else [*runs, (first, last)]
        return self._make(module, a, whole_a), [self._make(module, b, whole_b[slice(*r)], 0, r[0]) for r in runs]

    def _make(self, module: Any, name: str, value: Tensor, axis: int | None = None, start: int = 0) -> Shard:
        parameter = nn.Parameter(value.to(module.weight, copy=True).contiguous())
        is_cut = axis is not None
        if is_cut:
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, axis, 1)
        elif module.sequence_parallel:
            cast(Any, parameter).sequence_parallel = True
        module.register_parameter(f"{name.rpartition('.')[2]}_{len(list(module.parameters(recurse=False)))}", parameter)
        return Shard(name, parameter, is_cut, axis or 0, start)


def _with_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Layers that are recomputed pass a gradient on only if what enters them asks for one, and nothing before does."""
    del module, args
    return output.requires_grad_() if torch.is_grad_enabled() else output
