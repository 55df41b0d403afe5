"""From messages of the network to envelopes: a batch comes apart, a last chunk makes an envelope whole. Sans-IO."""

from __future__ import annotations

from collections.abc import Iterator

from ..wire import Lane, Sink
from .assemblies import Assemblies
from .frames import Chunk, Malformed, split


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
