"""Memory of one NVIDIA GPU by its driver's virtual memory management: what an arena on a GPU is made of.

Knows one device and its calls; knows no tags, no pool, no torch. It works in the primary context, so memory made here
is memory to torch, NCCL and every kernel of this process. Copies out, copies in and fillings have a stream each: none
waits for the default stream, for another kind, or holds up torch's. A copy's ticket is an event; waiting for it sleeps.
Copies are the engines' work, those in that somebody stands still for a kernel's (`cuda_copy_kernel.py` says why).

torch's expandable segments make memory by the same calls but cannot give a tensor's memory back while the tensor
lives, and `torch.cuda.caching_allocator_*` never does; hence these calls. Why ctypes: see `cuda_library.py`.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from ...core.errors import MemoryFault
from . import cuda_copy_kernel
from .cuda_library import (
    HAS_VMM,
    LIBRARY,
    NON_BLOCKING,
    NOT_READY,
    ON_DEVICE,
    PINNED_ON_DEVICE,
    RDMA_WITH_VMM,
    READ_WRITE,
    SLEEPING_EVENT,
    AccessDesc,
    AllocationProp,
    CudaLibrary,
    MemLocation,
    PrimaryContext,
)
from .driver import VmmDriver, next_ticket

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
    """Work of one kind, in order. The context must be current in every call.

    One stream: of two, the hardware carries out the whole queue of one first, so that what was begun first, and is
    waited for first, comes late.
    """

    def __init__(self, library: CudaLibrary) -> None:
        self._library = library
        self._spare: list[ctypes.c_void_p] = []
        self._flights: deque[Flight] = deque()
        self._broken: tuple[int, MemoryFault] | None = None
        """Tickets up to this one may not have arrived, and why."""
        self._stream: ctypes.c_void_p | None = ctypes.c_void_p()
        library.call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)

    def begin(self, ticket: int, address: int, num_bytes: int, issue: Callable[[ctypes.c_void_p], None]) -> None:
        """`issue(stream)` enqueues it; the device's range stays in use until the ticket was waited for, or is done."""
        event, stream = self._event(), self._stream
        if stream is None:
            raise MemoryFault("copies were ended", remedy="use a driver that is open")
        try:
            issue(stream)
            try:
                self._library.call("cuEventRecord", event, stream)
            except MemoryFault:
                # It may be under way and nobody would know when it ends.
                self._library.result_of("cuStreamSynchronize", stream)
                raise
        except MemoryFault:
            self._spare.append(event)
            raise
        self._flights.append(Flight(ticket, event, address, num_bytes))

    def wait(self, ticket: int) -> None:
        """For it and all begun before it.

        Raises MemoryFault when one of them failed, and again for every ticket begun by then: which of them arrived
        nobody can say, and their tags must not pass for whole.
        """
        while self._flights and self._flights[0].ticket <= ticket:
            flight = self._flights.popleft()
            self._spare.append(flight.event)
            result = self._library.result_of("cuEventSynchronize", flight.event)
            if result:
                # Nobody knows any more what is under way, and its memory may be taken away next.
                self._library.result_of("cuStreamSynchronize", self._stream)
                last = self._flights[-1].ticket if self._flights else flight.ticket
                what = f"copy of {flight.num_bytes:,} bytes at {flight.address:#x}"
                self._broken = (last, self._library.fault("cuEventSynchronize", result, what))
        if self._broken is not None and ticket <= self._broken[0]:
            fault = self._broken[1]
            raise type(fault)(fault.message, remedy=fault.remedy)

    def forget_all(self) -> None:
        """After the device was synchronised: whatever was begun is done."""
        self._spare.extend(flight.event for flight in self._flights)
        self._flights.clear()

    def is_using(self, address: int, num_bytes: int) -> bool:
        """Whether a copy that has not ended works on the range."""
        return any(
            flight.address < address + num_bytes
            and address < flight.address + flight.num_bytes
            and self._library.result_of("cuEventQuery", flight.event) == NOT_READY
            for flight in self._flights
        )

    def close(self) -> list[MemoryFault]:
        """Waits for its stream. Returns what went wrong, so that one failure does not keep the rest."""
        if self._stream is None:
            return []
        steps: list[tuple[str, ctypes.c_void_p]] = [("cuStreamSynchronize", self._stream)]
        self.forget_all()
        steps += [("cuEventDestroy_v2", event) for event in self._spare]
        steps.append(("cuStreamDestroy_v2", self._stream))
        self._spare.clear()
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
    """GPU `ordinal` of those that this process sees; see `VmmDriver` for the calls. Any thread may call, one at a time.

    `is_rdma`: memory that network cards may be given (GPUDirect), where the device can; such buffers must not be in a
    tag that leaves while the card has them.
    """

    def __init__(self, ordinal: int, library: str = LIBRARY, *, is_rdma: bool = False) -> None:
        self._context = PrimaryContext(CudaLibrary(library), ordinal)
        try:
            self._device = self._context.uuid()
            if not self._context.attribute(HAS_VMM):
                raise MemoryFault(
                    f"{self._device} has no virtual memory management", remedy="use another GPU or driver"
                )
            self._prop = AllocationProp(type=PINNED_ON_DEVICE, location=self._location())
            self._prop.flags.rdma_capable = int(is_rdma and bool(self._context.attribute(RDMA_WITH_VMM)))
            self._access = AccessDesc(location=self._location(), flags=READ_WRITE)
            self._granularity = self._ask_granularity()
            self._num_tickets = 0
            with self._context as cuda, ExitStack() as opened:
                self._lanes: list[CopyLane] = []
                for _ in range(3):
                    self._lanes.append(CopyLane(cuda))
                    opened.callback(self._lanes[-1].close)
                self._kernel = cuda_copy_kernel.load(cuda)
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
        where = _range(address, num_bytes)
        with self._context as cuda:
            cuda.call("cuMemMap", address, num_bytes, 0, handle, 0, what=where)
            try:
                cuda.call("cuMemSetAccess", address, num_bytes, ctypes.byref(self._access), 1, what=where)
            except MemoryFault:
                cuda.result_of("cuMemUnmap", address, num_bytes)
                raise

    def unmap(self, address: int, num_bytes: int) -> None:
        with self._context as cuda:
            if any(lane.is_using(address, num_bytes) for lane in self._lanes):
                raise MemoryFault(
                    f"{self._device}: {_range(address, num_bytes)} are being copied",
                    remedy="wait for the copy's ticket before its memory leaves",
                )
            cuda.call("cuMemUnmap", address, num_bytes, what=_range(address, num_bytes))

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
        if not 0 < ticket <= self._num_tickets:
            raise MemoryFault(
                f"{self._device}: no copy has the ticket {ticket}", remedy="wait for tickets of this driver"
            )
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

    def _copy_by(self, kernel: cuda_copy_kernel.CopyKernel, address: int, host_address: int, num_bytes: int) -> int:
        """The ticket; 0: the kernel cannot do this one."""
        with self._context:
            source = kernel.source(host_address, address, num_bytes)
            if not source:
                return 0
            return self._issue(IN, address, num_bytes, lambda s: kernel.enqueue(s, address, source, num_bytes))

    def _begin(self, lane: int, address: int, num_bytes: int, name: str, *arguments: object) -> int:
        with self._context as cuda:
            what = _range(address, num_bytes)
            return self._issue(lane, address, num_bytes, lambda s: cuda.call(name, *arguments, s, what=what))

    def _issue(self, lane: int, address: int, num_bytes: int, issue: Callable[[ctypes.c_void_p], None]) -> int:
        ticket = next_ticket(self._num_tickets, lane, len(self._lanes))
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

    def _location(self) -> MemLocation:
        return MemLocation(type=ON_DEVICE, id=self._context.cuda_device)

    def _ask_granularity(self) -> int:
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._prop), 0)
        return size.value


def _range(address: int, num_bytes: int) -> str:
    return f"{num_bytes:,} bytes at {address:#x}"
