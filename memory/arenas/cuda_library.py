"""The CUDA driver's library as ctypes sees it: its calls, its structures, its errors as ours, its primary context.

By ctypes and not by NVIDIA's `cuda-bindings`: those find libcuda by themselves, so the stand-in of our tests could not
take its place, and each release of theirs goes with a CUDA release that the machine's owner chooses. A few dozen
functions are needed whose binary interface NVIDIA has kept since CUDA 11 (names with `_v2` are what cuda.h makes of the
plain ones). Calls let go of the interpreter lock. Knows nothing of arenas, tags or torch.
"""

from __future__ import annotations

import ctypes
from types import MappingProxyType, TracebackType
from typing import Any

from ...core.errors import MemoryFault, OutOfDeviceMemory

LIBRARY = "libcuda.so.1"
"""What every CUDA driver installs; the loader finds it."""
OUT_OF_MEMORY = 2
NOT_READY = 600
PINNED_ON_DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, the only one
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
SLEEPING_EVENT = 1 | 2  # CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING: waiting costs no core
REGISTERED_EVERYWHERE = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP: kernels may read it
RDMA_WITH_VMM = 110  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
HAS_VMM = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
HOST_NUMA_ID = 134  # CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
PCI_BUS, PCI_DEVICE, PCI_DOMAIN = 33, 34, 50


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationFlags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp: 32 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", MemLocation),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc: 12 bytes."""

    _fields_ = (("location", MemLocation), ("flags", ctypes.c_int))


def _out(kind: Any) -> Any:
    return ctypes.POINTER(kind)  # pyright: ignore[reportUnknownVariableType]


_INT, _UINT, _SIZE = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_U64, _PTR, _STR = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p
_PROP, _ACCESS = ctypes.POINTER(AllocationProp), ctypes.POINTER(AccessDesc)

SIGNATURES: MappingProxyType[str, tuple[object, ...]] = MappingProxyType(
    {
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
        "cuEventQuery": (_PTR,),
        "cuEventSynchronize": (_PTR,),
        "cuEventDestroy_v2": (_PTR,),
    }
)
"""Exported name -> types of arguments, as in cuda.h of CUDA 12.9; every function returns a CUresult."""

REMEDIES: MappingProxyType[int, str] = MappingProxyType(
    {
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
)


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
        """The bare CUresult."""
        return int(self._functions[name](*arguments))

    def fault(self, name: str, result: int, what: str = "") -> MemoryFault:
        """The error of a CUresult that is not 0."""
        words = f"{name}{f' ({what})' if what else ''}: {self._word('cuGetErrorName', result)} ({result}), "
        words += self._word("cuGetErrorString", result)
        if result == OUT_OF_MEMORY:
            return OutOfDeviceMemory(words, remedy="release tags, or have others release theirs, first")
        return MemoryFault(words, remedy=REMEDIES.get(result, "see the driver's log (dmesg, nvidia-smi -q)"))

    def _word(self, function: str, result: int) -> str:
        word = ctypes.c_char_p()
        if self.result_of(function, result, ctypes.byref(word)) or word.value is None:
            return "unknown to this driver"
        return word.value.decode("utf-8", "replace")


class PrimaryContext:
    """One device's context that the CUDA runtime, and so torch, uses too; retained until `close`.

    `with context:` makes it this thread's current one and puts back what was: torch's idea of its device is untouched.
    """

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
        """As nvidia-smi writes it."""
        raw = (ctypes.c_ubyte * 16)()
        self.library.call("cuDeviceGetUuid_v2", ctypes.byref(raw), self.cuda_device)
        digits = bytes(raw).hex()
        return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def close(self) -> None:
        """A second time does nothing."""
        context, self._context = self._context, None
        if context is not None:
            self.library.call("cuDevicePrimaryCtxRelease_v2", self.cuda_device)
