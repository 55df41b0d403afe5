"""torch tensors on addresses of an arena. They own nothing: the arena frees, and a tensor outlives its tag's leaves.

By DLPack, which torch documents and which takes any address of any device; `torch.frombuffer` would tie the tensor to a
Python object and knows no GPU, and torch's own constructor from a data pointer is private. The record that DLPack
wants is one block of malloc whose deleter is free, so nothing of Python has to outlive anything.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod

import torch
from torch.utils.dlpack import from_dlpack

from ...core.device_memory import Tag
from .arena import Arena

ALIGNMENT_BYTES = 512
"""Of tensors that share a region; what torch's own allocator gives."""
_CPU, _CUDA = 1, 2  # DLDeviceType
_UINT = 1  # DLDataTypeCode


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("length", ctypes.c_int64),  # ours, behind DLPack's own: the one number of the shape
    )


_libc = ctypes.CDLL(None)
_libc.calloc.restype = ctypes.c_void_p
_libc.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
_libc.free.argtypes = (ctypes.c_void_p,)
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_CAPSULE_NAME = b"dltensor"  # kept alive here: the capsule points at it


def tensor_at(
    address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """A contiguous tensor of `shape` over the bytes at `address`, which must be mapped now. Used while its tag is away
    it is a fault of the process (or of the GPU's context); after the region is freed it may be anybody's memory."""
    place = torch.device(device)
    num_bytes = prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(tuple(shape), dtype=dtype, device=place)
    return _bytes_at(address, num_bytes, place).view(dtype).view(tuple(shape))


def empty_tensors(
    arena: Arena, tag: Tag, specs: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device | str | None = None
) -> list[torch.Tensor]:
    """Tensors side by side in one region; contents are whatever is there. `arena.free` of the first one's address ends
    them all. `device` None: the current GPU, or the CPU for an arena on the host's memory."""
    place = _device_of(arena) if device is None else torch.device(device)
    offsets: list[int] = []
    end = 0
    for shape, dtype in specs:
        offsets.append(end)
        end += -(-prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if not end:
        return [torch.empty(tuple(shape), dtype=dtype, device=place) for shape, dtype in specs]
    base = arena.empty(tag, end)
    return [
        tensor_at(base + offset, shape, dtype, place) for offset, (shape, dtype) in zip(offsets, specs, strict=True)
    ]


def _device_of(arena: Arena) -> torch.device:
    if arena.device.startswith("host:"):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _bytes_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    block = _libc.calloc(1, ctypes.sizeof(_DLManagedTensor))
    if not block:
        raise MemoryError
    record = _DLManagedTensor.from_address(block)
    record.length = num_bytes
    record.deleter = _FREE
    tensor = record.tensor
    tensor.data = address
    is_current = device.type == "cuda" and ":" not in str(device)  # the index is None then, whatever torch's types say
    tensor.device_type = _CPU if device.type == "cpu" else _CUDA
    tensor.device_id = torch.cuda.current_device() if is_current else device.index or 0
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = 1, _UINT, 8, 1
    tensor.shape = block + _DLManagedTensor.length.offset
    return from_dlpack(_new_capsule(block, _CAPSULE_NAME, None))
