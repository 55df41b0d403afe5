"""In which order a pass goes through the rows: a function of (seed, source, pass) alone, so that nothing is saved."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import cast

import numpy as np
import numpy.typing as npt

KEPT_PASSES = 2
"""Draws near the end of a pass mix with draws of the next."""


class Order:
    """Permutations of `num_rows` rows, one per pass."""

    def __init__(self, num_rows: int, seed: int, *, is_shuffled: bool, name: str = "") -> None:
        """`name`: of the source, so that several of one size do not all go the same way."""
        self._num_rows = num_rows
        self._seed = seed
        self._salt = [zlib.crc32(name.encode())] if name else []
        self._is_shuffled = is_shuffled
        self._kept: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()

    def row(self, pass_index: int, at: int) -> int:
        """The row that stands at `at` in that pass."""
        return int(self._permutation(pass_index)[at]) if self._is_shuffled else at

    def _permutation(self, pass_index: int) -> npt.NDArray[np.int64]:
        kept = self._kept.get(pass_index)
        if kept is None:
            # RandomState, not Generator: numpy promises that its streams never change between versions.
            words = [self._seed & 0xFFFFFFFF, (self._seed >> 32) & 0xFFFFFFFF, pass_index & 0xFFFFFFFF, *self._salt]
            kept = cast("npt.NDArray[np.int64]", np.random.RandomState(words).permutation(self._num_rows))
            self._kept[pass_index] = kept
            while len(self._kept) > KEPT_PASSES:
                self._kept.popitem(last=False)
        return kept
