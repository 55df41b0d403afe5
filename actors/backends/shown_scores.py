"""The trainer's log-probs of the few groups of a step that people are shown, out of the passes that are made anyway.

Nothing is computed for them, and the device is waited for once, at the end of the step. Knows shards and layouts. Must
not know models, ranks or who looks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...core.samples import ScoredSample, TrainShard
from .torch_backend.layout import I64
from .torch_backend.microbatch import ScoredRows


class ShownScores:
    """Of one step, on one rank."""

    def __init__(self, shard: TrainShard) -> None:
        self._samples = shard.samples
        self._groups = frozenset(shard.shown_groups)
        self._found: list[tuple[int, I64, Tensor]] = []

    def take(self, layout: ScoredRows, logprobs_M: Tensor) -> None:
        """Keep what is shown of one micro-batch: float [M], log-probs of the loss tokens of `layout`."""
        for k, i in enumerate(layout.members):
            if self._samples[i].group_id in self._groups:
                part = slice(int(layout.offsets[k]), int(layout.offsets[k + 1]))
                self._found.append((i, layout.columns_M[part], logprobs_M[part].detach().float()))

    def told(self) -> tuple[ScoredSample, ...]:
        """What was kept, on the host; empty if nobody is shown anything."""
        if not self._found:
            return ()
        values = torch.cat([part for _, _, part in self._found]).cpu().numpy()
        scores: list[ScoredSample] = []
        start = 0
        for i, columns, part in self._found:
            sample = self._samples[i]
            logprobs = np.zeros(len(sample.loss_mask), dtype=np.float32)
            logprobs[columns] = values[start : start + len(part)]
            scores.append(ScoredSample(group_id=sample.group_id, index=sample.index, logprobs=logprobs))
            start += len(part)
        return tuple(scores)
