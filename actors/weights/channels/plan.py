"""How the tensors of a model are cut into flat buckets: pure, deterministic, computed once per model.

Knows names, dtypes and shapes; no tensor, no torch. Rules:

* tensors of one block (`model.layers.3.self_attn.*`) share a bucket: engines fuse some of them (q, k, v; the two
  low-rank inputs of MLA) and look for the partner in the same request;
* within a bucket wider dtypes come first, so that every tensor starts at a multiple of its item size, as reading a flat
  buffer under another dtype demands; otherwise the order is the one in which the trainer hands them over;
* where parameters are joined, the tensors that make one parameter of the engine lie one behind the other in its order:
  q, k, v; gate, up; of all experts gate, up, gate, up, ..., then all down. The parameter is then a view of the bucket,
  and the engine copies it at once. SGLang's own loader takes the tensors one by one: 1.1 s for the 18,000 of a model
  with 128 experts in 48 layers, for which the bytes alone need 0.2 s;
* a bucket is full before the block that would exceed `bucket_bytes`; a block larger than that has its own bucket.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from ....core.errors import TrainError
from ....core.messages import TensorSpec
from ....core.weight_channel import Bucket
from ...models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The cut of one sender's tensors."""

    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)


def make_plan(tensors: Sequence[TensorSpec], bucket_bytes: int, *, joins: bool = False) -> WeightPlan:
    """Cut; offsets are set. `joins`: also into the parameters that SGLang holds, see above. Raises TrainError for a
    name that comes twice, or an empty tensor."""
    names = [t.name for t in tensors]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise TrainError(f"weights come twice: {', '.join(twice[:5])}", remedy="this is a bug in the exporting backend")
    empty = [t.name for t in tensors if not t.num_bytes]
    if empty:
        raise TrainError(f"weight {empty[0]} is empty", remedy="engines refuse empty tensors; do not export it")
    buckets: list[list[TensorSpec]] = []
    size = 0
    for block in _blocks(tensors, joins=joins):
        num_bytes = sum(t.num_bytes for t in block)
        if not buckets or size + num_bytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].extend(block)
        size += num_bytes
    plan = WeightPlan(buckets=tuple(_place(bucket, joins=joins) for bucket in buckets))
    parameters = [parameter.name for bucket in plan.buckets for parameter in bucket.parameters]
    if len(set(parameters)) < len(parameters):
        torn = next(name for name in parameters if parameters.count(name) > 1)
        raise TrainError(
            f"the tensors of {torn} do not come together, or are of several number types",
            remedy="this is a bug in the exporting backend",
        )
    return plan


def _blocks(tensors: Sequence[TensorSpec], *, joins: bool) -> Iterator[list[TensorSpec]]:
    """Neighbours with the same grandparent: `a.b.q_proj.weight` and `a.b.k_proj.bias` are both of `a.b`. Where
    parameters are joined, the experts of a layer are of its MLP."""

    def grandparent(tensor: TensorSpec) -> str:
        return (parameter_of(tensor.name)[0] if joins else tensor.name).rsplit(".", 2)[0]

    for _, block in groupby(tensors, key=grandparent):
        yield list(block)


def _place(tensors: Sequence[TensorSpec], *, joins: bool) -> Bucket:
    parameters = dict.fromkeys(parameter_of(tensor.name)[0] for tensor in tensors) if joins else {}
    order = {name: number for number, name in enumerate(parameters)}

    def key(tensor: TensorSpec) -> tuple[int, ...]:
        wider_first = -(tensor.num_bytes // math.prod(tensor.shape))
        if not joins:
            return (wider_first,)
        parameter, place = parameter_of(tensor.name)
        return (wider_first, order[parameter], *place)

    specs: list[TensorSpec] = []
    offset = 0
    for tensor in sorted(tensors, key=key):
        specs.append(msgspec.structs.replace(tensor, offset=offset))
        offset += tensor.num_bytes
    return Bucket(tensors=tuple(specs), num_bytes=offset, parameters=tuple(_joined(specs)) if joins else ())


JOINED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
VOCABULARY_STEP = 64


def joins_parameters(config: ModelConfig) -> bool:
    """Whether SGLang (0.5.17) names and lays out this model's parameters as `parameter_of` says; it pads a vocabulary
    that is no multiple of its step."""
    return config.model_type in JOINED_FAMILIES and config.vocab_size % VOCABULARY_STEP == 0


_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight(|_scale|_scale_inv)")
_FUSED = re.compile(r"(.+)\.(q|k|v|gate|up)_proj\.(weight|weight_scale|weight_scale_inv|bias)")


def parameter_of(name: str) -> tuple[str, tuple[int, int]]:
    """The parameter of SGLang that holds a HuggingFace tensor, and the tensor's place in it. Scales of FP8 in blocks
    are joined as their weights are: SGLang refuses weights whose parts end within a block."""
    if match := _EXPERT.fullmatch(name):
        stem, expert, kind, suffix = match.groups()
        return f"{stem}.{'w2' if kind == 'down' else 'w13'}_weight{suffix}", (int(expert), int(kind == "up"))
    if match := _FUSED.fullmatch(name):
        stem, kind, suffix = match.groups()
        return f"{stem}.{'qkv' if kind in 'qkv' else 'gate_up'}_proj.{suffix}", ("qkv".find(kind), int(kind == "up"))
    return name, (0, 0)


def _joined(specs: Sequence[TensorSpec]) -> Iterator[TensorSpec]:
    for name, group in groupby(specs, key=lambda spec: parameter_of(spec.name)[0]):
        parts = list(group)
        first, num_bytes = parts[0], sum(part.num_bytes for part in parts)
        shape = (sum(part.shape[0] for part in parts), *first.shape[1:]) if len(parts) > 1 else first.shape
        experts = {parameter_of(part.name)[1][0] for part in parts} if _EXPERT.fullmatch(first.name) else ()
        if experts:
            shape = (len(experts), shape[0] // len(experts), *shape[1:])
        yield TensorSpec(name=name, dtype=first.dtype, shape=shape, offset=first.offset, num_bytes=num_bytes)
