"""Which token belongs to which sample: sums and means per sample without padding.

Shapes: T = loss tokens of a micro-batch, all samples one after another; S = samples.
Library: torch.nested and torch_scatter were considered. Nested tensors lack the scans needed here and change from
release to release; torch_scatter is a compiled extension for three lines of `index_add`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Owner of every loss token. A sample may have no token."""

    sample_T: Tensor
    """int64 [T], each in [0, num_samples), never decreasing."""
    num_samples: int

    def sum_S(self, x_T: Tensor) -> Tensor:
        """[S]: sum per sample; 0 for one without tokens. Differentiable."""
        zero_S = torch.zeros(self.num_samples, dtype=x_T.dtype, device=x_T.device)
        return zero_S.index_add(0, self.sample_T, x_T)

    def count_S(self) -> Tensor:
        """int64 [S]: tokens per sample."""
        return self.sum_S(torch.ones_like(self.sample_T))

    def mean_S(self, x_T: Tensor) -> Tensor:
        """[S]: mean per sample; 0 for one without tokens. Differentiable."""
        return self.sum_S(x_T) / self.count_S().clamp(min=1)

    def spread_T(self, x_S: Tensor) -> Tensor:
        """[T]: every token gets its sample's value."""
        return x_S[self.sample_T]

    def last_T(self) -> Tensor:
        """Bool [T]: True at the last token of each sample."""
        behind_T = torch.cat([self.sample_T[1:], self.sample_T.new_full((min(1, len(self.sample_T)),), -1)])
        return self.sample_T != behind_T

    def padded_SL(self, x_T: Tensor) -> Tensor:
        """[S, L]: each sample's tokens from the left, zeros behind; L = longest count."""
        columns_T, longest = self._columns()
        padded_SL = torch.zeros((self.num_samples, longest), dtype=x_T.dtype, device=x_T.device)
        padded_SL[self.sample_T, columns_T] = x_T
        return padded_SL

    def flat_T(self, x_SL: Tensor) -> Tensor:
        """[T]: undoes `padded_SL`."""
        return x_SL[self.sample_T, self._columns()[0]]

    def _columns(self) -> tuple[Tensor, int]:
        """Column in the padded form of each token, and the number of columns."""
        count_S = self.count_S()
        begin_S = count_S.cumsum(0) - count_S
        place_T = torch.arange(len(self.sample_T), device=self.sample_T.device)
        return place_T - begin_S[self.sample_T], int(count_S.max()) if self.num_samples else 0
