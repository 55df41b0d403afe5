"""The slabs of this process and the blocks cut from them. Bounded: who finds no room waits, and then does without."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterable

from ...core.errors import SlabError
from .copier import Copier
from .ledger import Block, BlockLedger, whole_pages
from .slab import Bytes, Slab, region

SLAB_BYTES = 64 << 20
"""Of a slab for blocks that are no larger; a larger block has a slab of its own size."""
IDLE_S = 30.0

_log = logging.getLogger("myxa.transport")


class SlabPool:
    """Owns the memory; `BlockLedger` decides who has it."""

    def __init__(self, ledger: BlockLedger, copier: Copier, pool_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        """All slabs together, at most."""
        self._ledger = ledger
        self._copier = copier
        self._slabs: dict[int, Slab] = {}
        self._numbers = itertools.count()
        self._idle_since: dict[int, float] = {}
        self._growing = asyncio.Lock()
        self._room = asyncio.Event()
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Taken from the host now."""
        return sum(slab.num_bytes for slab in self._slabs.values())

    async def allocate(self, num_bytes: int, wait_s: float) -> Block | None:
        """A block, after waiting for room up to `wait_s`; None: there is none (and never will be, if it is larger
        than the pool)."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + wait_s
        while not self._is_closed and whole_pages(num_bytes) <= self.pool_bytes:
            block = self._ledger.allocate(num_bytes)
            if block is not None:
                return block
            if await self._grow(num_bytes):
                continue
            self._room.clear()
            try:
                async with asyncio.timeout_at(give_up_at):
                    await self._room.wait()
            except TimeoutError:
                return None
        return None

    async def _grow(self, num_bytes: int) -> bool:
        """Take a slab that has room for such a block; True: look again."""
        async with self._growing:
            needed = whole_pages(num_bytes)
            for number in self._ledger.idle_slabs():
                if self.num_bytes + needed <= self.pool_bytes:
                    break
                self._drop(number)
            room = self.pool_bytes - self.num_bytes
            if room < needed or self._is_closed:
                return False
            size = max(needed, min(SLAB_BYTES, room))
            try:
                slab = await self._copier.run(lambda: Slab(secrets.randbits(62), size))
            except SlabError as error:
                _log.warning("%s", error)
                return False
            if self._is_closed:
                slab.close()
                return False
            number = next(self._numbers)
            self._slabs[number] = slab
            self._ledger.add_slab(number, size)
            return True

    def slab(self, block: Block) -> Slab:
        return self._slabs[block.slab]

    def memory(self, block: Block) -> Bytes:
        """The block's bytes, writable, for as long as an array over them lives; the pool may be closed before."""
        slab = self._slabs[block.slab]
        start = slab.base + block.offset
        whole = slab.memory
        return region(start, block.num_bytes, lambda: _keep(whole))

    def publish(self, block: Block) -> None:
        """It is written; readers may look."""
        self._set_word(block, block.generation)

    def unpublish(self, block: Block) -> None:
        """It is about to be written."""
        self._set_word(block, 0)

    def _set_word(self, block: Block, word: int) -> None:
        slab = self._slabs.get(block.slab)  # none after `close`, when producers may still be in the middle
        if slab is not None:
            slab.publish(block.slot, word)

    def find(self, address: int, num_bytes: int) -> tuple[Block, int] | None:
        """The block in use that contains these bytes of our own memory, and their offset in its slab."""
        for number, slab in self._slabs.items():
            offset = address - slab.base
            if 0 <= offset <= slab.num_bytes - num_bytes:
                block = self._ledger.find(number, offset, num_bytes)
                return (block, offset) if block is not None else None
        return None

    def freed(self, blocks: Iterable[Block]) -> None:
        """Nobody uses these any more."""
        for block in blocks:
            self._set_word(block, 0)
            self._room.set()

    def trim(self, now: float) -> None:
        """Give slabs back that were idle for a while."""
        idle = self._ledger.idle_slabs()
        self._idle_since = {number: self._idle_since.get(number, now) for number in idle}
        for number in idle:
            if now - self._idle_since[number] >= IDLE_S:
                self._drop(number)

    def _drop(self, number: int) -> None:
        self._ledger.remove_slab(number)
        self._idle_since.pop(number, None)
        self._slabs.pop(number).close()

    def close(self) -> None:
        """Let go of all slabs; readers keep what they use."""
        self._is_closed = True
        self._room.set()
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()


def _keep(_whole: Bytes) -> None:
    """Called when the last array over a block is gone; until then its argument kept the slab's memory."""
