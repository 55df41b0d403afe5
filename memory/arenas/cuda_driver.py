"""Memory of one NVIDIA GPU by its driver's virtual memory management: what an arena on a GPU is made of.

It works in the primary context, so torch, NCCL and every kernel of this process can use the memory. Copies out, copies
in and fills have one stream each. A copy's ticket is an event, and waiting for it sleeps. libcuda is called by ctypes:
the few dozen functions have kept their binary interface since CUDA 11, and calls release the interpreter lock.

Copy engines do the copies, except those in that a caller waits for: a kernel (PTX, which the driver compiles) does
these. The driver clears released memory with the copy engines before another process may have it, and a switch copies
in at just that moment: 12 GiB took 0.42 s on an H200 after another process had released 100 GiB, 0.24 s a second later,
and 0.26 s at once by the kernel (`bench/gpu.sh memory_rates`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import Any

from ...core.errors import MemoryFault, OutOfDeviceMemory
from . import libc
from .driver import VmmDriver
from .host_pool import Unpin

LIBRARY = "libcuda.so.1"
"""What every CUDA driver installs; the loader finds it."""
OUT_OF_MEMORY = 2
PINNED_ON_DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, the only one
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
SLEEPING_EVENT = 1 | 2  # CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING: waiting costs no core
REGISTERED_EVERYWHERE = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP: kernels may read it
HAS_VMM = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
HOST_NUMA_ID = 134  # CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp: 32 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", MemLocation),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc: 12 bytes."""

    _fields_ = (("location", MemLocation), ("flags", ctypes.c_int))


def _out(kind: Any) -> Any:
    return ctypes.POINTER(kind)  # pyright: ignore[reportUnknownVariableType]


_INT, _UINT, _SIZE = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_U64, _PTR, _STR = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p
_PROP, _ACCESS = ctypes.POINTER(AllocationProp), ctypes.POINTER(AccessDesc)

SIGNATURES: Mapping[str, tuple[object, ...]] = {
    "cuInit": (_UINT,),
    "cuGetErrorName": (_INT, _out(_STR)),
    "cuGetErrorString": (_INT, _out(_STR)),
    "cuDeviceGet": (_out(_INT), _INT),
    "cuDeviceGetUuid_v2": (_PTR, _INT),
    "cuDeviceGetAttribute": (_out(_INT), _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_out(_PTR), _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxPushCurrent_v2": (_PTR,),
    "cuCtxPopCurrent_v2": (_out(_PTR),),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_out(_SIZE), _out(_SIZE)),
    "cuMemGetAllocationGranularity": (_out(_SIZE), _PROP, _INT),
    "cuMemAddressReserve": (_out(_U64), _SIZE, _SIZE, _U64, _U64),
    "cuMemAddressFree": (_U64, _SIZE),
    "cuMemCreate": (_out(_U64), _SIZE, _PROP, _U64),
    "cuMemRelease": (_U64,),
    "cuMemMap": (_U64, _SIZE, _SIZE, _U64, _U64),
    "cuMemUnmap": (_U64, _SIZE),
    "cuMemSetAccess": (_U64, _SIZE, _ACCESS, _SIZE),
    "cuMemcpyDtoHAsync_v2": (_PTR, _U64, _SIZE, _PTR),
    "cuMemcpyHtoDAsync_v2": (_U64, _PTR, _SIZE, _PTR),
    "cuMemsetD8Async": (_U64, ctypes.c_ubyte, _SIZE, _PTR),
    "cuModuleLoadData": (_out(_PTR), _STR),
    "cuModuleGetFunction": (_out(_PTR), _PTR, _STR),
    "cuLaunchKernel": (_PTR, *(_UINT,) * 7, _PTR, _out(_PTR), _out(_PTR)),
    "cuMemHostGetDevicePointer_v2": (_out(_U64), _PTR, _UINT),
    "cuMemHostRegister_v2": (_PTR, _SIZE, _UINT),
    "cuMemHostUnregister": (_PTR,),
    "cuStreamCreate": (_out(_PTR), _UINT),
    "cuStreamSynchronize": (_PTR,),
    "cuStreamDestroy_v2": (_PTR,),
    "cuEventCreate": (_out(_PTR), _UINT),
    "cuEventRecord": (_PTR, _PTR),
    "cuEventSynchronize": (_PTR,),
    "cuEventDestroy_v2": (_PTR,),
}
"""Exported name -> types of arguments, as in cuda.h of CUDA 12.9; every function returns a CUresult."""

