"""A piece of shared memory as its producer sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.errors import SlabError
from .ledger import Block, BlockState, Ledger
from .slab_pool import SlabPool

LOOK_S = 0.01


class TensorBlock:
    """See `Tensors.allocate`. Fill `array`, then send it or contiguous parts of it, to as many as wanted."""

    def __init__(self, block: Block, array: npt.NDArray[Any], ledger: Ledger, pool: SlabPool) -> None:
        self._block = block
        self._array = array
        self._ledger = ledger
        self._pool = pool
        self._is_left = False

    @property
    def array(self) -> npt.NDArray[Any]:
        """Writable. Leave it alone while it is lent: until a call with it has returned, and see `reclaim`."""
        if self._is_left:
            raise SlabError("the block was left; its memory may be another's now")
        return self._array

    @property
    def is_lent(self) -> bool:
        """Somebody reads it, or may begin to."""
        return self._block.state is not BlockState.OWNED

    async def reclaim(self, timeout_s: float) -> None:
        """Wait until nobody reads it any more, then it may be written again.

        Raises SlabError after `timeout_s`, naming who still does.
        """
        if self._is_left:
            raise SlabError("the block was left; its memory may be another's now")
        try:
            async with asyncio.timeout(timeout_s):
                while self.is_lent:
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            names = ", ".join(map(str, self._ledger.holders_of(self._block)))
            raise SlabError(f"a block is still read after {timeout_s:g} s by {names}") from None
        self._pool.unpublish(self._block)
        self._ledger.renew(self._block)

    def leave(self) -> None:
        """Its producer is done; what is lent stays until its readers are."""
        if not self._is_left:
            self._is_left = True
            self._array.flags.writeable = False
            self._array = np.empty(0)
            self._pool.freed(self._ledger.let_go(self._block))
