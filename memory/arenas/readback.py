"""Reading what is on a device, piece by piece: for digests, and to prove that a copy is one."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator

from ...core.errors import MemoryFault
from . import libc
from .driver import VmmDriver
from .tagged_memory import Chunk, TaggedMemory

PIECE_BYTES = 16 << 20


class Readback:
    """One small buffer of its own, made at first use: a full host pool does not stop a digest."""

    def __init__(self, driver: VmmDriver) -> None:
        self._driver = driver
        self._buffer = 0

    def digest(self, memory: TaggedMemory) -> str:
        """BLAKE2b of the bytes that were asked for, in the order of allocation; wherever they are now."""
        state = hashlib.blake2b(digest_size=16)
        for region in memory.regions.values():
            left = region.num_bytes
            for chunk in region.chunks:
                for piece in self._pieces(chunk, min(left, chunk.num_bytes), is_on_host=memory.backing == "host"):
                    state.update(piece)
                left -= min(left, chunk.num_bytes)
        return state.hexdigest()

    def prove(self, chunk: Chunk, slab: int) -> None:
        """MemoryFault unless device and host copy are the same bytes."""
        at = slab
        for piece in self._pieces(chunk, chunk.num_bytes, is_on_host=False):
            if not libc.is_equal(self._buffer, at, len(piece)):
                raise MemoryFault(
                    f"the copy of {chunk.num_bytes:,} bytes at {chunk.address:#x} differs from its original",
                    remedy="do not trust this device or this host memory; see the driver's log",
                )
            at += len(piece)

    def checksum(self, chunk: Chunk, slab: int) -> int:
        """CRC-32 of the host copy."""
        return zlib.crc32(libc.view(slab, chunk.num_bytes))

    def close(self) -> None:
        buffer, self._buffer = self._buffer, 0
        if buffer:
            libc.unmap(buffer, PIECE_BYTES)

    def _pieces(self, chunk: Chunk, num_bytes: int, *, is_on_host: bool) -> Iterator[memoryview]:
        for start in range(0, num_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, num_bytes - start)
            if is_on_host:
                yield libc.view((chunk.slab or 0) + start, size)
                continue
            self._buffer = self._buffer or libc.map_anonymous(PIECE_BYTES)
            self._driver.wait(self._driver.copy_out(self._buffer, chunk.address + start, size))
            yield libc.view(self._buffer, size)
