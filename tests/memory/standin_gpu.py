"""The stand-in driver library as tests use it: built once, a fresh copy (and so fresh state) for each of them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from itertools import count
from pathlib import Path

SOURCE = Path(__file__).parent / "standin_libcuda/standin.c"
MIB = 1 << 20
GRANULE = 2 * MIB
KINDS = ("reservations", "memories", "mappings", "registrations", "streams", "events", "contexts", "pushed")
_numbers = count()


def build(folder: Path) -> Path:
    made = folder / "libstandin.so"
    flags = ["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command = ["gcc", *flags, "-o", str(made), str(SOURCE), "-lpthread"]
    subprocess.run(command, check=True, timeout=100)
    return made


class StandinGpu:
    """One driver of two GPUs."""

    def __init__(self, built: Path, folder: Path, capacity_bytes: int = 256 * MIB) -> None:
        self.path = str(shutil.copy(built, folder / f"libcuda-{next(_numbers)}.so"))
        self._library = ctypes.CDLL(self.path)
        self._library.standin_held.restype = ctypes.c_size_t
        self._library.standin_violations.restype = ctypes.c_uint64
        self._library.standin_trace.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        self._library.standin_trace.restype = ctypes.c_size_t
        self._library.standin_is_pinned.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._library.standin_set_capacity.argtypes = (ctypes.c_int, ctypes.c_size_t)
        self.set_capacity(0, capacity_bytes)
        self.set_capacity(1, capacity_bytes)

    def set_capacity(self, ordinal: int, num_bytes: int) -> None:
        self._library.standin_set_capacity(ordinal, num_bytes)

    def fail(self, name: str, result: int, *, after: int = 0) -> None:
        """The next call of that name (or a later one) answers `result`, once."""
        self._library.standin_fail(name.encode(), after, result)

    def fail_nothing(self) -> None:
        self._library.standin_fail_nothing()

    def live(self) -> dict[str, int]:
        """What exists now and is not 0."""
        counts = {kind: int(self._library.standin_live(kind.encode())) for kind in KINDS}
        return {kind: number for kind, number in counts.items() if number}

    def held(self, ordinal: int = 0) -> int:
        return int(self._library.standin_held(ordinal))

    def is_pinned(self, address: int, num_bytes: int) -> bool:
        return bool(self._library.standin_is_pinned(address, num_bytes))

    def broken_rule(self) -> str:
        """The first rule of the driver that a caller broke; empty: none."""
        words = ctypes.create_string_buffer(512)
        self._library.standin_violations(words, ctypes.c_size_t(len(words)))
        return words.value.decode()

    def calls(self) -> list[tuple[str, int, int]]:
        """Since the last time: name, first two arguments."""
        words = ctypes.create_string_buffer(1 << 20)
        self._library.standin_trace(words, len(words))
        lines = [line.split() for line in words.value.decode().splitlines()]
        return [(name, int(first, 16), int(second, 16)) for name, first, second in lines]
