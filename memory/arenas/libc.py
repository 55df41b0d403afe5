"""The C library's calls on memory that Python does not offer at fixed addresses. Linux only.

Python's `mmap` chooses addresses itself and hands out objects; here addresses are what is needed. Calls made through
ctypes release the interpreter lock, so a copy in a thread runs beside Python.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from ...core.errors import MemoryFault

PAGE_BYTES = mmap.PAGESIZE
PROT_NONE = 0
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_fallocate = _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_memcpy = _libc.memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p
_memset = _libc.memset
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memset.restype = ctypes.c_void_p
_memcmp = _libc.memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE asks for FALLOC_FL_KEEP_SIZE
_RESERVATION = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE


def _checked(result: int | None, call: str, num_bytes: int, address: int) -> int:
    if result is None or result == _FAILED:
        why = os.strerror(ctypes.get_errno())
        raise MemoryFault(
            f"{call} of {num_bytes:,} bytes at {address:#x}: {why}",
            remedy="see the limits of this process (ulimit -v, memory control group, vm.max_map_count)",
        )
    return result


def reserve(num_bytes: int) -> int:
    """Addresses without memory; touching them is a fault."""
    return _checked(_mmap(None, num_bytes, PROT_NONE, _RESERVATION, -1, 0), "mmap", num_bytes, 0)


def reserve_again(address: int, num_bytes: int) -> None:
    """In one step: whatever was mapped there is gone, the addresses stay taken."""
    _checked(_mmap(address, num_bytes, PROT_NONE, _RESERVATION | MAP_FIXED, -1, 0), "mmap", num_bytes, address)


def map_file(address: int, num_bytes: int, fd: int, offset: int) -> None:
    """Shared, readable, writable, every page present at once, over whatever is there."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | MAP_FIXED
    _checked(_mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset), "mmap", num_bytes, address)


def map_anonymous(num_bytes: int) -> int:
    """Private zeros, given a page when it is touched."""
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    return _checked(_mmap(None, num_bytes, prot, _RESERVATION, -1, 0), "mmap", num_bytes, 0)


def unmap(address: int, num_bytes: int) -> None:
    """Addresses and all."""
    _checked(_FAILED if _munmap(address, num_bytes) else 0, "munmap", num_bytes, address)


def drop_pages(address: int, num_bytes: int) -> None:
    """Private pages go back to the system; reading them gives zeros."""
    _checked(_FAILED if _madvise(address, num_bytes, mmap.MADV_DONTNEED) else 0, "madvise", num_bytes, address)


def fill_file(fd: int, offset: int, num_bytes: int) -> bool:
    """Give a range of a file its pages, zeroed; False: there is not enough memory."""
    return not _fallocate(fd, 0, offset, num_bytes)


def empty_file(fd: int, offset: int, num_bytes: int) -> None:
    """Take the pages of a range away again."""
    _checked(_FAILED if _fallocate(fd, _PUNCH_HOLE, offset, num_bytes) else 0, "fallocate", num_bytes, offset)


def copy(target: int, source: int, num_bytes: int) -> None:
    """Both ranges must be mapped; this is not checked."""
    _memcpy(target, source, num_bytes)


def zero(address: int, num_bytes: int) -> None:
    """The range must be mapped."""
    _memset(address, 0, num_bytes)


def is_equal(left: int, right: int, num_bytes: int) -> bool:
    """Byte by byte."""
    return not _memcmp(left, right, num_bytes)


def view(address: int, num_bytes: int) -> memoryview:
    """The bytes themselves, without an owner."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
