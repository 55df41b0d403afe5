"""How the tensors of a model are cut into flat buckets: pure, deterministic, computed once per model.

Knows names, dtypes and shapes; no tensor, no torch. Rules:

* tensors of one block (`model.layers.3.self_attn.*`) share a bucket: engines fuse some of them (q, k, v; the two
  low-rank inputs of MLA) and look for the partner in the same request;
* within a bucket wider dtypes come first, so that every tensor starts at a multiple of its item size, as reading a flat
  buffer under another dtype demands; otherwise the order is the one in which the trainer hands them over;
* a bucket is full before the block that would exceed `bucket_bytes`; a block larger than that has its own bucket.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ....core.errors import TrainError
from ....core.messages import TensorSpec
from ....core.weight_channel import Bucket

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "int64": 8,
        "float32": 4,
        "int32": 4,
        "float16": 2,
        "bfloat16": 2,
        "int16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)
"""Bytes per number, by torch's name of the dtype."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One tensor before it has a place."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Raises TrainError for a dtype that cannot travel."""
        item = ITEM_BYTES.get(self.dtype)
        if item is None:
            raise TrainError(
                f"weight {self.name} has dtype {self.dtype}, which no engine takes",
                remedy=f"export one of {', '.join(ITEM_BYTES)}",
            )
        return item * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The cut of one sender's tensors."""

    buckets: tuple[Bucket, ...]
    fingerprint: str
    """Equal exactly when two plans place the same tensors at the same bytes."""

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)


def make_plan(tensors: Sequence[Shape], bucket_bytes: int) -> WeightPlan:
    """Cut. Raises TrainError for a name that comes twice, an empty tensor or an unknown dtype."""
    names = [t.name for t in tensors]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise TrainError(f"weights come twice: {', '.join(twice[:5])}", remedy="this is a bug in the exporting backend")
    empty = [t.name for t in tensors if not t.num_bytes]
    if empty:
        raise TrainError(f"weight {empty[0]} is empty", remedy="engines refuse empty tensors; do not export it")
    buckets: list[list[Shape]] = []
    size = 0
    for block in _blocks(tensors):
        num_bytes = sum(t.num_bytes for t in block)
        if not buckets or size + num_bytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].extend(block)
        size += num_bytes
    placed = tuple(_place(bucket) for bucket in buckets)
    return WeightPlan(buckets=placed, fingerprint=_fingerprint(placed))


def _blocks(tensors: Sequence[Shape]) -> Iterator[list[Shape]]:
    """Neighbours with the same grandparent: `a.b.q_proj.weight` and `a.b.k_proj.bias` are both of `a.b`."""
    block: list[Shape] = []
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


def _place(tensors: Sequence[Shape]) -> Bucket:
    specs: list[TensorSpec] = []
    offset = 0
    for tensor in sorted(tensors, key=lambda t: -ITEM_BYTES[t.dtype]):
        num_bytes = tensor.num_bytes
        specs.append(
            TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, offset=offset, num_bytes=num_bytes)
        )
        offset += num_bytes
    return Bucket(tensors=tuple(specs), num_bytes=offset)


def _fingerprint(buckets: Sequence[Bucket]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for number, bucket in enumerate(buckets):
        for spec in bucket.tensors:
            digest.update(f"{number} {spec.name} {spec.dtype} {spec.shape} {spec.offset}\n".encode())
    return digest.hexdigest()
