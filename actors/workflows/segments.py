"""Runs of tokens of one origin, of which a sample is made. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.samples import F32, I32, NO_VERSION, Sample


@dataclass(frozen=True, slots=True)
class Segment:
    """A model turn (mask 1) or a reply (mask 0)."""

    ids: I32
    logprobs: F32
    versions: I32
    is_model: bool

    def first(self, num_tokens: int) -> Segment:
        """Its beginning."""
        part = slice(num_tokens)
        return Segment(self.ids[part], self.logprobs[part], self.versions[part], self.is_model)


def unstamped(ids: Sequence[int] | I32, *, is_model: bool) -> Segment:
    """Tokens that no engine generated."""
    array = np.asarray(ids, dtype=np.int32)
    return Segment(array, np.zeros(len(array), np.float32), np.full(len(array), NO_VERSION, np.int32), is_model)


def split(sample: Sample) -> list[Segment]:
    """Cut a recorded sample into runs of equal loss mask."""
    mask = sample.loss_mask
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [
        Segment(sample.response_ids[a:b], sample.logprobs[a:b], sample.versions[a:b], bool(mask[a]))
        for a, b in itertools.pairwise(cuts)
        if b > a
    ]


def joined(parts: Sequence[Segment]) -> Segment:
    """One run of model tokens from its parts."""
    if not parts:
        return Segment(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), is_model=True)
    return Segment(
        np.concatenate([part.ids for part in parts]).astype(np.int32, copy=False),
        np.concatenate([part.logprobs for part in parts]).astype(np.float32, copy=False),
        np.concatenate([part.versions for part in parts]).astype(np.int32, copy=False),
        is_model=True,
    )
