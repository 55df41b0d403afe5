"""NCCL's suspend by its own C calls, for a torch that does not know them: a newer libnccl was loaded under it.

torch 2.11 is built against NCCL 2.28.9 and takes whatever `libnccl.so.2` the process has loaded first (LD_PRELOAD; its
own search path cannot be changed from outside). A library of 2.29.7 or newer brings the three calls, and
`ProcessGroupNCCL._comm_ptr()` the communicator to call them with.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import MemoryFault
from .native import device_of_caller, nccl_backends
from .peers import Peers
from .suspend import SuspendComms

LIBRARY = "libnccl.so.2"
SUSPEND_MEMORY = 1
STATS = {"suspend": 0, "suspended": 1, "persist": 2, "total": 3}
"""ncclCommMemStat_t, by the names that torch gives them."""
NEEDED = ("ncclCommSuspend", "ncclCommResume", "ncclCommMemStats")
NEEDED_VERSION = (2, 29, 7)


class NcclLibrary:
    """The calls, of a library that this process has loaded already."""

    def __init__(self, library: str | Path = LIBRARY) -> None:
        """Raises MemoryFault when it is not loaded or too old. A path is loaded (for tests)."""
        flags = os.RTLD_NOW | (os.RTLD_NOLOAD if library == LIBRARY else 0)
        try:
            self._library = ctypes.CDLL(str(library), mode=flags)
        except OSError as error:
            raise MemoryFault(
                f"{library} is not loaded in this process ({error})", remedy="a torch with NCCL"
            ) from error
        self.version = self._version()
        missing = [name for name in NEEDED if not hasattr(self._library, name)]
        if missing or self.version < NEEDED_VERSION:
            raise MemoryFault(
                f"NCCL {'.'.join(map(str, self.version))} has no {', '.join(missing) or 'usable suspend'}",
                remedy=f"LD_PRELOAD a libnccl.so.2 of {'.'.join(map(str, NEEDED_VERSION))} or newer",
            )

    def suspend(self, pointer: int) -> None:
        self._check("ncclCommSuspend", self._library.ncclCommSuspend(ctypes.c_void_p(pointer), SUSPEND_MEMORY))

    def resume(self, pointer: int) -> None:
        self._check("ncclCommResume", self._library.ncclCommResume(ctypes.c_void_p(pointer)))

    def memory(self, pointer: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, number in STATS.items():
            value = ctypes.c_uint64()
            status = self._library.ncclCommMemStats(ctypes.c_void_p(pointer), number, ctypes.byref(value))
            self._check("ncclCommMemStats", status)
            found[name] = value.value
        return found

    def _check(self, call: str, status: int) -> None:
        if status == 0:
            return
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        told: bytes = self._library.ncclGetErrorString(status) or b""
        raise MemoryFault(
            f"{call} answered {status} ({told.decode(errors='replace')})",
            remedy="a communicator must be idle, and built with NCCL_CUMEM_ENABLE=1",
        )

    def _version(self) -> tuple[int, int, int]:
        code = ctypes.c_int()
        self._library.ncclGetVersion(ctypes.byref(code))
        return code.value // 10000, code.value // 100 % 100, code.value % 100


@dataclass(frozen=True, slots=True)
class CtypesComm:
    """One group's communicator, as `Suspendable`."""

    name: str
    ranks: tuple[int, ...]
    backend: Any
    library: NcclLibrary

    def is_built(self) -> bool:
        """`_comm_ptr` of a group that was never used is an error."""
        told = getattr(self.backend, "_is_initialized", None)
        return bool(told()) if callable(told) else False

    def suspend(self) -> None:
        self.library.suspend(self.backend._comm_ptr())

    def resume(self) -> None:
        self.library.resume(self.backend._comm_ptr())

    def abort(self) -> None:
        self.backend.abort()

    def memory(self) -> dict[str, int]:
        return self.library.memory(self.backend._comm_ptr())


def ctypes_comms(
    peers: Peers,
    library: NcclLibrary,
    find: Callable[[], Iterable[tuple[str, tuple[int, ...], Any]]] = nccl_backends,
) -> SuspendComms:
    """Residency of this process's NCCL groups. `find`: which they are."""
    return SuspendComms(lambda: [CtypesComm(*each, library) for each in find()], peers, prepare=device_of_caller)