REMEDIES: Mapping[int, str] = {
    3: "the driver was not initialised in this process: a forked child cannot use its parent's CUDA",
    4: "the process is ending: close arenas before that",
    100: "no GPU is visible here: see CUDA_VISIBLE_DEVICES and nvidia-smi",
    101: "there is no GPU of that number here: see CUDA_VISIBLE_DEVICES",
    700: "a kernel used memory that was away or never there; this process has lost its GPU, restart it",
    712: "this range was pinned before: pin a pool once",
    719: "a kernel failed; this process has lost its GPU, restart it",
    801: "this GPU or driver cannot do that: run `nvidia-smi`; virtual memory management is needed",
    802: "the GPU is not ready: see nvidia-smi and the fabric manager",
}


class CudaLibrary:
    """The loaded library, initialised. `call` raises what a call answered."""

    def __init__(self, path: str = LIBRARY) -> None:
        self.path = path
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise MemoryFault(
                f"the CUDA driver's library cannot be loaded: {error}",
                remedy="this machine has no NVIDIA driver, or the container was not given it: use a host arena",
            ) from error
        self._functions: dict[str, ctypes._NamedFuncPointer] = {}  # pyright: ignore[reportPrivateUsage]
        for name, arguments in SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise MemoryFault(f"{path} has no {name}", remedy="a CUDA driver of 470 or later is needed") from error
            function.argtypes = arguments
            function.restype = ctypes.c_int
            self._functions[name] = function
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object, what: str = "") -> None:
        """Raises MemoryFault in the driver's words, OutOfDeviceMemory for its out-of-memory; `what` says for what."""
        result = self.result_of(name, *arguments)
        if result:
            raise self.fault(name, result, what)

    def result_of(self, name: str, *arguments: object) -> int:
        return int(self._functions[name](*arguments))

    def fault(self, name: str, result: int, what: str = "") -> MemoryFault:
        """The error of a CUresult that is not 0."""
        message = f"{name}{f' ({what})' if what else ''}: {self._word('cuGetErrorName', result)} ({result}), "
        message += self._word("cuGetErrorString", result)
        if result == OUT_OF_MEMORY:
            return OutOfDeviceMemory(message, remedy="release tags, or have others release theirs, first")
        return MemoryFault(message, remedy=REMEDIES.get(result, "see the driver's log (dmesg, nvidia-smi -q)"))

    def _word(self, function: str, result: int) -> str:
        word = ctypes.c_char_p()
        if self.result_of(function, result, ctypes.byref(word)) or word.value is None:
            return "unknown to this driver"
        return word.value.decode("utf-8", "replace")


class PrimaryContext:
    """One device's context that the CUDA runtime, and so torch, uses too; retained until `close`. `with context:` makes
    it this thread's current one and puts back what was: torch's idea of its device is untouched."""

    def __init__(self, library: CudaLibrary, ordinal: int) -> None:
        self.library = library
        self.ordinal = ordinal
        device, context = ctypes.c_int(), ctypes.c_void_p()
        library.call("cuDeviceGet", ctypes.byref(device), ordinal, what=f"GPU {ordinal}")
        self.cuda_device = device.value
        library.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device, what=f"GPU {ordinal}")
        self._context: ctypes.c_void_p | None = context

    def __enter__(self) -> CudaLibrary:
        if self._context is None:
            raise MemoryFault(f"GPU {self.ordinal}: its context was given back", remedy="it is closed: use a new one")
        self.library.call("cuCtxPushCurrent_v2", self._context)
        return self.library

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        popped = ctypes.c_void_p()
        result = self.library.result_of("cuCtxPopCurrent_v2", ctypes.byref(popped))
        if result and error is None:
            raise self.library.fault("cuCtxPopCurrent_v2", result)

    def attribute(self, number: int) -> int:
        """Of the device; raises for an attribute that the driver does not know."""
        value = ctypes.c_int()
        self.library.call(
            "cuDeviceGetAttribute", ctypes.byref(value), number, self.cuda_device, what=f"attribute {number}"
        )
        return value.value

    def uuid(self) -> str:
        raw = (ctypes.c_ubyte * 16)()
        self.library.call("cuDeviceGetUuid_v2", ctypes.byref(raw), self.cuda_device)
        digits = bytes(raw).hex()
        return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def close(self) -> None:
        """A second time does nothing."""
        context, self._context = self._context, None
        if context is not None:
            self.library.call("cuDevicePrimaryCtxRelease_v2", self.cuda_device)


