"""A large envelope that is not put together: its arrays stay where they are until the network takes them piecemeal.

Putting 64 MiB together costs as much as sending them, and holds up the loop. The arrays are the caller's, who leaves
them alone until the call ends; a call that ends while pieces are still to be sent copies what is left (`keep`).
ZeroMQ's own sending without a copy was considered: the arrays would have to stay as they are until the *peer* has them.
"""

from __future__ import annotations

import struct
from typing import cast

import msgspec

from .frames import CHUNK_HEADER_BYTES, LIMITS, Buffer, Envelope, aligned, chunk_header, encode

_NUM_FRAMES = struct.Struct("<I")
_NUM_FRAMES_OFFSET = 36


class Lent:
    """The bytes that `encode` would make of an envelope."""

    __slots__ = ("_length", "_parts", "head")

    def __init__(self, envelope: Envelope) -> None:
        frames = envelope.frames
        plain = encode(msgspec.structs.replace(envelope, frames=()))
        at = len(plain) - len(envelope.body)
        table = struct.pack(f"<{len(frames)}I", *map(len, frames))
        self.head = bytearray(b"".join([memoryview(plain)[:at], table, memoryview(plain)[at:]]))
        """Everything before the arrays; may be stamped."""
        _NUM_FRAMES.pack_into(self.head, _NUM_FRAMES_OFFSET, len(frames))
        self._parts: list[tuple[int, memoryview]] = [(0, memoryview(self.head))]
        """Where each part begins; between parts there are zeros."""
        self._length = len(self.head)
        for frame in frames:
            start = aligned(self._length, len(frame))
            self._parts.append((start, memoryview(frame)))
            self._length = start + len(frame)

    @property
    def disguised(self) -> bytearray:
        """Itself, typed as what most parcels hold: it has their length and their head."""
        return cast("bytearray", self)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        """A byte of the head."""
        return self.head[index]

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with what begins at `offset`."""
        end = offset + len(target)
        done = offset
        for start, part in self._parts:
            first, last = max(done, start), min(end, start + len(part))
            if first < last:
                target[done - offset : first - offset] = bytes(first - done)
                target[first - offset : last - offset] = part[first - start : last - start]
                done = last
        target[done - offset :] = bytes(end - done)

    def keep(self) -> None:
        """The arrays go back to their owner: copy them, if they were not released."""
        self._parts = [(start, memoryview(bytes(part))) for start, part in self._parts]

    def release(self) -> None:
        """All is sent."""
        self._parts = []


def lent_of(data: object) -> Lent | None:
    """What a parcel holds, if it is one."""
    return data if type(data) is Lent else None


def fill_chunk(scratch: bytearray, data: Buffer, offset: int) -> memoryview:
    """The chunk that begins at `offset`, with its header, in memory that is used again for the next one."""
    size = min(LIMITS.chunk, len(data) - offset)
    end = CHUNK_HEADER_BYTES + size
    if len(scratch) < end:
        scratch.extend(bytes(end - len(scratch)))
    made = memoryview(scratch)[:end]
    made[:CHUNK_HEADER_BYTES] = chunk_header(offset // LIMITS.chunk, offset, len(data))
    lent = lent_of(data)
    if lent is not None:
        lent.read_into(made[CHUNK_HEADER_BYTES:], offset)
    else:
        made[CHUNK_HEADER_BYTES:] = memoryview(data)[offset : offset + size]
    return made
