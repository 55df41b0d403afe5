"""From messages of the network to envelopes: splits batches, joins chunks. Sans-IO.

Memory grows with the bytes that have come, never with what was announced; per connection one envelope of at most
`Limits.message`, over all connections `limit_bytes`. Over that limit an envelope is dropped with its remaining chunks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ..wire import Lane, Sink
from .frames import HEADER_BYTES, Assembly, Chunk, Malformed, split


class Unwrapping:
    """Of one lane's incoming connections."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._assemblies = Assemblies()

    def forget(self, source: bytes) -> None:
        """That connection is over: drop what is half received from it."""
        self._assemblies.forget(source)

    def envelopes(self, sink: Sink, source: bytes, message: memoryview) -> Iterator[memoryview]:
        """Those in a message; of one that makes no sense the sink is told, and there are none."""
        parts = split(message)
        if isinstance(parts, Chunk):
            whole = self._assembled(sink, source, parts)
            parts = whole if isinstance(whole, Malformed) else [whole] if whole is not None else []
        if isinstance(parts, Malformed):
            sink.malformed(source, self._lane, parts.reason)
            return iter(())
        return iter(parts)

    def _assembled(self, sink: Sink, source: bytes, chunk: Chunk) -> memoryview | Malformed | None:
        if not sink.is_known(source, self._lane):
            return Malformed(reason="a chunk before HELLO")
        given_up = self._assemblies.overflow(source, chunk)
        if given_up is not None:
            sink.overflowed(source, self._lane, given_up, chunk.total)
            return None
        try:
            return self._assemblies.add(source, chunk)
        except MemoryError:  # the kernel's limits may be narrower than ours
            sink.overflowed(source, self._lane, self._assemblies.give_up(source, chunk), chunk.total)
            return None


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
