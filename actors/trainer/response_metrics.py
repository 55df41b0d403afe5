"""How long the answers of a batch are, and how much they repeat themselves. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.samples import I32, Sample

NGRAM = 4
TAIL_TOKENS = 1024
"""Of an answer's end: a model that falls into a loop stays in it until it is cut off, and long batches cost no more."""
QUANTILES = (10, 50, 90, 99)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def response_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Quantiles and the longest, in response tokens; share of repeated n-grams, over the samples."""
    lengths = np.asarray([len(sample.response_ids) for sample in samples])
    values = np.percentile(lengths, QUANTILES, method="lower")
    repeated = [repetition(sample.response_ids) for sample in samples]
    return {
        **{f"batch/response_tokens_p{q}": float(value) for q, value in zip(QUANTILES, values, strict=True)},
        "batch/response_tokens_max": float(lengths.max()),
        "batch/repetition_mean": float(np.mean(repeated)),
        "batch/repetition_max": float(max(repeated)),
    }


def repetition(ids: I32) -> float:
    """Share of the n-grams of an answer's end that were there before in it: 0 nothing repeats, near 1 a loop. Different
    n-grams are taken for equal with a chance below 1e-13."""
    tail = ids[-TAIL_TOKENS:].astype(np.uint64) + np.uint64(1)
    count = len(tail) - NGRAM + 1
    if count < 2:
        return 0.0
    mixed = np.zeros(count, dtype=np.uint64)
    for place in range(NGRAM):
        mixed = (mixed ^ tail[place : place + count]) * _MULTIPLIER
        mixed ^= mixed >> np.uint64(29)
    return 1.0 - len(np.unique(mixed)) / count
