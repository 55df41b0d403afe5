"""Logits that are not drawn from as the model gives them: penalties for what an answer has already, and no early end.

Meaning and order are SGLang's, under its overlap schedule: frequency, early ends and presence are taken off, then
repetition divides; the temperature comes afterwards. Log-probs are of what is left, as in SGLang: of the
distribution that was drawn from, before top-p, top-k and min-p cut it. The answer is what this request brought forth; a
request that goes on with the tokens of an earlier one has them in its prompt, and prompts are not penalised.

Counts are made anew from the row's tokens in each step: a table of counts would be as large as slots times vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....core.messages import SamplingParams
from ....core.samples import I32
from .arrays import as_tensor


@dataclass(frozen=True, slots=True)
class Penalised:
    """A row, and what its logits depend on."""

    row: int
    sampling: SamplingParams
    answer: I32
    """int32 [tokens so far]."""
    end_ids: frozenset[int]
    """Kept away before the least length."""


def is_penalised(sampling: SamplingParams) -> bool:
    """Whether a request's logits are changed at all."""
    return bool(
        sampling.min_new_tokens
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1
    )


def penalise(logits: Tensor, rows: Sequence[Penalised]) -> None:
    """Change these rows of float32 logits [n, vocabulary] in place."""
    for one in rows:
        row, sampling = logits[one.row], one.sampling
        if len(one.answer):
            ids, counts = np.unique(one.answer, return_counts=True)
            index = as_tensor(ids.astype(np.int64))
            seen = row[index]
            seen -= sampling.frequency_penalty * as_tensor(counts.astype(np.float32))
            seen -= sampling.presence_penalty
            scale = sampling.repetition_penalty
            row[index] = torch.where(seen < 0, seen * scale, seen / scale)
        if len(one.answer) < sampling.min_new_tokens and one.end_ids:
            row[list(one.end_ids)] = -torch.inf
