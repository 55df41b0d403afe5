"""What the machine itself gives: plain pinned copies, the price of pinning, the price of mapping. No arena of ours.

A stage of memory_rates.py. With `--device cpu` pageable memory and the host's own VMM stand in.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from memory_device import open_driver
from memory_figures import GIB, MIB
from memory_stages import leave

MADV_HUGEPAGE = 14
SLAB = 64 * MIB
"""A thread touches so much at a time."""


# -- copies ------------------------------------------------------------------------------------------------------------


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def best_rate(device: str, num_bytes: int, repeats: int, work: Callable[[], None]) -> float:
    """GB/s, median of `repeats` after one that is not counted."""
    work()
    synchronise(device)
    seconds: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        synchronise(device)
        seconds.append(time.perf_counter() - started)
    return num_bytes / sorted(seconds)[repeats // 2] / 1e9


class PlainCopies:
    """The denominator: a buffer that the runtime pinned, an ordinary tensor, asynchronous copies on own streams."""

    def __init__(self, device: str, num_bytes: int) -> None:
        self.device = device
        self.num_bytes = num_bytes
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
        self.there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.host.fill_(1)
        self._streams = [torch.cuda.Stream() for _ in range(4)] if device == "cuda" else []

    def copy(self, size: int, *, is_out: bool, num_streams: int = 1, first_stream: int = 0, offset: int = 0) -> None:
        """Begin copying `size` bytes; the caller synchronises."""
        part = size // num_streams
        for index in range(num_streams):
            at = slice(offset + index * part, offset + (index + 1) * part)
            target, source = (self.host[at], self.there[at]) if is_out else (self.there[at], self.host[at])
            if self._streams:
                with torch.cuda.stream(self._streams[first_stream + index]):
                    target.copy_(source, non_blocking=True)
            else:
                target.copy_(source)

    def rate(self, size: int, *, is_out: bool, num_streams: int = 1, repeats: int = 5) -> float:
        """GB/s."""
        size = min(size, self.num_bytes)
        return best_rate(
            self.device, size, repeats, lambda: self.copy(size, is_out=is_out, num_streams=num_streams)
        )  # fmt: skip

    def rate_both(self, size: int, repeats: int = 5) -> float:
        """GB/s of both directions together, out of one half and into the other."""
        half = min(size, self.num_bytes) // 2

        def work() -> None:
            self.copy(half, is_out=True)
            self.copy(half, is_out=False, first_stream=1, offset=half)

        return best_rate(self.device, 2 * half, repeats, work)


def copies(options: argparse.Namespace) -> dict[str, Any]:
    """GB/s by size, direction and number of streams."""
    largest = options.plain_bytes
    sizes = sorted({size for size in (256 * MIB, GIB, 4 * GIB, largest) if size <= largest})
    plain = PlainCopies(options.device, largest)
    rows = [
        {
            "size": size,
            "out": [plain.rate(size, is_out=True, num_streams=n) for n in (1, 2)],
            "in": [plain.rate(size, is_out=False, num_streams=n) for n in (1, 2)],
            "both": plain.rate_both(size),
        }
        for size in sizes
    ]
    return {"rows": rows}


# -- pinning -----------------------------------------------------------------------------------------------------------


def touch(address: int, num_bytes: int, num_threads: int) -> None:
    """Write a byte into every page; memset lets go of the interpreter lock."""
    with ThreadPoolExecutor(num_threads) as pool:
        list(
            pool.map(
                lambda start: ctypes.memset(address + start, 1, min(SLAB, num_bytes - start)), range(0, num_bytes, SLAB)
            )
        )


def register(address: int, num_bytes: int, *, is_on: bool) -> None:
    runtime: Any = torch.cuda.cudart()
    status = runtime.cudaHostRegister(address, num_bytes, 0) if is_on else runtime.cudaHostUnregister(address)
    if int(status) != 0:
        raise RuntimeError(f"cudaHost{'Register' if is_on else 'Unregister'} of {num_bytes:,} bytes: error {status}")


class Region:
    """Host memory that is mapped, touched and pinned, each step timed."""

    def __init__(self, num_bytes: int, *, device: str, num_threads: int, kind: str) -> None:
        self.num_bytes, self._device = num_bytes, device
        if kind == "huge":
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._map.madvise(MADV_HUGEPAGE)
        else:
            descriptor = os.memfd_create("myxa-bench")
            os.ftruncate(descriptor, num_bytes)
            self._map = mmap.mmap(descriptor, num_bytes)
            os.close(descriptor)
        self._view = (ctypes.c_char * num_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._view)
        marks = [time.perf_counter()]
        touch(self.address, num_bytes, num_threads)
        marks.append(time.perf_counter())
        if device == "cuda":
            register(self.address, num_bytes, is_on=True)
        marks.append(time.perf_counter())
        self.touch_s, self.register_s = (after - before for before, after in pairwise(marks))

    def close(self) -> None:
        if self._device == "cuda":
            register(self.address, self.num_bytes, is_on=False)
        del self._view
        self._map.close()


def pin(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds a GiB of getting pinned memory, in several ways. The first four grow the machine's memory where it starts
    small; they are held until all are measured."""
    size, rows = options.pin_bytes, []
    if options.device == "cuda":
        torch.cuda.init()
        torch.zeros(1, device="cuda")
    started = time.perf_counter()
    runtime_buffer = torch.empty(size, dtype=torch.uint8, pin_memory=options.device == "cuda")
    if options.device == "cpu":
        runtime_buffer.fill_(1)
    rows.append({"way": "cudaHostAlloc of the runtime", "touch": None, "register": time.perf_counter() - started})
    held: list[Region] = []
    for num_threads, kind in ((1, "shared"), (8, "shared"), (16, "shared"), (16, "huge")):
        region = Region(size, device=options.device, num_threads=num_threads, kind=kind)
        held.append(region)
        name = f"{'anonymous, huge pages asked for' if kind == 'huge' else 'memfd'}, {num_threads} threads"
        rows.append({"way": name, "touch": region.touch_s, "register": region.register_s})
    for region in held:
        region.close()
    again = Region(size, device=options.device, num_threads=16, kind="shared")
    rows.append({"way": "memfd, 16 threads, memory had before", "touch": again.touch_s, "register": again.register_s})
    again.close()
    return {"rows": rows, "num_bytes": size}


