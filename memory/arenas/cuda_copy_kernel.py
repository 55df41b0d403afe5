"""Copies into a GPU by its processors instead of its copy engines: for those that somebody stands still for.

The driver clears memory that one process gave back before another may have it, with the copy engines, beside whatever
runs by then. A switch begins to copy in just that moment, and its copies take turns with the clearing: 12 GiB took
0.42 s on an H200 after another process had given back 100 GiB, 0.24 s a second later, and 0.26 s at once by this kernel
(`bench/gpu.sh memory_rates`). Few processors are enough for the link; work beside them would still feel it, so what
streams in under computation goes by the engines.

Written as PTX, which the driver itself compiles: a build of nvcc or Triton for one loop would be a dependency of every
trainer's start.
"""

from __future__ import annotations

import ctypes
from typing import Final

from ...core.errors import MemoryFault
from .cuda_library import CudaLibrary

NUM_BLOCKS = 16
"""Of 132 processors on an H200; 8 are enough there (12 GiB in 0.27 s), 32 hold up mapping beside them."""
NUM_THREADS = 512
UNIT = 16
"""Bytes that a thread moves at a time; addresses and sizes must be multiples."""
NAME: Final = b"copy_in"
SOURCE: Final = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry copy_in(.param .u64 to, .param .u64 from, .param .u64 num_bytes)
{
  .reg .pred %is_over;
  .reg .b32 %r<4>, %a<4>, %b<4>, %c<4>, %d<4>;
  .reg .b64 %to, %from, %end, %at, %far, %step, %stride, %t<4>, %f<4>;

  ld.param.u64 %to, [to];
  ld.param.u64 %from, [from];
  ld.param.u64 %end, [num_bytes];
  mov.u32 %r0, %ctaid.x;
  mov.u32 %r1, %ntid.x;
  mov.u32 %r2, %tid.x;
  mov.u32 %r3, %nctaid.x;
  mul.wide.u32 %at, %r0, %r1;
  cvt.u64.u32 %step, %r2;
  add.u64 %at, %at, %step;
  shl.b64 %at, %at, 4;                  // where this thread begins
  mul.wide.u32 %step, %r3, %r1;
  shl.b64 %step, %step, 4;              // what all threads move together
  shl.b64 %stride, %step, 2;

FOUR:                                   // four loads are on their way at a time
  mad.lo.u64 %far, %step, 3, %at;
  setp.ge.u64 %is_over, %far, %end;
  @%is_over bra ONE;
  add.u64 %f0, %from, %at;
  add.u64 %f1, %f0, %step;
  add.u64 %f2, %f1, %step;
  add.u64 %f3, %f2, %step;
  ld.global.cs.v4.u32 {%a0, %a1, %a2, %a3}, [%f0];
  ld.global.cs.v4.u32 {%b0, %b1, %b2, %b3}, [%f1];
  ld.global.cs.v4.u32 {%c0, %c1, %c2, %c3}, [%f2];
  ld.global.cs.v4.u32 {%d0, %d1, %d2, %d3}, [%f3];
  add.u64 %t0, %to, %at;
  add.u64 %t1, %t0, %step;
  add.u64 %t2, %t1, %step;
  add.u64 %t3, %t2, %step;
  st.global.v4.u32 [%t0], {%a0, %a1, %a2, %a3};
  st.global.v4.u32 [%t1], {%b0, %b1, %b2, %b3};
  st.global.v4.u32 [%t2], {%c0, %c1, %c2, %c3};
  st.global.v4.u32 [%t3], {%d0, %d1, %d2, %d3};
  add.u64 %at, %at, %stride;
  bra FOUR;

ONE:                                    // what is left of a size that four do not divide
  setp.ge.u64 %is_over, %at, %end;
  @%is_over bra OVER;
  add.u64 %f0, %from, %at;
  ld.global.cs.v4.u32 {%a0, %a1, %a2, %a3}, [%f0];
  add.u64 %t0, %to, %at;
  st.global.v4.u32 [%t0], {%a0, %a1, %a2, %a3};
  add.u64 %at, %at, %step;
  bra ONE;

OVER:
  ret;
}
"""


class CopyKernel:
    """The loaded kernel; lives as long as its context, which must be current in every call."""

    def __init__(self, library: CudaLibrary) -> None:
        """Raises MemoryFault where this GPU or driver cannot have it."""
        self._library = library
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        library.call("cuModuleLoadData", ctypes.byref(module), SOURCE, what="the copy kernel")
        library.call("cuModuleGetFunction", ctypes.byref(self._function), module, NAME)

    def source(self, host_address: int, address: int, num_bytes: int) -> int:
        """Where the device sees these bytes of the host; 0: it does not, or they do not begin and end as the kernel
        needs it."""
        if (host_address | address | num_bytes) % UNIT:
            return 0
        seen: list[int] = []
        for end in (host_address, host_address + num_bytes - UNIT):
            at = ctypes.c_uint64()
            if self._library.result_of("cuMemHostGetDevicePointer_v2", ctypes.byref(at), ctypes.c_void_p(end), 0):
                return 0
            seen.append(at.value)
        return seen[0] if seen[1] - seen[0] == num_bytes - UNIT else 0

    def enqueue(self, stream: ctypes.c_void_p, address: int, source: int, num_bytes: int) -> None:
        """`source`: as told by `source`. Raises MemoryFault."""
        values = (ctypes.c_uint64 * 3)(address, source, num_bytes)
        size = ctypes.sizeof(ctypes.c_uint64)
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(values) + index * size for index in range(3)))
        self._library.call(
            "cuLaunchKernel", self._function, NUM_BLOCKS, 1, 1, NUM_THREADS, 1, 1, 0, stream, pointers, None,
            what=f"copy of {num_bytes:,} bytes to {address:#x}",
        )  # fmt: skip


def load(library: CudaLibrary) -> CopyKernel | None:
    """None: copy engines it is."""
    try:
        return CopyKernel(library)
    except MemoryFault:  # a GPU before sm_80, or a driver that compiles nothing
        return None
