"""CUDA IPC handles of weight buckets for an SGLang server on the same GPU, or on another one of the host.

The server takes them by `/update_weights_from_tensor` with load_format "flattened_bucket" (0.5.17), as an object stream
(Python protocol 3) of

    {"flattened_tensor": tensor by handle, "metadata": [FlattenedTensorMetadata(name, shape, dtype, start, end, numel)]}

or, with load_format "direct", of a list of (parameter, tensor by handle): each is copied whole.

The tensor is what `torch.multiprocessing.reductions.reduce_tensor` makes of one: a call of `rebuild_cuda_tensor` with
the handle of its allocation. The device goes as its UUID, which SGLang maps to its own number. Every payload counts as
one more reader of the memory until the server drops it; a staging buffer is not overwritten before its version is
released, which is later.

Reading an object stream runs code of its writer, so this package never reads one and does not import the library that
can. The writer below knows only what a bucket needs: None, bool, int, str, bytes, tuples, lists, dicts, names, and
calls of named things. Its bytes go to the server of the run, over the same connection as every other order. Opcodes:
the documentation of `pickletools` in the standard library.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from ....core.errors import TrainError, raised_as
from ....core.weight_channel import Bucket
from .staging import place


@dataclass(frozen=True, slots=True)
class Name:
    """Something the reader has: `module.attribute`."""

    module: str
    attribute: str


@dataclass(frozen=True, slots=True)
class Made:
    """What a named thing returns for these arguments."""

    by: Name
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A value that was written before, which many streams will hold."""

    stream: bytes


def write_object(value: object) -> bytes:
    """The stream of one value. Raises TypeError for a kind it does not know."""
    return b"\x80\x03" + _write(value) + b"."


def _write(value: object) -> bytes:
    writer = _WRITERS.get(type(value))
    if writer is None:
        raise TypeError(f"cannot write a {type(value).__name__}")
    return writer(value)


def _all(values: Iterable[object]) -> bytes:
    return b"".join(map(_write, values))


def _sized(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw


def _int(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


_WRITERS: Mapping[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _int,
    str: lambda value: b"X" + _sized(value.encode()),
    bytes: lambda value: b"B" + _sized(value),
    tuple: lambda value: b"(" + _all(value) + b"t",
    list: lambda value: b"](" + _all(value) + b"e",
    dict: lambda value: b"}(" + _all(chain.from_iterable(value.items())) + b"u",
    Name: lambda value: f"c{value.module}\n{value.attribute}\n".encode("ascii"),
    Made: lambda value: _write(value.by) + _write(value.arguments) + b"R",
    WrittenPart: lambda value: value.stream,
}


_METADATA = Name("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
_REBUILD = Name("torch.multiprocessing.reductions", "rebuild_cuda_tensor")


def bucket_metadata(bucket: Bucket) -> WrittenPart:
    """The bucket's tensors as SGLang names them; the same for every version, so made once."""
    tensors: list[Made] = []
    for spec in bucket.tensors:
        end = spec.offset + spec.num_bytes
        arguments = (spec.name, spec.shape, Name("torch", spec.dtype), spec.offset, end, spec.num_bytes)
        tensors.append(Made(_METADATA, arguments))
    return WrittenPart(_write(tensors))


def bucket_payload(flat: Tensor, metadata: WrittenPart) -> str:
    """Base64 of the stream for one reader of a flat uint8 buffer. Raises TrainError where memory cannot be shared."""
    return payload_of(shared_tensor(flat), metadata)


def parameters_payload(flat: Tensor, bucket: Bucket) -> str:
    """The same of the bucket's parameters."""
    return _base64_of([(spec.name, shared_tensor(place(flat, spec))) for spec in bucket.parameters])


def payload_of(tensor: object, metadata: WrittenPart) -> str:
    return _base64_of({"flattened_tensor": tensor, "metadata": metadata})


def _base64_of(value: object) -> str:
    return base64.b64encode(write_object(value)).decode("ascii")


def shared_tensor(flat: Tensor) -> Made:
    """A CUDA tensor by handle, for exactly one reader."""
    if flat.device.type != "cuda":
        raise TrainError(
            f'channel "cuda_ipc" shares GPU memory, but the weights are on {flat.device}',
            remedy='set weights.channel = "shm" (embedded engine) or "nccl" (any server)',
        )
    storage = cast(Any, flat.untyped_storage())
    remedy = "do not allocate weights in expandable segments or a memory saver's region; see weights.channel"
    with raised_as(TrainError, "the GPU's memory cannot be shared", RuntimeError, remedy=remedy):
        shared = storage._share_cuda_()
    device, handle, size, offset, counter, counter_offset, event, needs_event = shared
    uuid = str(cast(Any, torch.cuda).get_device_properties(device).uuid)
    dtype = Name("torch", str(flat.dtype).removeprefix("torch."))
    arguments = (
        Name("torch", "Tensor"), tuple(flat.shape), tuple(flat.stride()), int(flat.storage_offset()),
        Name("torch.storage", "TypedStorage"), dtype, uuid, bytes(handle), int(size), int(offset),
        False, bytes(counter), int(counter_offset), bytes(event), bool(needs_event),
    )  # fmt: skip
    return Made(_REBUILD, arguments)
