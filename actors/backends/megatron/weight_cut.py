"""How one Megatron parameter is cut out of HuggingFace tensors, for any rank of a tensor-parallel group.

A cut names, for rank r of n, the rectangles of HuggingFace tensors that make the rank's part when they are put under
one another. The same list serves both directions: loading reads exactly these rectangles, exporting writes them back.
So what is loaded and exported is equal to the bit, and a new kind of cut is one function.

Knows names and numbers; no torch, no files, no process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...models.model_config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a HuggingFace tensor: rows `[start, stop)`, and columns unless all of them (or none) are meant."""

    name: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class CutRequest:
    """What a cut is asked: for these tensors, the part of rank `rank` of `size`."""

    names: Sequence[str]
    shapes: Mapping[str, Shape]
    """Shapes of all HuggingFace tensors of the model."""
    config: ModelConfig
    rank: int
    size: int


Cut = Callable[[CutRequest], Iterator[Piece]]


def whole(request: CutRequest) -> Iterator[Piece]:
    """Every rank has all of it."""
    (name,) = request.names
    yield Piece(name, (0, request.shapes[name][0]))


def vocabulary(request: CutRequest) -> Iterator[Piece]:
    """Equal runs of rows, of a table padded so that they are equal; padding is in no piece."""
    (name,) = request.names
    rows = request.shapes[name][0]
    each = -(-rows // request.size)
    start = min(request.rank * each, rows)
    yield Piece(name, (start, min(start + each, rows)))


def columns(request: CutRequest) -> Iterator[Piece]:
    """Equal runs of columns: what a matrix is cut into whose results are added up."""
    (name,) = request.names
    rows, width = request.shapes[name]
    each = width // request.size
    yield Piece(name, (0, rows), (request.rank * each, (request.rank + 1) * each))


def gate_and_up(request: CutRequest) -> Iterator[Piece]:
    """The rank's rows of the gate projection, then those of the up projection; from two tensors, or one of both."""
    rows = sum(request.shapes[name][0] for name in request.names) // 2
    each = rows // request.size
    start = request.rank * each
    offset_of_up = rows if len(request.names) == 1 else 0
    yield Piece(request.names[0], (start, start + each))
    yield Piece(request.names[-1], (offset_of_up + start, offset_of_up + start + each))


def heads(request: CutRequest) -> Iterator[Piece]:
    """The rank's groups: of each its query heads, its key head, its value head. Names: q, k, v; weights or biases."""
    config = request.config
    query_rows = config.num_heads // config.num_kv_heads * config.head_dim
    each = config.num_kv_heads // request.size
    for group in range(request.rank * each, (request.rank + 1) * each):
        for name, rows in zip(request.names, (query_rows, config.head_dim, config.head_dim), strict=True):
            yield Piece(name, (group * rows, (group + 1) * rows))
