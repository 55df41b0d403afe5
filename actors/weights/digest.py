"""A 64-bit mark of a buffer's bytes, computed where they lie (GPU or CPU) in two passes over memory.

Not against malice: it finds lost, doubled, swapped and torn stretches, which is what transfers do to bytes. Words of 8
bytes are laid out as rows of `ROW_WORDS`; with all sums modulo 2**64,

    mark = sum_r a(r) * (sum of row r)  +  sum_c b(c) * (sum of column c)

with a(r) = 2 r + 1 and b(c) = K c, K even. A word's weight a + b is odd, hence invertible: any single changed word
changes the mark. Words that change places are found unless their difference is a multiple of a large power of two.
xxhash and BLAKE2 were considered: neither runs on a GPU, and copying to the host for them costs more than the transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

ROW_WORDS = 4096
ROW_BYTES = ROW_WORDS * 8
"""Buffers are padded with zeros to a multiple of this."""
_SPREAD = 4354685564936845354
"""2**65 / golden ratio modulo 2**64, as a signed word; even: keeps column weights away from row weights."""


def padded_bytes(num_bytes: int) -> int:
    """Size of a buffer that holds `num_bytes` and can be digested."""
    return -(-num_bytes // ROW_BYTES) * ROW_BYTES


def buffer_mark(buffer: Tensor) -> Tensor:
    """0-dim int64 on the buffer's device: the mark of a flat uint8 buffer of a multiple of ROW_BYTES."""
    words = buffer.view(torch.int64).view(-1, ROW_WORDS)
    rows, columns = words.sum(dim=1), words.sum(dim=0)
    row_weights = torch.arange(rows.numel(), device=buffer.device, dtype=torch.int64) * 2 + 1
    column_weights = torch.arange(ROW_WORDS, device=buffer.device, dtype=torch.int64) * _SPREAD
    return (rows * row_weights).sum() + (columns * column_weights).sum()


def join_marks(marks: Sequence[Tensor]) -> str:
    """The digest of several buffers: their marks in order, as hexadecimal words. Waits for the device."""
    numbers = cast("list[int]", torch.stack(list(marks)).cpu().tolist())  # pyright: ignore[reportUnknownMemberType]
    return ".".join(f"{number & 0xFFFFFFFFFFFFFFFF:016x}" for number in numbers)
