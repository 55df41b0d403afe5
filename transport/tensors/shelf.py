"""Which bytes of one slab are free. Sans-IO: first fit, neighbours join when they are given back."""

from __future__ import annotations

PAGE = 4096


def whole_pages(num_bytes: int) -> int:
    """Rounded up; never nothing."""
    return max(PAGE, -(-num_bytes // PAGE) * PAGE)


class Shelf:
    """Free ranges of a slab, by offset; none touches the next."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[tuple[int, int]] = [(0, num_bytes)]

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, num_bytes: int) -> int | None:
        """Offset of a range of so many bytes (rounded up to pages), or None: none is long enough."""
        wanted = whole_pages(num_bytes)
        for i, (offset, size) in enumerate(self._free):
            if size >= wanted:
                rest = [(offset + wanted, size - wanted)] if size > wanted else []
                self._free[i : i + 1] = rest
                return offset
        return None

    def give(self, offset: int, num_bytes: int) -> None:
        """A range that was taken is free again. ValueError if part of it is free already."""
        size = whole_pages(num_bytes)
        place = sum(1 for start, _ in self._free if start < offset)
        before = self._free[place - 1] if place else None
        after = self._free[place] if place < len(self._free) else None
        if (before and before[0] + before[1] > offset) or (after and offset + size > after[0]):
            raise ValueError(f"bytes {offset}..{offset + size} are free already")
        joined = (offset, size)
        first, last = place, place
        if before and before[0] + before[1] == offset:
            joined, first = (before[0], before[1] + size), place - 1
        if after and offset + size == after[0]:
            joined, last = (joined[0], joined[1] + after[1]), place + 1
        self._free[first:last] = [joined]
