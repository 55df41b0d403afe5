"""Pinning of a host pool: one range, made resident by several threads, near its GPU, locked once for its copies.

Knows addresses and a GPU's ordinal; the pool makes the range, cuts it up and calls `pin` once. `torch`'s pinned memory
is no alternative: its cache rounds up to powers of two and allocates (which means locks pages) in every cycle; that is
where torch-memory-saver loses most of its time. Huge pages, nearness and many threads are asked for, not demanded.
Wanted pages are made by madvise(MADV_POPULATE_WRITE), which keeps what is in them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ...core.clock import Clock, SystemClock
from ...core.errors import MemoryFault
from . import libc
from .cuda_driver import HOST_NUMA_ID, LIBRARY, REGISTERED_EVERYWHERE, CudaLibrary, PrimaryContext
from .host_pool import Pin, Unpin

NODES = Path("/sys/devices/system/node")
HUGE_PAGE_BYTES = 2 << 20
NUM_NODE_BITS = 1024
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
MPOL_PREFERRED = 1  # not MPOL_BIND: a node that is full would end the process instead of borrowing from its neighbour
MBIND_NUMBER: MappingProxyType[str, int] = MappingProxyType({"x86_64": 237, "aarch64": 235})
"""Of the system call; the C library has no function for it."""


@dataclass(frozen=True, slots=True)
class PinReport:
    """What pinning took, for benchmarks."""

    num_bytes: int
    populate_s: float
    """Hardly any: the kernel cannot do it ahead, registering did it page by page."""
    register_s: float


class Pinning:
    """A `pin` for `HostPool`: `pin(address, num_bytes)` returns the callable that unpins."""

    def __init__(
        self, ordinal: int, *, library: str = LIBRARY, num_threads: int = 8, clock: Clock | None = None
    ) -> None:
        if num_threads < 1:
            raise MemoryFault(f"pinning by {num_threads} threads", remedy="use at least one")
        self._ordinal = ordinal
        self._library = library
        self._num_threads = num_threads
        self._clock: Clock = clock or SystemClock()
        self.report: PinReport | None = None
        """None: nothing was pinned yet."""

    def __call__(self, address: int, num_bytes: int) -> Unpin:
        """Blocks: 8 GiB take seconds on a machine whose memory is fresh. Raises MemoryFault with nothing pinned."""
        context = PrimaryContext(CudaLibrary(self._library), self._ordinal)
        try:
            libc.advise(address, num_bytes, MADV_HUGEPAGE)
            with suppress(MemoryFault):  # drivers before 12.2 do not know the question
                _prefer_node(address, num_bytes, context.attribute(HOST_NUMA_ID))
            started = self._clock.monotonic()
            self._populate(address, num_bytes)
            populated = self._clock.monotonic()
            self._register(context, address, num_bytes)
            registered = self._clock.monotonic()
        except BaseException:
            context.close()
            raise
        self.report = PinReport(num_bytes, populated - started, registered - populated)

        def unpin() -> None:
            try:
                with context as cuda:
                    cuda.call("cuMemHostUnregister", ctypes.c_void_p(address), what=f"{num_bytes:,} bytes of the host")
            finally:
                context.close()

        return unpin

    def _populate(self, address: int, num_bytes: int) -> None:
        """Every page of its own thread's part made and writable, where this kernel can do that."""
        pages = -(-num_bytes // HUGE_PAGE_BYTES)
        step = -(-pages // self._num_threads) * HUGE_PAGE_BYTES
        parts = [(address + at, min(step, num_bytes - at)) for at in range(0, num_bytes, step)]
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="pin") as threads:
            errors = set(threads.map(_make_resident, parts)) - {0}
        if errors and errno.EINVAL not in errors:
            raise MemoryFault(
                f"host pool: {num_bytes:,} bytes cannot be made resident: {os.strerror(min(errors))}",
                remedy="make the pool smaller, or free memory of the host (see the memory control group's limit)",
            )

    def _register(self, context: PrimaryContext, address: int, num_bytes: int) -> None:
        with context as cuda:
            name, what = "cuMemHostRegister_v2", f"{num_bytes:,} bytes of the host"
            result = cuda.result_of(name, ctypes.c_void_p(address), num_bytes, REGISTERED_EVERYWHERE)
            if result:
                # Not OutOfDeviceMemory whatever the driver says: it is the host that has too little.
                raise MemoryFault(
                    cuda.fault(name, result, what).message,
                    remedy="make the host pool smaller, or raise what this process may lock",
                )


def pin_for(ordinal: int, *, library: str = LIBRARY, num_threads: int = 8) -> Pin:
    """What `HostPool` takes as `pin` for copies to and from GPU `ordinal`."""
    return Pinning(ordinal, library=library, num_threads=num_threads)


def _make_resident(part: tuple[int, int]) -> int:
    return libc.advise(*part, MADV_POPULATE_WRITE)


def _prefer_node(address: int, num_bytes: int, node: int) -> None:
    """Memory of that NUMA node, where there are several."""
    number = MBIND_NUMBER.get(platform.machine())
    if number is None or not 0 <= node < NUM_NODE_BITS or len(list(NODES.glob("node[0-9]*"))) < 2:
        return
    mask = (ctypes.c_ulong * (NUM_NODE_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    ctypes.CDLL(None).syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(num_bytes), ctypes.c_int(MPOL_PREFERRED), mask,
        ctypes.c_ulong(NUM_NODE_BITS), ctypes.c_uint(0),
    )  # fmt: skip
