"""Bodies of SGLang's weight routes (0.5.17), made once per plan: only the version is filled in per update. Pure.

`/update_weights_from_distributed` and `/update_weights_from_tensor` are always told not to flush the cache: SGLang
asserts that it could, which it cannot while requests stand still in place; `sglang_wire.request_body` keeps versions
apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from ...core.errors import EngineError
from ...core.messages import TensorSpec
from ...core.weight_channel import Bucket

FLATTENED = "flattened_bucket"
_SAMPLED = ("layernorm.weight", "model.norm.weight")
"""Tensors that every server holds whole and as they were sent, whatever it shards and fuses."""


@dataclass(frozen=True, slots=True)
class BucketBody:
    """One bucket's request without channel and version; the long lists are JSON already."""

    names: orjson.Fragment
    dtypes: orjson.Fragment
    shapes: orjson.Fragment
    num_bytes: int

    def distributed(self, channel: str, version: str | None) -> dict[str, Any]:
        """`/update_weights_from_distributed`; a version only with the last bucket, when all is there."""
        body = {
            "names": self.names,
            "dtypes": self.dtypes,
            "shapes": self.shapes,
            "group_name": channel,
            "load_format": FLATTENED,
            "flush_cache": False,
        }
        return body if version is None else body | {"weight_version": version}


def bucket_bodies(buckets: Sequence[Bucket]) -> tuple[BucketBody, ...]:
    """The buckets of a plan."""
    return tuple(
        BucketBody(
            names=_json([t.name for t in bucket.tensors]),
            dtypes=_json([t.dtype for t in bucket.tensors]),
            shapes=_json([list(t.shape) for t in bucket.tensors]),
            num_bytes=bucket.num_bytes,
        )
        for bucket in buckets
    )


def _json(value: object) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps(value))


def tensor_body(payloads: Sequence[str], version: str | None) -> dict[str, Any]:
    """`/update_weights_from_tensor`: one payload per rank of the server."""
    body: dict[str, Any] = {
        "serialized_named_tensors": list(payloads),
        "load_format": FLATTENED,
        "flush_cache": False,
    }
    return body if version is None else body | {"weight_version": version}


def sampled_names(buckets: Sequence[Bucket], version: int, count: int) -> tuple[str, ...]:
    """Tensors to look at after `version`: another few each time, so that all had their turn after a while."""
    names = [t.name for bucket in buckets for t in bucket.tensors if _can_be_sampled(t)]
    start = version * count % len(names) if names else 0
    return tuple((names[start:] + names[:start])[:count])


def _can_be_sampled(spec: TensorSpec) -> bool:
    return len(spec.shape) == 1 and spec.name.endswith(_SAMPLED)


def check_sample(place: str, name: str, sent: Sequence[float], served: object) -> None:
    """Compare what was sent with what `/get_weights_by_name` says. Raises EngineError when they are not equal.

    The server may compute in another type than it was sent: equality is to 2**-7 of the value, bfloat16's grain.
    """
    values = cast("list[object]", served) if isinstance(served, list) else []
    if len(values) != len(sent) or not all(map(_is_close, values, sent)):
        raise EngineError(
            f"{place}: {name} begins with {values[:4]}, but {list(sent[:4])} was sent",
            remedy="the server's weights are not the version it announces; it must be restarted",
        )


def _is_close(served: object, sent: float) -> bool:
    return isinstance(served, (int, float)) and abs(served - sent) <= 2**-7 * abs(sent) + 1e-30
