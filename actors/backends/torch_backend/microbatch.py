"""A shard cut into micro-batches that are ready to compute: layout, and one value per loss token beside it.

All tensors are on the token axis M of the layout: loss tokens of all its samples, one after another. Masked tokens do
not appear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ....algos.segments import Segments
from ....core.errors import TrainError
from ....core.samples import F32, LossPart, Sample, TrainSample, TrainShard, check_sample
from .layout import I64
from .tensors import from_array


class ScoredRows(Protocol):
    """The position of each loss token of a micro-batch in its sample; see `Layout`."""

    @property
    def members(self) -> tuple[int, ...]: ...
    @property
    def offsets(self) -> I64: ...

    @property
    def num_tokens(self) -> int: ...


L = TypeVar("L", bound=ScoredRows)


@dataclass(slots=True)
class MicroBatch(Generic[L]):
    """One forward and backward pass. The fields at the end are filled in by the passes before training."""

    layout: L
    group_ids: tuple[int, ...]
    behaviour_M: Tensor
    """float32 [M]"""
    segments: Segments
    """Which of the layout's members each loss token belongs to."""
    scalar_S: Tensor
    """float32 [S]: sample-level advantages."""
    advantages_M: Tensor
    """float32 [M]"""
    given_M: Tensor | None = None
    """float32 [M]: advantages per token, where a function of the user's gave such, or turns have their own."""
    weights_M: Tensor | None = None
    """float32 [M]: factor of each token's loss; None: 1."""
    turn_rewards_M: Tensor | None = None
    """float32 [M]: what turns earned, at their last tokens."""
    parts: Mapping[LossPart, Tensor] = field(default_factory=dict[LossPart, Tensor])
    """int64: which of the M tokens belong to each part of the loss; empty: all to "algo"."""
    proximal_M: Tensor | None = None
    reference_M: Tensor | None = None
    values_M: Tensor | None = None
    """float32 [M]: the critic's, under its weights at the step's start."""
    returns_M: Tensor | None = None
    """float32 [M]: what its values are drawn to."""

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens


def trained_members(shard: TrainShard, micro: Sequence[int], *, skips_neutral: bool) -> list[int]:
    return [i for i in micro if not (skips_neutral and _is_neutral(shard.samples[i]))]


def _is_neutral(sample: TrainSample) -> bool:
    rows = (sample.token_advantages, sample.token_rewards)
    return sample.loss == "algo" and sample.advantage == 0.0 and not any(row is not None and row.any() for row in rows)


def check_samples(samples: Sequence[Sample], vocab_size: int) -> None:
    """Raise TrainError naming the first sample whose arrays disagree or that holds an impossible token, or that was
    drawn at a temperature that has no log-probs."""
    for sample in samples:
        try:
            check_sample(sample, vocab_size)
        except ValueError as error:
            raise TrainError(str(error), remedy="engine and trainer must use the same model folder") from error
        if not sample.prompt_ids.size and sample.loss_mask[:1].any():
            raise TrainError(
                f"sample {sample.name}: its first token has nothing in front that could predict it",
                remedy="a prompt needs at least one token",
            )
        if not (math.isfinite(sample.temperature) and sample.temperature >= 0):
            raise TrainError(
                f"sample {sample.name}: temperature = {sample.temperature} gives no log-probs to train on",
                remedy="tokens must be drawn at a temperature of 0 (greedy) or above",
            )


def batch_of(layout: L, samples: Sequence[TrainSample], device: torch.device) -> MicroBatch[L]:
    chosen = [samples[i] for i in layout.members]
    counts = np.diff(layout.offsets)
    behaviour = np.concatenate([s.logprobs[s.loss_mask != 0] for s in chosen] or [np.zeros(0, np.float32)])
    sample_M = from_array(np.repeat(np.arange(len(chosen)), counts))
    scalar = torch.tensor([s.advantage for s in chosen], dtype=torch.float32)
    return MicroBatch(
        layout=layout,
        group_ids=tuple(sorted({s.group_id for s in chosen})),
        behaviour_M=from_array(behaviour.astype(np.float32)).to(device),
        segments=Segments(sample_M.to(device), len(chosen)),
        scalar_S=scalar.to(device),
        advantages_M=scalar[sample_M].to(device),
        given_M=_rows(chosen, [(s.token_advantages, s.advantage) for s in chosen], device),
        weights_M=_rows(chosen, [(s.loss_weights, 1.0) for s in chosen], device),
        turn_rewards_M=_rows(chosen, [(s.token_rewards, 0.0) for s in chosen], device),
        parts=_parts(chosen, counts, device),
    )


def _parts(samples: Sequence[TrainSample], counts: I64, device: torch.device) -> dict[LossPart, Tensor]:
    if all(s.loss == "algo" for s in samples):
        return {}
    names = np.repeat([s.loss for s in samples], counts)
    return {s.loss: from_array(np.flatnonzero(names == s.loss)).to(device) for s in samples}


def served_reference(layout: ScoredRows, samples: Sequence[TrainSample], device: torch.device) -> Tensor:
    """Reference log-probs of the loss tokens of a layout of these samples, float32 [M], as the samples bring them.
    Raises TrainError naming one that does not."""
    rows: list[F32] = [np.zeros(0, np.float32)]
    for sample in (samples[i] for i in layout.members):
        if sample.reference_logprobs is None:
            raise TrainError(
                f"sample {sample.name}: there is a KL term, no reference model, and no reference log-probs with it",
                remedy="a bug in the planner, which looks for them",
            )
        rows.append(sample.reference_logprobs[sample.loss_mask != 0])
    return from_array(np.concatenate(rows).astype(np.float32)).to(device)


def _rows(
    samples: Sequence[TrainSample], values: Sequence[tuple[F32 | None, float]], device: torch.device
) -> Tensor | None:
    """Of all loss tokens, a row or one number for each sample; None if no sample has a row."""
    if all(row is None for row, _ in values):
        return None
    kept = [
        (np.full(len(s.loss_mask), number, np.float32) if row is None else row)[s.loss_mask != 0]
        for s, (row, number) in zip(samples, values, strict=True)
    ]
    return from_array(np.concatenate(kept).astype(np.float32)).to(device)
