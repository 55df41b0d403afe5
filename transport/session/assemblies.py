"""Large envelopes that are half received on one lane, by connection. Sans-IO.

Memory grows with the bytes that have come, never with what was announced; per connection one envelope of at most
`Limits.message`, over all connections `limit_bytes`. Over that an envelope is given up, and its other chunks with it.
"""

from __future__ import annotations

import os

from .frames import HEADER_BYTES, Assembly, Chunk, Malformed


def room_bytes() -> int:
    """For all half-received envelopes of a process: a quarter of the machine's memory, at least 2 GiB."""
    return max(2 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


class Assemblies:
    """See the module's head."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = room_bytes() if limit_bytes is None else limit_bytes
        self._parts: dict[bytes, Assembly] = {}
        self._given_up: dict[bytes, int] = {}
        """Connection -> total of the envelope whose chunks are dropped."""
        self.num_bytes = 0
        """Held now."""

    def add(self, source: bytes, chunk: Chunk) -> memoryview | Malformed | None:
        """The whole envelope with its last chunk; Malformed for one out of order; None: there is more to come.

        Raises MemoryError if the process may not have so much; the caller gives it up then.
        """
        if chunk.index == 0:
            self._given_up.pop(source, None)
        elif self._given_up.get(source) == chunk.total:
            return None
        part = self._parts.setdefault(source, Assembly())
        before = part.num_bytes
        try:
            result = part.add(chunk)
        finally:
            self.num_bytes += part.num_bytes - before
        if part.num_bytes == 0:
            del self._parts[source]
        return result

    def overflow(self, source: bytes, chunk: Chunk) -> bytes | None:
        """If there is no room for what comes next: the beginning of the envelope that is given up."""
        if self.num_bytes + len(chunk.data) <= self._limit_bytes or self._given_up.get(source) == chunk.total:
            return None
        return self.give_up(source, chunk)

    def give_up(self, source: bytes, chunk: Chunk) -> bytes:
        """Drop the envelope that this chunk is of, and what still comes of it; returns its beginning."""
        part = self._parts.pop(source, None)
        self._given_up[source] = chunk.total
        head = bytes(chunk.data[: 2 * HEADER_BYTES]) if part is None or chunk.index == 0 else part.head
        if part is not None:
            self.num_bytes -= part.num_bytes
        return head

    def forget(self, source: bytes) -> None:
        """That connection is over."""
        part = self._parts.pop(source, None)
        if part is not None:
            self.num_bytes -= part.num_bytes
        self._given_up.pop(source, None)
