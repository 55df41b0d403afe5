"""Which token belongs to which sample, and which tokens count: sums and means per sample without padding.

Shapes: T = response tokens of a micro-batch, all samples one after another; S = samples.
Library: torch.nested and torch_scatter were considered. Nested tensors lack the scans needed here and change from
release to release; torch_scatter is a compiled extension for three lines of `index_add`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import TrainError


@dataclass(frozen=True, slots=True)
class Segments:
    """Loss mask and owner of every response token. A sample may have no token, or only masked ones."""

    mask_T: Tensor
    """bool [T]: True where the model generated the token."""
    sample_T: Tensor
    """int64 [T], each in [0, num_samples), never decreasing."""
    num_samples: int

    @staticmethod
    def of(mask_T: Tensor, sample_T: Tensor, num_samples: int) -> Segments:
        """From a mask of any number type. Raises TrainError when the shapes disagree."""
        if mask_T.dim() != 1 or mask_T.shape != sample_T.shape:
            raise TrainError(
                f"loss mask has shape {tuple(mask_T.shape)}, sample numbers {tuple(sample_T.shape)}",
                remedy="both must be [T], one entry for each response token",
            )
        # On an accelerator the check would wait for the device; there a wrong number fails in `index_add`.
        if sample_T.numel() and sample_T.device.type == "cpu":
            first, last = int(sample_T[0]), int(sample_T[-1])
            if first < 0 or last >= num_samples or bool((sample_T[1:] < sample_T[:-1]).any()):
                raise TrainError(
                    f"sample numbers of the tokens run from {first} to {last} for {num_samples} samples",
                    remedy="tokens lie sample after sample, numbered from 0 in that order",
                )
        return Segments(mask_T.bool(), sample_T.long(), num_samples)

    def kept(self, x_T: Tensor) -> Tensor:
        """[T]: `x_T` where the mask holds, exactly 0 elsewhere, even over NaN and infinity."""
        return torch.where(self.mask_T, x_T, torch.zeros((), dtype=x_T.dtype, device=x_T.device))

    def sum_S(self, x_T: Tensor) -> Tensor:
        """[S]: masked sum per sample; 0 for a fully masked sample. Differentiable."""
        zero_S = torch.zeros(self.num_samples, dtype=x_T.dtype, device=x_T.device)
        return zero_S.index_add(0, self.sample_T, self.kept(x_T))

    def count_S(self) -> Tensor:
        """int64 [S]: tokens with mask per sample."""
        zero_S = torch.zeros(self.num_samples, dtype=torch.int64, device=self.mask_T.device)
        return zero_S.index_add(0, self.sample_T, self.mask_T.long())

    def mean_S(self, x_T: Tensor) -> Tensor:
        """[S]: masked mean per sample; 0 for a fully masked sample. Differentiable."""
        return self.sum_S(x_T) / self.count_S().clamp(min=1)

    def spread_T(self, x_S: Tensor) -> Tensor:
        """[T]: every token gets its sample's value."""
        return x_S[self.sample_T]

    def last_T(self) -> Tensor:
        """Bool [T]: True at the last unmasked token of each sample; nowhere in a fully masked sample."""
        place_T = torch.arange(self.mask_T.shape[0], device=self.mask_T.device)
        nowhere_S = torch.full((self.num_samples,), -1, dtype=torch.int64, device=self.mask_T.device)
        kept_T = torch.where(self.mask_T, place_T, -1)
        last_S = nowhere_S.scatter_reduce(0, self.sample_T, kept_T, "amax")
        return place_T == self.spread_T(last_S)

    def padded_SL(self, x_T: Tensor) -> Tensor:
        """[S, L]: unmasked tokens only, each sample's from the left, zeros behind; L = longest count."""
        row_K, column_K, longest = self._places()
        padded_SL = torch.zeros((self.num_samples, longest), dtype=x_T.dtype, device=x_T.device)
        padded_SL[row_K, column_K] = x_T[self.mask_T]
        return padded_SL

    def flat_T(self, x_SL: Tensor) -> Tensor:
        """[T]: undoes `padded_SL`; 0 at masked tokens."""
        row_K, column_K, _ = self._places()
        flat_T = torch.zeros(self.mask_T.shape[0], dtype=x_SL.dtype, device=x_SL.device)
        flat_T[self.mask_T] = x_SL[row_K, column_K]
        return flat_T

    def _places(self) -> tuple[Tensor, Tensor, int]:
        """Row and column in the padded form of each unmasked token, and the number of columns."""
        count_S = self.count_S()
        begin_S = count_S.cumsum(0) - count_S
        row_K = self.sample_T[self.mask_T]
        column_K = torch.arange(row_K.shape[0], device=row_K.device) - begin_S[row_K]
        longest = int(count_S.max()) if self.num_samples else 0
        return row_K, column_K, longest
