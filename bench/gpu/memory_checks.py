"""A device to check, and checks that are told as they come. Knows the stand-in of a driver that the tests use."""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from memory_device import bytes_at, settled_used

from myxa.memory.arenas.cuda_driver import CudaDriver
from myxa.memory.arenas.cuda_memory import CudaMemory

MIB, GIB = 1 << 20, 1 << 30
TESTS = Path(__file__).resolve().parents[2] / "tests/memory"


class Bench:
    """The device and what is on it."""

    def __init__(self, device: str, num_bytes: int, folder: Path) -> None:
        self.device = device
        self.num_bytes = num_bytes
        self.is_gpu = device == "cuda"
        self.gpu: Any = None
        self.caching: Any = None
        self.options: dict[str, Any] = {}
        if not self.is_gpu:
            sys.path.insert(0, str(TESTS))
            standin, caching = importlib.import_module("standin_gpu"), importlib.import_module("standin_caching")
            self.gpu = standin.StandinGpu(standin.build(folder), folder, capacity_bytes=4 * num_bytes + 64 * MIB)
            self.caching = caching.StandinCaching()
            self.options = {"library": self.gpu.path, "caching": self.caching, "cache_dir": folder / "native"}
        self.memory: CudaMemory = None  # type: ignore[assignment]
        self.tensors: dict[str, torch.Tensor] = {}
        self.plain: dict[str, float] = {}

    def driver(self) -> CudaDriver:
        return CudaDriver(0, **({} if self.is_gpu else {"library": self.gpu.path}))

    def tensor(self, tag: Any, policy: Any, num_bytes: int) -> torch.Tensor:
        """int64, made by torch's allocator in a region of the tag."""
        with self.memory.region(tag, policy):
            if self.is_gpu:
                return torch.empty(num_bytes // 8, dtype=torch.int64, device="cuda")
            return bytes_at(self.caching.empty(num_bytes), num_bytes, "cpu")

    def used(self) -> int:
        """Of the device, as outsiders see it."""
        return settled_used() if self.is_gpu else self.gpu.held()

    def synchronise(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()


class Checks:
    """Rows of the table."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str]] = []
        self.failed: list[str] = []

    def run(self, name: str, work: Callable[[], str], *, must_hold: bool = True) -> None:
        started = time.perf_counter()
        try:
            said, verdict = work(), "holds"
        except Exception as error:  # noqa: BLE001 the next check may hold, and all are told
            traceback.print_exc()
            said, verdict = f"{type(error).__name__}: {error}"[:400], "FAILED" if must_hold else "does not hold"
            if must_hold:
                self.failed.append(name)
        self.rows.append((name, verdict, said, f"{time.perf_counter() - started:.2f}"))
        print(f"  {name}: {verdict} ({self.rows[-1][3]} s): {said}", flush=True)


def need(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


@contextmanager
def refused(kind: type[Exception], word: str) -> Generator[None]:
    try:
        yield
    except kind as error:
        need(word in str(error), f"{word!r} is not in: {error}")
        return
    raise AssertionError(f"no {kind.__name__}")
