"""Slabs: shared memory that one process writes and others of the same host read.

The owner makes an anonymous memory file, so nothing is ever left in /dev/shm and the kernel frees it with its last
holder. Readers open it once, through `/proc/<pid>/fd/<n>`, and keep it mapped. Passing the descriptor over a Unix
socket (SCM_RIGHTS) was considered: it needs a second listener, a handshake of its own and blocking code in every
process, ZeroMQ cannot carry it, and it works where this does: same user, same host. This needs no ptrace permission.

    page 0: magic, slab id, capacity, then one generation word per block | blocks, on page boundaries

A generation word is 0 while its block is free or being written. A reader looks at it before and after.

`region` gives memory to numpy and calls back when the last array of it is gone: an array keeps its memory's exporter
alive, and so does every view of it. Python 3.11 has no `__buffer__`, hence a ctypes array over the address.
`numpy.ndarray` subclasses with a finaliser were considered: numpy shortens chains of bases, and a plain view outlives
the subclass instance.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...core.errors import SlabError
from ..shm import F_SEAL_FUTURE_WRITE, available_bytes, open_to_read, path_of
from .kernel import populate
from .ledger import NUM_SLOTS

DATA_OFFSET = 4096
_MAGIC = b"myxapool"
_HEADER = struct.Struct("<8sQQ")
_FIRST_WORD = 8
_NAME = "myxa-pool"
_F_GET_SEALS = 1034
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Slab:
    """The owner's end."""

    def __init__(self, slab_id: int, num_bytes: int) -> None:
        """Takes the memory at once: call it where blocking is allowed. Raises SlabError if there is not that much."""
        self._fd = -1
        self.slab_id = slab_id
        self.num_bytes = num_bytes
        free = available_bytes()
        if num_bytes > free:
            raise SlabError(f"no shared memory of {num_bytes} bytes: {free} are available")
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            mapping = self._mapped(DATA_OFFSET + num_bytes)
        except (OSError, ValueError) as error:
            self.close()
            raise SlabError(f"no shared memory of {num_bytes} bytes: {error}") from error
        _HEADER.pack_into(mapping, 0, _MAGIC, slab_id, num_bytes)
        self._all = np.frombuffer(mapping, dtype=np.uint8)
        self._words = np.frombuffer(mapping, dtype=np.uint64, count=DATA_OFFSET // 8)[_FIRST_WORD:]
        self.base = address_of(self._all) + DATA_OFFSET
        """Address of the first block."""

    def _mapped(self, size: int) -> mmap.mmap:
        os.ftruncate(self._fd, size)
        mapping = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED)
        if not populate(address_of(np.frombuffer(mapping, dtype=np.uint8)), size, for_writing=True):
            os.posix_fallocate(self._fd, 0, size)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS | F_SEAL_FUTURE_WRITE)
        return mapping

    @property
    def path(self) -> str:
        """Opens it in another process while this one lives."""
        return path_of(self._fd)

    @property
    def memory(self) -> Bytes:
        """All of its blocks. The memory stays while an array over it does."""
        return self._all[DATA_OFFSET:]

    def publish(self, slot: int, generation: int) -> None:
        """What the block of that slot holds is whole; 0: it is not (any more)."""
        self._words[slot] = generation

    def close(self) -> None:
        """Let go of the file; readers and arrays that use it keep its memory until they are done."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Whoever had it made may have been cancelled before it was there."""
        self.close()


class SlabMapping:
    """A reader's end."""

    def __init__(self, memory: Bytes) -> None:
        self._all = memory
        self._words = memory[:DATA_OFFSET].view(np.uint64)[_FIRST_WORD:]
        self.base = address_of(memory) + DATA_OFFSET

    @classmethod
    def open(cls, path: str, slab_id: int) -> SlabMapping:
        """Map a slab: call it where blocking is allowed. Raises SlabError if it is gone or not the one meant."""
        descriptor = open_to_read(path, _NAME)
        try:
            memory = _map_to_read(descriptor, path)
        finally:
            os.close(descriptor)
        magic, found, capacity = _HEADER.unpack_from(memory.data)
        if magic != _MAGIC or found != slab_id or capacity + DATA_OFFSET != memory.nbytes:
            raise SlabError(f"{path} is not slab {slab_id:x}")
        return cls(memory)

    @property
    def num_bytes(self) -> int:
        return self._all.nbytes - DATA_OFFSET

    def generation(self, slot: int) -> int:
        """Of the block of that slot now; 0: free, or being written."""
        return int(self._words[slot]) if 0 <= slot < NUM_SLOTS else 0

    def memory(self, offset: int, num_bytes: int) -> Bytes:
        """Bytes of a block, read-only. Raises SlabError out of bounds."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise SlabError(f"{num_bytes} bytes at {offset} lie outside a slab of {self.num_bytes}")
        return self._all[DATA_OFFSET + offset : DATA_OFFSET + offset + num_bytes]


def _map_to_read(descriptor: int, path: str) -> Bytes:
    size = os.fstat(descriptor).st_size
    seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    if seals & _SEALS != _SEALS or size <= DATA_OFFSET:
        # Without the seals its owner could cut it short under us, and touching it would kill this process.
        raise SlabError(f"{path} is not sealed, or too short for a slab")
    mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    populate(address_of(memory), size, for_writing=False)
    return memory


Bytes = npt.NDArray[np.uint8]

_ends: dict[int, weakref.ref[ctypes.Array[ctypes.c_ubyte]]] = {}
"""By the exporter's identity. Not `weakref.finalize`: it registers an exit function, and we may be guests."""


def region(address: int, num_bytes: int, when_gone: Callable[[], None]) -> Bytes:
    """Writable bytes at that address. `when_gone` is called, in whatever thread, once no view of them is left.

    `when_gone` must itself hold what keeps the address valid.
    """
    exporter = (ctypes.c_ubyte * num_bytes).from_address(address)
    key = id(exporter)

    def gone(_: object) -> None:
        del _ends[key]
        when_gone()

    _ends[key] = weakref.ref(exporter, gone)
    return np.frombuffer(memoryview(exporter), dtype=np.uint8)


def read_only(memory: Bytes) -> Bytes:
    """The same bytes; no view of them can be made writable."""
    return np.frombuffer(memory.data.toreadonly(), dtype=np.uint8)


def address_of(memory: npt.NDArray[np.uint8]) -> int:
    """Where an array's first byte lies."""
    return int(memory.__array_interface__["data"][0])
