"""One line of a memory table: what it is, how many bytes, and how that was computed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Part:
    """Memory of one kind on one device."""

    name: str
    num_bytes: int
    how: str
    """The formula with its numbers."""
    owner: str = ""
    """Role of the process that holds it."""


def total(parts: Iterable[Part]) -> int:
    return sum(part.num_bytes for part in parts)


def size_text(num_bytes: float) -> str:
    """1536 MiB -> "1.5 GiB"; three units are enough for what a device or a disk holds."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} bytes"


def count_text(number: float) -> str:
    """1720000000 -> "1.72e9", 4096 -> "4,096"."""
    if number < 1e6:
        return f"{number:,.0f}"
    mantissa, _, exponent = f"{number:.2e}".partition("e+")
    return f"{mantissa}e{int(exponent)}"
