"""What an SGLang server on the same GPU is handed to read a bucket where it lies: CUDA IPC handles, no weights.

The other side is `/update_weights_from_tensor` with load_format "flattened_bucket" (0.5.17): an object stream of

    {"flattened_tensor": tensor by handle, "metadata": [FlattenedTensorMetadata(name, shape, dtype, start, end, numel)]}

The tensor is what torch's own reduction makes of one (`torch.multiprocessing.reductions.reduce_tensor`): a call of
`rebuild_cuda_tensor` with the handle of its allocation. The device goes as its UUID, which SGLang maps to its own
number. Every payload counts as one more reader of the memory until the server has let go; a staging buffer is not
overwritten before its version is released, which is later than that.
"""

from __future__ import annotations

import base64
from typing import Any, cast

import torch
from torch import Tensor

from ...core.errors import TrainError
from ...core.weight_channel import Bucket
from .object_stream import Made, Name, Written, write_object, write_part

_METADATA = Name("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
_REBUILD = Name("torch.multiprocessing.reductions", "rebuild_cuda_tensor")


def bucket_metadata(bucket: Bucket) -> Written:
    """The bucket's tensors as SGLang names them; the same for every version, so made once."""
    tensors = [
        Made(
            _METADATA,
            (
                spec.name,
                spec.shape,
                Name("torch", spec.dtype),
                spec.offset,
                spec.offset + spec.num_bytes,
                spec.num_bytes,
            ),
        )
        for spec in bucket.tensors
    ]
    return write_part(tensors)


def bucket_payload(flat: Tensor, metadata: Written) -> str:
    """Base64 of the stream for one reader of a flat uint8 buffer. Raises TrainError where memory cannot be shared."""
    return payload_of(shared_tensor(flat), metadata)


def payload_of(tensor: object, metadata: Written) -> str:
    """Base64 of the stream."""
    return base64.b64encode(write_object({"flattened_tensor": tensor, "metadata": metadata})).decode("ascii")


def shared_tensor(flat: Tensor) -> Made:
    """A 1-dim CUDA tensor by handle, for exactly one reader."""
    if flat.device.type != "cuda":
        raise TrainError(
            f'channel "cuda_ipc" shares GPU memory, but the weights are on {flat.device}',
            remedy='set weights.channel = "shm" (embedded engine) or "nccl" (any server)',
        )
    storage = cast(Any, flat.untyped_storage())
    try:
        shared = storage._share_cuda_()
    except RuntimeError as err:
        raise TrainError(
            f"the GPU's memory cannot be shared: {err}",
            remedy="do not allocate weights in expandable segments or a memory saver's region; see weights.channel",
        ) from err
    device, handle, size, offset, counter, counter_offset, event, needs_event = shared
    uuid = str(cast(Any, torch.cuda).get_device_properties(device).uuid)
    return Made(
        _REBUILD,
        (
            Name("torch", "Tensor"),
            tuple(flat.shape),
            tuple(flat.stride()),
            int(flat.storage_offset()),
            Name("torch.storage", "TypedStorage"),
            Name("torch", "uint8"),
            uuid,
            bytes(handle),
            int(size),
            int(offset),
            False,
            bytes(counter),
            int(counter_offset),
            bytes(event),
            bool(needs_event),
        ),
    )