# -- mapping -----------------------------------------------------------------------------------------------------------


def vmm(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a GiB of every driver call that a release and a restore make, by the size of a chunk."""
    driver = open_driver(options.device, capacity_bytes=2 * options.vmm_bytes)
    rows: list[dict[str, Any]] = []
    for chunk in (2 * MIB, 64 * MIB, 512 * MIB, 2 * GIB):
        chunk = max(chunk // options.shrink, driver.granularity)
        num = min(options.vmm_bytes // chunk, 2048)
        rows.append({"chunk": chunk, "total": num * chunk, "cycles": [vmm_cycle(driver, chunk, num) for _ in range(2)]})
    driver.close()
    return {"rows": rows}


def vmm_cycle(driver: Any, chunk: int, num: int) -> dict[str, float]:
    """Seconds of each call over all chunks."""
    base = driver.reserve(num * chunk)
    addresses = [base + index * chunk for index in range(num)]
    marks = {"": time.perf_counter()}
    handles = [driver.create(chunk) for _ in addresses]
    marks["create"] = time.perf_counter()
    for address, handle in zip(addresses, handles, strict=True):
        driver.map(address, chunk, handle)
    marks["map and access"] = time.perf_counter()
    for address in addresses:
        driver.unmap(address, chunk)
    marks["unmap"] = time.perf_counter()
    for handle in handles:
        driver.release(handle, chunk)
    marks["release"] = time.perf_counter()
    driver.free_reservation(base, num * chunk)
    names = list(marks)
    return {after: marks[after] - marks[before] for before, after in pairwise(names)}


STAGES = {"pin": pin, "copies": copies, "vmm": vmm}
"""Pinning first, while the machine's memory is still small."""


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--device", default="cuda")
    args.add_argument("--plain-bytes", type=int, default=8 * GIB)
    args.add_argument("--pin-bytes", type=int, default=8 * GIB)
    args.add_argument("--vmm-bytes", type=int, default=100 * GIB)
    args.add_argument("--shrink", type=int, default=1)
    options = args.parse_args()
    leave(**{name: stage(options) for name, stage in STAGES.items()})


if __name__ == "__main__":
    main()
