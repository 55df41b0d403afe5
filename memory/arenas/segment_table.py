"""The table of segments that torch's allocator was given, as Python reads it; the other side is `segment_allocator.c`.

There is one table a process, because torch calls plain functions without state. A slot is one pool of one owner, and
only the slot's owner takes its segments.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from threading import Lock

from ...core.errors import MemoryFault
from .. import native
from .cuda_driver import LIBRARY

SOURCE = Path(__file__).with_name("segment_allocator.c")
COMPILERS = ("cc", "gcc", "clang", "g++", "c++")
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden")
TIMEOUT_S = 120.0
MAX_CHUNK_BYTES = 256 << 20


def built(cache_dir: Path | None = None) -> Path:
    """Path of the compiled allocator. Raises MemoryFault."""
    return native.built(
        SOURCE, COMPILERS, [*FLAGS, "-x", "c", str(SOURCE), "-ldl", "-lpthread"],
        facts=(), cache_dir=cache_dir, timeout_s=TIMEOUT_S,
        remedy="a compiler with the C library's headers is needed (Debian: apt-get install gcc libc6-dev)",
    )  # fmt: skip


class TorchSegment(ctypes.Structure):
    """One range of addresses with memory that torch cuts into tensors."""

    address: int
    num_bytes: int
    num_chunks: int
    device: int
    """Ordinal."""
    slot: int
    is_taken: int
    """An arena has it, and alone gives its memory back."""
    is_freed: int
    """torch does not need it any more."""
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("num_chunks", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("slot", ctypes.c_int32),
        ("is_taken", ctypes.c_int32),
        ("is_freed", ctypes.c_int32),
    )


class AllocatorFailure(ctypes.Structure):
    """The last call of the driver that failed within the allocator; torch only learns "no memory"."""

    num_failures: int
    """So far."""
    num_bytes: int
    num_unknown: int
    """Frees of addresses that the table does not have."""
    result: int
    call: bytes
    _fields_ = (
        ("num_failures", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("num_unknown", ctypes.c_uint64),
        ("result", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("call", ctypes.c_char * 40),
    )


class SegmentTable:
    """Of this process. Every call takes the table's own mutex for a moment; any thread may call."""

    def __init__(
        self, *, library: str = LIBRARY, chunk_bytes: int = MAX_CHUNK_BYTES, cache_dir: Path | None = None
    ) -> None:
        """`chunk_bytes` must be a multiple of the device's granularity, 256 MiB at most."""
        self.path = built(cache_dir)
        self._functions = ctypes.CDLL(str(self.path))
        self._functions.myxa_segments_take.argtypes = (
            ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)  # fmt: skip
        for name in ("myxa_segments_untake", "myxa_segments_forget"):
            getattr(self._functions, name).argtypes = (ctypes.c_uint64,)
        message = ctypes.create_string_buffer(1024)
        opening = self._functions.myxa_segments_open
        opening.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t)
        if opening(library.encode(), chunk_bytes, message, len(message)):
            raise MemoryFault(
                f"the segment allocator cannot use {library}: {message.value.decode(errors='replace')}",
                remedy="one driver library and one chunk size a process; close what was opened before",
            )

    @staticmethod
    def function_names(slot: int) -> tuple[str, str]:
        """Of the two functions that torch is to be given for a pool: allocate, free."""
        return f"myxa_segment_alloc_{slot}", f"myxa_segment_free_{slot}"

    def segments(self) -> tuple[TorchSegment, ...]:
        """All there are now."""
        capacity = 256
        while True:
            views = (TorchSegment * capacity)()
            number = int(self._functions.myxa_segments_list(views, capacity))
            if number <= capacity:
                return tuple(views[:number])
            capacity = 2 * number

    def take(self, address: int, num_chunks: int) -> tuple[tuple[int, int], ...] | None:
        """From now on the caller gives its memory back: (handle, bytes) of every chunk. None: it is gone meanwhile."""
        handles, sizes = (ctypes.c_uint64 * num_chunks)(), (ctypes.c_uint64 * num_chunks)()
        number = int(self._functions.myxa_segments_take(address, handles, sizes, num_chunks))
        return None if number < 0 else tuple(zip(handles[:number], sizes[:number], strict=True))

    def untake(self, address: int) -> None:
        """It is the allocator's again, as it was: the caller has given nothing of it back."""
        if self._functions.myxa_segments_untake(address) < 0:
            raise MemoryFault(f"the segment at {address:#x} was not taken", remedy="return what `take` gave, once")

    def forget(self, address: int) -> None:
        """The caller has given all memory and the addresses of a taken segment back."""
        if self._functions.myxa_segments_forget(address):
            raise MemoryFault(f"the segment at {address:#x} was not taken", remedy="forget what `take` gave, once")

    def reap(self) -> int:
        """Free what torch freed while the device could not be waited for; 0, or what the driver answers still."""
        return int(self._functions.myxa_segments_reap())

    def last_failure(self) -> AllocatorFailure:
        """Compare `num_failures` with an earlier one to know whether it is new."""
        failure = AllocatorFailure()
        self._functions.myxa_segments_failure(ctypes.byref(failure))
        return failure

    def close(self) -> int:
        """Release the devices' contexts unless segments are left; returns how many are."""
        return int(self._functions.myxa_segments_close())


class SlotRegister:
    """Numbers in the names of functions that torch calls; one of a pool with segments is not given again."""

    numbers = tuple(10 * tens + ones for tens in range(1, 7) for ones in range(8))

    def __init__(self) -> None:
        self._lock = Lock()
        self._taken: set[int] = set()

    def take(self, table: SegmentTable) -> int:
        """A slot for a new pool."""
        with self._lock:
            busy = self._taken | {segment.slot for segment in table.segments()}
            slot = next((slot for slot in self.numbers if slot not in busy), None)
            if slot is None:
                raise MemoryFault(f"all {len(self.numbers)} pools of this process are in use", remedy="close arenas")
            self._taken.add(slot)
            return slot

    def give(self, slot: int) -> None:
        """Its pool is gone."""
        with self._lock:
            self._taken.discard(slot)


SLOTS = SlotRegister()
"""Of this process, as the table is."""
