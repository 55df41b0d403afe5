"""Dealing a tag's memory out to parts of about the same size, so that a part of it can leave and the rest stay."""

from __future__ import annotations

from collections.abc import Sequence

from .tagged_memory import Region, TaggedMemory

LEAST_GRANULES = 16
"""A part below so many of the device's granules is not worth a command of its own."""


def shares(sizes: Sequence[int], num_parts: int, least_bytes: int) -> list[list[int]]:
    """Indices of `sizes` by part: at most `num_parts` parts, none empty, as equal as the largest sizes allow, and as
    few as parts of `least_bytes` need. Every index is in one part; inside a part they ascend."""
    num = max(1, min(num_parts, sum(sizes) // max(least_bytes, 1), len(sizes)))
    parts: list[list[int]] = [[] for _ in range(num)]
    filled = [0] * num
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        part = min(range(num), key=lambda p: (filled[p], p))
        parts[part].append(index)
        filled[part] += sizes[index]
    return [sorted(part) for part in parts if part]


def deal(whole: TaggedMemory, parts: Sequence[TaggedMemory], granularity: int) -> None:
    """Give the regions of `whole`, which is the first of `parts`, to all of them. Nothing moves: a region's bytes are
    where they were, and so is its copy on the host."""
    regions: list[Region] = list(whole.regions.values())
    dealt = shares([region.mapped_bytes for region in regions], len(parts), LEAST_GRANULES * granularity)
    for part, indices in zip(parts, dealt, strict=False):
        part.regions = {regions[index].address: regions[index] for index in indices}
