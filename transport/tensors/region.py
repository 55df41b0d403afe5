"""Memory that numpy arrays use and that somebody wants to hear of when the last of them is gone.

An array keeps its memory's exporter alive, and every view of it does; so the exporter's end is the end of all use.
Python 3.11 has no `__buffer__`, hence a ctypes array over the address. `numpy.ndarray` subclasses with a finaliser
were considered: numpy shortens chains of bases, and a plain view outlives the subclass instance.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

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
