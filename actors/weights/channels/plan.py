"""How the tensors of a model are cut into flat buckets: pure, deterministic, computed once per model.

Knows names, dtypes and shapes; no tensor, no torch. Rules:

* tensors of one block (`model.layers.3.self_attn.*`) share a bucket: engines fuse some of them (q, k, v; the two
  low-rank inputs of MLA) and look for the partner in the same request;
* within a bucket wider dtypes come first, so that every tensor starts at a multiple of its item size, as reading a flat
  buffer under another dtype demands; otherwise the order is the one in which the trainer hands them over;
* a bucket is full before the block that would exceed `bucket_bytes`; a block larger than that has its own bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ....core.errors import TrainError
from ....core.messages import TensorSpec
from ....core.weight_channel import Bucket


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The cut of one sender's tensors."""

    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)


def make_plan(tensors: Sequence[TensorSpec], bucket_bytes: int) -> WeightPlan:
    """Cut; offsets are set. Raises TrainError for a name that comes twice, or an empty tensor."""
    names = [t.name for t in tensors]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise TrainError(f"weights come twice: {', '.join(twice[:5])}", remedy="this is a bug in the exporting backend")
    empty = [t.name for t in tensors if not t.num_bytes]
    if empty:
        raise TrainError(f"weight {empty[0]} is empty", remedy="engines refuse empty tensors; do not export it")
    buckets: list[list[TensorSpec]] = []
    size = 0
    for block in _blocks(tensors):
        num_bytes = sum(t.num_bytes for t in block)
        if not buckets or size + num_bytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].extend(block)
        size += num_bytes
    return WeightPlan(buckets=tuple(_place(bucket) for bucket in buckets))


def _blocks(tensors: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Neighbours with the same grandparent: `a.b.q_proj.weight` and `a.b.k_proj.bias` are both of `a.b`."""
    block: list[TensorSpec] = []
    key = ""
    for tensor in tensors:
        path = tensor.name.split(".")
        own = ".".join(path[:-2])
        if block and own != key:
            yield block
            block = []
        key = own
        block.append(tensor)
    if block:
        yield block


def _place(tensors: Sequence[TensorSpec]) -> Bucket:
    specs: list[TensorSpec] = []
    offset = 0
    for tensor in sorted(tensors, key=lambda t: -(t.num_bytes // math.prod(t.shape))):
        specs.append(msgspec.structs.replace(tensor, offset=offset))
        offset += tensor.num_bytes
    return Bucket(tensors=tuple(specs), num_bytes=offset)