NUM_BLOCKS = 16
"""Of 132 processors on an H200; 8 are enough there (12 GiB in 0.27 s), 32 hold up mapping beside them."""
NUM_THREADS = 512
UNIT = 16
"""Bytes that a thread moves at a time; addresses and sizes must be multiples."""
SOURCE = Path(__file__).with_name("copy_in.ptx")


class CopyKernel:
    """The loaded kernel; valid as long as its context, which must be current in every call."""

    def __init__(self, library: CudaLibrary) -> None:
        """Raises MemoryFault where this GPU or driver cannot have it."""
        self._library = library
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        library.call("cuModuleLoadData", ctypes.byref(module), SOURCE.read_bytes(), what="the copy kernel")
        library.call("cuModuleGetFunction", ctypes.byref(self._function), module, b"copy_in")

    def source(self, host_address: int, address: int, num_bytes: int) -> int:
        """Where the device sees these bytes of the host; 0: it does not, or they do not begin and end as the kernel
        needs it."""
        if (host_address | address | num_bytes) % UNIT:
            return 0
        addresses: list[int] = []
        for end in (host_address, host_address + num_bytes - UNIT):
            pointer = ctypes.c_uint64()
            if self._library.result_of("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), ctypes.c_void_p(end), 0):
                return 0
            addresses.append(pointer.value)
        return addresses[0] if addresses[1] - addresses[0] == num_bytes - UNIT else 0

    def enqueue(self, stream: ctypes.c_void_p, address: int, source: int, num_bytes: int) -> None:
        """`source`: the result of `source`. Raises MemoryFault."""
        values = (ctypes.c_uint64 * 3)(address, source, num_bytes)
        size = ctypes.sizeof(ctypes.c_uint64)
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(values) + index * size for index in range(3)))
        self._library.call(
            "cuLaunchKernel", self._function, NUM_BLOCKS, 1, 1, NUM_THREADS, 1, 1, 0, stream, pointers, None,
            what=f"copy of {num_bytes:,} bytes to {address:#x}",
        )  # fmt: skip


OUT, IN, FILL = range(3)
"""Lanes of a driver."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A copy that was begun and not waited for."""

    ticket: int
    event: ctypes.c_void_p
    address: int
    num_bytes: int


class CopyLane:
    """Work of one kind, in order. The context must be current in every call. One stream: of two, the hardware carries
    out the whole queue of one first, so that what was begun first, and is waited for first, comes late."""

    def __init__(self, library: CudaLibrary) -> None:
        self._library = library
        self._spare: list[ctypes.c_void_p] = []
        self._flights: deque[Flight] = deque()
        self._broken: tuple[int, MemoryFault] | None = None
        """Tickets up to this one may not have arrived, and why."""
        self._stream: ctypes.c_void_p | None = ctypes.c_void_p()
        library.call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)

    def begin(self, ticket: int, address: int, num_bytes: int, issue: Callable[[ctypes.c_void_p], None]) -> None:
        """`issue(stream)` enqueues it; the device's range must stay mapped until the ticket was waited for."""
        event, stream = self._event(), self._stream
        if stream is None:
            raise MemoryFault("copies were ended", remedy="use a driver that is open")
        try:
            issue(stream)
            try:
                self._library.call("cuEventRecord", event, stream)
            except MemoryFault:
                # It may be running, and there is no event that says when it ends.
                self._library.result_of("cuStreamSynchronize", stream)
                raise
        except MemoryFault:
            self._spare.append(event)
            raise
        self._flights.append(Flight(ticket, event, address, num_bytes))

    def wait(self, ticket: int) -> None:
        """For it and all begun before it. Raises MemoryFault when one of them failed, and again for every ticket begun
        by then: it is unknown which of them arrived, so their tags must not count as whole."""
        while self._flights and self._flights[0].ticket <= ticket:
            flight = self._flights.popleft()
            self._spare.append(flight.event)
            result = self._library.result_of("cuEventSynchronize", flight.event)
            if result:
                # It is unknown what is still running, and its memory may be taken away next.
                self._library.result_of("cuStreamSynchronize", self._stream)
                last = self._flights[-1].ticket if self._flights else flight.ticket
                copy = f"copy of {flight.num_bytes:,} bytes at {flight.address:#x}"
                self._broken = (last, self._library.fault("cuEventSynchronize", result, copy))
        if self._broken is not None and ticket <= self._broken[0]:
            fault = self._broken[1]
            raise type(fault)(fault.message, remedy=fault.remedy)

    def close(self) -> list[MemoryFault]:
        """Waits for its stream. Returns what went wrong, so that one failure does not keep the rest."""
        if self._stream is None:
            return []
        events = [*self._spare, *(flight.event for flight in self._flights)]
        steps = [("cuStreamSynchronize", self._stream), *(("cuEventDestroy_v2", event) for event in events)]
        steps.append(("cuStreamDestroy_v2", self._stream))
        self._spare.clear()
        self._flights.clear()
        self._stream = None
        results = [(name, self._library.result_of(name, thing)) for name, thing in steps]
        return [self._library.fault(name, result) for name, result in results if result]

    def _event(self) -> ctypes.c_void_p:
        if self._spare:
            return self._spare.pop()
        event = ctypes.c_void_p()
        self._library.call("cuEventCreate", ctypes.byref(event), SLEEPING_EVENT)
        return event


