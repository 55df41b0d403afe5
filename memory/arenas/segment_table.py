"""The table of segments that torch's allocator was given, as Python reads it; the other side is `segment_allocator.c`.

There is one table a process, because torch calls plain functions without state. A slot is one pool of one owner, and
only the slot's owner takes its segments. The C source is compiled by the machine's own compiler, once, into a cache
keyed by its contents (`built`): one wheel serves every machine and needs no build at install time. Two processes may
build at the same time: a lock file lets the second one wait, and a rename puts the whole result in place.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from ...core.errors import MemoryFault
from ...core.files import lock_within
from .cuda_driver import LIBRARY

COMPILERS = ("cc", "gcc", "clang", "g++", "c++")
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden")
LIBRARIES = ("-ldl", "-lpthread")
TIMEOUT_S = 120.0
"""For one call of the compiler."""
LOCK_S = 2 * TIMEOUT_S
"""For another process that builds the same."""


def built(source: Path, cache_dir: Path | None = None, *, compilers: Sequence[str] = COMPILERS) -> Path:
    """Path of the library made of `source`; compiles unless these very bytes were compiled on this kind of machine.

    `cache_dir` None: `.cache/myxa/native` in the user's home, or where that cannot be written a folder of this user
    alone among the temporary files. Raises MemoryFault naming the compilers that were looked for, or with what the
    compiler said, or when another process keeps the lock for LOCK_S.
    """
    text = source.read_bytes()
    key = hashlib.sha256(b"\0".join((text, " ".join(FLAGS).encode(), platform.machine().encode()))).hexdigest()[:24]
    name = f"{source.stem}-{key}"
    target, lock = _open_cache(_folders() if cache_dir is None else [cache_dir], name)
    if lock is None:
        return target
    try:
        if not lock_within(lock, LOCK_S):
            raise MemoryFault(
                f"{target}: another process has held its lock for {LOCK_S:g} s",
                remedy=f"see who has {target.with_suffix('.lock')} open (lsof), and end it",
            )
        if not target.exists():
            _compile(source, target, _compiler(source, compilers))
    finally:
        os.close(lock)
    return target


def _folders() -> list[Path]:
    shared = Path(tempfile.gettempdir()) / f"myxa-native-{os.getuid()}"
    return [Path.home() / ".cache" / "myxa" / "native", shared]


def _open_cache(folders: Sequence[Path], name: str) -> tuple[Path, int | None]:
    """Where the library is (no lock), or where the process with the lock makes it: the first folder that can."""
    refusals: list[str] = []
    for folder in folders:
        target = folder / f"{name}.so"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid():
                raise PermissionError(f"{folder} belongs to another user")
            if target.exists():
                return target, None
            return target, os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            refusals.append(str(error))
    raise MemoryFault(
        f"no folder can hold what is compiled as {name}: {'; '.join(refusals)}",
        remedy="give a cache_dir that is writable",
    )


def _compiler(source: Path, compilers: Sequence[str]) -> str:
    for name in compilers:
        path = shutil.which(name)
        if path is not None:
            return path
    raise MemoryFault(
        f"{source.name} must be compiled and there is no compiler: none of {', '.join(compilers)} is on the PATH",
        remedy="install one (Debian: apt-get install gcc), or bring a cache_dir that a machine with one has filled",
    )


def _compile(source: Path, target: Path, compiler: str) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
        made = Path(folder) / target.name
        command = [compiler, *FLAGS, "-x", "c", "-o", str(made), str(source), *LIBRARIES]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise MemoryFault(f"{' '.join(command)} did not end within {TIMEOUT_S:g} s") from error
        if done.returncode:
            raise MemoryFault(
                f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()[-2000:]}",
                remedy="see that the compiler works and has the C library's headers (Debian: libc6-dev)",
            )
        made.replace(target)


SOURCE = Path(__file__).with_name("segment_allocator.c")
SLOTS = tuple(10 * tens + ones for tens in range(1, 7) for ones in range(8))
"""Numbers in the names of the functions that torch calls."""
MAX_CHUNK_BYTES = 256 << 20


class _View(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("num_chunks", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("slot", ctypes.c_int32),
        ("is_taken", ctypes.c_int32),
        ("is_freed", ctypes.c_int32),
    )


class _Failure(ctypes.Structure):
    _fields_ = (
        ("num_failures", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("num_unknown", ctypes.c_uint64),
        ("result", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("slot", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("call", ctypes.c_char * 40),
    )


@dataclass(frozen=True, slots=True)
class TorchSegment:
    """One range of addresses with memory that torch cuts into tensors."""

    address: int
    num_bytes: int
    num_chunks: int
    device: int
    """Ordinal."""
    slot: int
    is_taken: bool
    """An arena has it, and alone gives its memory back."""
    is_freed: bool
    """torch does not need it any more."""


@dataclass(frozen=True, slots=True)
class AllocatorFailure:
    """The last call of the driver that failed within the allocator; torch only learns "no memory"."""

    num_failures: int
    """So far."""
    call: str
    result: int
    num_bytes: int
    device: int
    slot: int
    num_unknown: int
    """Frees of addresses that the table does not have."""


class SegmentTable:
    """Of this process. Every call takes the table's own mutex for a moment; any thread may call."""

    def __init__(
        self,
        *,
        library: str = LIBRARY,
        chunk_bytes: int = MAX_CHUNK_BYTES,
        cache_dir: Path | None = None,
        is_rdma: bool = False,
    ) -> None:
        """`chunk_bytes` must be a multiple of the device's granularity, 256 MiB at most."""
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise MemoryFault(f"segments in chunks of {chunk_bytes:,} bytes", remedy="use up to 256 MiB")
        self.path = built(SOURCE, cache_dir)
        self._functions = ctypes.CDLL(str(self.path))
        self._functions.myxa_segments_take.argtypes = (
            ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)  # fmt: skip
        for name in ("myxa_segments_untake", "myxa_segments_forget"):
            getattr(self._functions, name).argtypes = (ctypes.c_uint64,)
        words = ctypes.create_string_buffer(1024)
        opening = self._functions.myxa_segments_open
        opening.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
        if opening(library.encode(), chunk_bytes, int(is_rdma), words, len(words)):
            raise MemoryFault(
                f"the segment allocator cannot use {library}: {words.value.decode(errors='replace')}",
                remedy="one driver library and one chunk size a process; close what was opened before",
            )
        self.library = library
        self.chunk_bytes = chunk_bytes

    @staticmethod
    def function_names(slot: int) -> tuple[str, str]:
        """Of the two functions that torch is to be given for a pool: allocate, free."""
        return f"myxa_segment_alloc_{slot}", f"myxa_segment_free_{slot}"

    def segments(self) -> tuple[TorchSegment, ...]:
        """All there are now."""
        capacity = 256
        while True:
            views = (_View * capacity)()
            number = int(self._functions.myxa_segments_list(views, capacity))
            if number <= capacity:
                return tuple(
                    TorchSegment(
                        v.address, v.num_bytes, v.num_chunks, v.device, v.slot, bool(v.is_taken), bool(v.is_freed)
                    )
                    for v in views[:number]
                )
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
        failure = _Failure()
        self._functions.myxa_segments_failure(ctypes.byref(failure))
        return AllocatorFailure(
            num_failures=failure.num_failures,
            call=failure.call.decode(errors="replace"),
            result=failure.result,
            num_bytes=failure.num_bytes,
            device=failure.device,
            slot=failure.slot,
            num_unknown=failure.num_unknown,
        )

    def close(self) -> int:
        """Release the devices' contexts unless segments are left; returns how many are."""
        return int(self._functions.myxa_segments_close())


class SlotRegister:
    """Which slots are taken; slots of a pool that still has segments are not handed out again."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._taken: set[int] = set()

    def take(self, table: SegmentTable) -> int:
        """A slot for a new pool."""
        with self._lock:
            busy = self._taken | {segment.slot for segment in table.segments()}
            free = [slot for slot in SLOTS if slot not in busy]
            if not free:
                raise MemoryFault(f"all {len(SLOTS)} pools of this process are in use", remedy="close arenas first")
            self._taken.add(free[0])
            return free[0]

    def give(self, slot: int) -> None:
        """Its pool is gone."""
        with self._lock:
            self._taken.discard(slot)


REGISTER = SlotRegister()
"""Of this process, as the table is."""
