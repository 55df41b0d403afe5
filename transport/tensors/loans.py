"""Arrays of callers that others may pull out of our private memory while a call is under way.

Each loan has a generation word that the reader copies before and after the data. The word is cleared when the loan
ends, before the caller gets its array back; a reader that is late or in the middle therefore knows that what it read
may have changed, and throws it away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .region import address_of

MAX_LOANS = 1024


@dataclass(frozen=True, slots=True)
class Loan:
    """One array on loan."""

    slot: int
    address: int
    num_bytes: int
    word: int
    """Address of the generation word."""
    generation: int


class Loans:
    """All loans of this process."""

    def __init__(self, first_generation: int) -> None:
        self._next_generation = first_generation
        self._words = np.zeros(MAX_LOANS, dtype=np.uint64)
        self._base = int(self._words.__array_interface__["data"][0])
        self._free = list(range(MAX_LOANS))
        self._lent: dict[int, memoryview] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, memory: memoryview) -> Loan | None:
        """From now until `end` these bytes may be read by others; they stay in memory. None: too many loans."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._next_generation += 1
        self._lent[slot] = memory
        self._words[slot] = self._next_generation
        address = address_of(np.frombuffer(memory, dtype=np.uint8))
        return Loan(slot, address, memory.nbytes, self._base + 8 * slot, self._next_generation)

    def end(self, loan: Loan) -> None:
        """What is read from now on is void."""
        self._words[loan.slot] = 0
        del self._lent[loan.slot]
        self._free.append(loan.slot)