class CudaDriver(VmmDriver):
    """GPU `ordinal` of those that this process sees; see `VmmDriver`. Any thread may call, one at a time."""

    def __init__(self, ordinal: int, library: str = LIBRARY) -> None:
        self._context = PrimaryContext(CudaLibrary(library), ordinal)
        try:
            self._device = self._context.uuid()
            if not self._context.attribute(HAS_VMM):
                raise MemoryFault(
                    f"{self._device} has no virtual memory management", remedy="use another GPU or driver"
                )
            location = MemLocation(type=ON_DEVICE, id=self._context.cuda_device)
            self._prop = AllocationProp(type=PINNED_ON_DEVICE, location=location)
            self._access = AccessDesc(location=location, flags=READ_WRITE)
            size = ctypes.c_size_t()
            self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._prop), 0)
            self._granularity = size.value
            self._num_tickets = 0
            with self._context as cuda, ExitStack() as opened:
                self._lanes: list[CopyLane] = []
                for _ in range(3):
                    self._lanes.append(CopyLane(cuda))
                    opened.callback(self._lanes[-1].close)
                self._kernel: CopyKernel | None = None
                with suppress(MemoryFault):  # a GPU before sm_80, or a driver that compiles nothing
                    self._kernel = CopyKernel(cuda)
                opened.pop_all()
        except MemoryFault:
            self._context.close()
            raise
        self._is_closed = False

    @property
    def device(self) -> str:
        return self._device

    @property
    def ordinal(self) -> int:
        """Among the devices that this process sees."""
        return self._context.ordinal

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, 0, 0, what=f"{num_bytes:,} bytes")
        return address.value

    def free_reservation(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes, what=_range(address, num_bytes))

    def create(self, num_bytes: int) -> int:
        handle = ctypes.c_uint64()
        self._call(
            "cuMemCreate", ctypes.byref(handle), num_bytes, ctypes.byref(self._prop), 0, what=f"{num_bytes:,} bytes"
        )
        return handle.value

    def release(self, handle: int, num_bytes: int) -> None:
        self._call("cuMemRelease", handle, what=f"memory {handle:#x} of {num_bytes:,} bytes")

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        place = _range(address, num_bytes)
        with self._context as cuda:
            cuda.call("cuMemMap", address, num_bytes, 0, handle, 0, what=place)
            try:
                cuda.call("cuMemSetAccess", address, num_bytes, ctypes.byref(self._access), 1, what=place)
            except MemoryFault:
                cuda.result_of("cuMemUnmap", address, num_bytes)
                raise

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes, what=_range(address, num_bytes))

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> int:
        return self._begin(
            OUT, address, num_bytes, "cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host_address), address, num_bytes
        )

    def copy_in(self, address: int, host_address: int, num_bytes: int, *, is_awaited: bool = False) -> int:
        if is_awaited and self._kernel is not None:
            ticket = self._copy_by(self._kernel, address, host_address, num_bytes)
            if ticket:
                return ticket
        return self._begin(
            IN, address, num_bytes, "cuMemcpyHtoDAsync_v2", address, ctypes.c_void_p(host_address), num_bytes
        )

    def zero(self, address: int, num_bytes: int) -> int:
        return self._begin(FILL, address, num_bytes, "cuMemsetD8Async", address, 0, num_bytes)

    def wait(self, ticket: int) -> None:
        with self._context:
            self._lanes[ticket % len(self._lanes)].wait(ticket)

    def synchronise(self) -> None:
        self._call("cuCtxSynchronize")

    def free_bytes(self) -> int:
        return self._memory()[0]

    def capacity_bytes(self) -> int:
        return self._memory()[1]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with self._context:
                errors = [error for lane in self._lanes for error in lane.close()]
        finally:
            self._context.close()
        if errors:
            raise errors[0]

    def _copy_by(self, kernel: CopyKernel, address: int, host_address: int, num_bytes: int) -> int:
        """The ticket; 0: the kernel cannot do this one."""
        with self._context:
            source = kernel.source(host_address, address, num_bytes)
            if not source:
                return 0
            return self._issue(IN, address, num_bytes, lambda s: kernel.enqueue(s, address, source, num_bytes))

    def _begin(self, lane: int, address: int, num_bytes: int, name: str, *arguments: object) -> int:
        with self._context as cuda:
            place = _range(address, num_bytes)
            return self._issue(lane, address, num_bytes, lambda s: cuda.call(name, *arguments, s, what=place))

    def _issue(self, lane: int, address: int, num_bytes: int, issue: Callable[[ctypes.c_void_p], None]) -> int:
        # Tickets count over all lanes, and the remainder names the lane.
        ticket = self._num_tickets + 1 + (lane - self._num_tickets - 1) % len(self._lanes)
        self._lanes[lane].begin(ticket, address, num_bytes, issue)
        self._num_tickets = ticket
        return ticket

    def _call(self, name: str, *arguments: object, what: str = "") -> None:
        with self._context as cuda:
            cuda.call(name, *arguments, what=what)

    def _memory(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


def _range(address: int, num_bytes: int) -> str:
    return f"{num_bytes:,} bytes at {address:#x}"


NODES = Path("/sys/devices/system/node")
HUGE_PAGE_BYTES = 2 << 20
NUM_NODE_BITS = 1024
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
MPOL_PREFERRED = 1  # not MPOL_BIND: a node that is full would end the process instead of borrowing from its neighbour
MBIND_NUMBER: Mapping[str, int] = {"x86_64": 237, "aarch64": 235}
"""Of the system call; the C library has no function for it."""


class Pinning:
    """A `pin` for `HostPool`: `pin(address, num_bytes)` makes one range resident by several threads, near its GPU,
    locks it once for all copies, and returns the callable that unpins. torch's pinned memory rounds up to powers of two
    and locks pages in every cycle, where torch-memory-saver loses most of its time. Huge pages and nearness are asked
    for, not demanded. Pages are made by madvise(MADV_POPULATE_WRITE), which keeps what is in them."""

    def __init__(self, ordinal: int, *, library: str = LIBRARY, num_threads: int = 8) -> None:
        self._ordinal = ordinal
        self._library = library
        self._num_threads = num_threads

    def __call__(self, address: int, num_bytes: int) -> Unpin:
        """Blocks: 8 GiB take seconds on a machine whose memory is fresh. Raises MemoryFault with nothing pinned."""
        context = PrimaryContext(CudaLibrary(self._library), self._ordinal)
        try:
            libc.advise(address, num_bytes, MADV_HUGEPAGE)
            with suppress(MemoryFault):  # drivers before 12.2 do not know the question
                _prefer_node(address, num_bytes, context.attribute(HOST_NUMA_ID))
            self._populate(address, num_bytes)
            self._register(context, address, num_bytes)
        except BaseException:
            context.close()
            raise

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
        parts = [(address + offset, min(step, num_bytes - offset)) for offset in range(0, num_bytes, step)]
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="pin") as threads:
            errors = {*threads.map(libc.advise, *zip(*parts, strict=True), repeat(MADV_POPULATE_WRITE))} - {0}
        if errors and errno.EINVAL not in errors:
            raise MemoryFault(
                f"host pool: {num_bytes:,} bytes cannot be made resident: {os.strerror(min(errors))}",
                remedy="make the pool smaller, or free memory of the host (see the memory control group's limit)",
            )

    def _register(self, context: PrimaryContext, address: int, num_bytes: int) -> None:
        with context as cuda:
            name, size = "cuMemHostRegister_v2", f"{num_bytes:,} bytes of the host"
            result = cuda.result_of(name, ctypes.c_void_p(address), num_bytes, REGISTERED_EVERYWHERE)
            if result:
                # Not OutOfDeviceMemory whatever the driver says: it is the host that has too little.
                raise MemoryFault(
                    cuda.fault(name, result, size).message,
                    remedy="make the host pool smaller, or raise what this process may lock",
                )


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
