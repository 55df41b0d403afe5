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
_FIXED, _NORESERVE = 0x10, 0x4000  # of mmap; Python has no names for them
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE asks for FALLOC_FL_KEEP_SIZE
_FAILED = ctypes.c_void_p(-1).value
_RESERVATION = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise, _fallocate = _libc.mmap, _libc.munmap, _libc.madvise, _libc.fallocate
_memcpy, _memset = _libc.memcpy, _libc.memset
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memset.restype = ctypes.c_void_p


def _check(is_done: bool, call: str, num_bytes: int, address: int) -> None:
    if not is_done:
        raise MemoryFault(
            f"{call} of {num_bytes:,} bytes at {address:#x}: {os.strerror(ctypes.get_errno())}",
            remedy="see the limits of this process (ulimit -v, memory control group, vm.max_map_count)",
        )


def _map(address: int | None, num_bytes: int, prot: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    result = _mmap(address, num_bytes, prot, flags, fd, offset)
    _check(result not in (None, _FAILED), "mmap", num_bytes, address or 0)
    return int(result or 0)


def reserve(num_bytes: int) -> int:
    """Addresses without memory; touching them is a fault."""
    return _map(None, num_bytes, 0, _RESERVATION)


def reserve_again(address: int, num_bytes: int) -> None:
    """In one step: whatever was mapped there is gone, the addresses stay taken."""
    _map(address, num_bytes, 0, _RESERVATION | _FIXED)


def map_file(address: int, num_bytes: int, fd: int, offset: int) -> None:
    """Shared, readable, writable, every page present at once, over whatever is there."""
    _map(address, num_bytes, _READ_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE | _FIXED, fd, offset)


def map_anonymous(num_bytes: int) -> int:
    """Private zeros, given a page when it is touched."""
    return _map(None, num_bytes, _READ_WRITE, _RESERVATION)


def unmap(address: int, num_bytes: int) -> None:
    _check(not _munmap(address, num_bytes), "munmap", num_bytes, address)


def advise(address: int, num_bytes: int, advice: int) -> int:
    """What the pages are for; 0, or errno."""
    return ctypes.get_errno() if _madvise(address, num_bytes, advice) else 0


def fill_file(fd: int, offset: int, num_bytes: int) -> bool:
    """Give a range of a file its pages, zeroed; False: there is not enough memory."""
    return not _fallocate(fd, 0, offset, num_bytes)


def empty_file(fd: int, offset: int, num_bytes: int) -> None:
    """Take the pages of a range away again."""
    _check(not _fallocate(fd, _PUNCH_HOLE, offset, num_bytes), "fallocate", num_bytes, offset)


def copy(target: int, source: int, num_bytes: int) -> None:
    """Both ranges must be mapped; this is not checked."""
    _memcpy(target, source, num_bytes)


def zero(address: int, num_bytes: int) -> None:
    """The range must be mapped."""
    _memset(address, 0, num_bytes)
