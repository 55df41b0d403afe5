"""The few calls to the kernel that Python does not offer: reading another process's memory, and what goes with it.

`process_vm_readv` needs the same user and, where Yama or a container's seccomp profile is strict, a permission that
cannot be known beforehand; therefore availability is not asked for: a read is tried. ctypes releases the
interpreter lock during each call, so a copy in its own thread does not stop the loop. A C extension was
considered: it would save two microseconds a call and cost a compiler at every installation.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import select
import sys
from pathlib import Path

from ...core.process import parent_of

IS_LINUX = sys.platform == "linux"

_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_PR_SET_PTRACER = 0x59616D61
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_RESTRICTED = "1"
"""Yama's mode in which only ancestors, and whom a process names, may read it."""


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_Guarded = _Piece * 3


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    vector = ctypes.POINTER(_Piece)
    counts = (ctypes.c_ulong, vector, ctypes.c_ulong, ctypes.c_ulong)
    libc.process_vm_readv.argtypes = (ctypes.c_int, vector, *counts)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    return libc


def pull(pid: int, source: int, target: int, num_bytes: int, word: int) -> tuple[int, int]:
    """Copy `num_bytes` at address `source` of process `pid` to our address `target`.

    The 8-byte word at `word` of that process is read before and after, in the same call; both are returned.
    Raises OSError: EPERM not allowed, ESRCH no such process, EFAULT that memory is not there (any more).
    """
    before, after = ctypes.c_uint64(), ctypes.c_uint64()
    ours = _Guarded(_Piece(ctypes.addressof(before), 8), _Piece(target, num_bytes), _Piece(ctypes.addressof(after), 8))
    theirs = _Guarded(_Piece(word, 8), _Piece(source, num_bytes), _Piece(word, 8))
    done: int = _libc().process_vm_readv(pid, ours, 3, theirs, 3, 0)
    if done != num_bytes + 16:
        code = ctypes.get_errno() if done < 0 else 14
        raise OSError(code, f"{os.strerror(code)}; {max(done, 0)} of {num_bytes + 16} bytes of process {pid} were read")
    return before.value, after.value


def read_bytes(pid: int, source: int, num_bytes: int) -> bytes:
    """A few bytes of another process. Raises OSError as `pull` does."""
    target = ctypes.create_string_buffer(num_bytes + 8)
    pull(pid, source, ctypes.addressof(target), num_bytes, source)
    return target.raw[:num_bytes]


def populate(address: int, num_bytes: int, *, for_writing: bool) -> bool:
    """Bring a mapping's pages in at once, huge ones where the host allows; False if the kernel cannot (before 5.14).

    Raises OSError if there is no memory for them, where a first touch would have killed us.
    """
    libc = _libc()
    libc.madvise(address, num_bytes, _MADV_HUGEPAGE)  # a wish; refused where huge pages are off
    advice = _MADV_POPULATE_WRITE if for_writing else _MADV_POPULATE_READ
    if libc.madvise(address, num_bytes, advice) == 0:
        return True
    code = ctypes.get_errno()
    if code == 22:  # EINVAL
        return False
    raise OSError(code, os.strerror(code))


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """A wish for memory that will be touched soon; without effect where huge pages are off."""
    _libc().madvise(address, num_bytes, _MADV_HUGEPAGE)


def anonymous(num_bytes: int) -> mmap.mmap:
    """Private memory of our own, not touched yet."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def watch_process(pid: int) -> int:
    """A descriptor that becomes readable when that process ends; another one with its number has no effect on it.

    Raises OSError if it has ended already.
    """
    return os.pidfd_open(pid)


def has_exited(watch: int) -> bool:
    """Whether the process behind a descriptor of `watch_process` has ended."""
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    return bool(poll.poll(0))


def admit_reader(reader: int) -> None:
    """Where Yama asks for it, permit that process to read our memory: by naming our nearest common ancestor.

    Only relatives are permitted: naming "anybody" would open this process to every program of the same user, and Yama
    keeps one name only. Others use the slab, which needs no such permission.
    """
    try:
        is_restricted = _YAMA.read_text(encoding="ascii").strip() == _RESTRICTED
    except OSError:
        return  # no Yama here
    if not is_restricted:
        return
    theirs = ancestry(reader)
    own, parent = os.getpid(), os.getppid()
    name = parent if parent > 1 and parent in theirs else own if own in theirs else 0
    if name:
        _libc().prctl(_PR_SET_PTRACER, name, 0, 0, 0)


def ancestry(pid: int) -> tuple[int, ...]:
    """The process itself, its parent, and so on; without what cannot be seen."""
    found: list[int] = []
    while pid > 1 and pid not in found:
        found.append(pid)
        pid = parent_of(pid)
    return tuple(found)
