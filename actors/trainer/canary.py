"""Does the engine compute what the trainer computes? When to ask, and what the answer means. Pure: no IO, no time.

A few prompts are answered by an engine and scored by the trainer under the same weight version. Both tell log p(token)
of the same tokens from the same weights, so the mean absolute difference measures what lies between them: precision,
kernels, a wrong layout of a tensor, a weight that never arrived. The mean tells such things apart; the maximum does
not, since one unlikely token in bf16 may be off by a nat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.samples import F32, Sample, TrainSample

BOUNDS: Mapping[str, float] = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05, "fp8": 0.15}
"""Coarsest precision on either side -> nats; about 2.5 times what was seen of sound pairs on GPUs (bf16 0.02)."""
ORDER = ("float32", "float16", "bfloat16", "fp8")
"""From fine to coarse."""
COARSE_WORDS = ("fp8", "int8", "int4", "awq", "gptq", "w4a", "w8a", "fp4")
"""Beginnings and parts of names of quantisations."""


def precision_of(trainer_dtype: str, engine_dtype: str, engine_table: Mapping[str, Any]) -> str:
    """The coarsest precision that takes part: key of `BOUNDS`. `engine_table` is `[sglang]`."""
    quantised = f"{engine_table.get('quantization', '')} {engine_table.get('kv_cache_dtype', '')}".lower()
    if any(word in quantised for word in COARSE_WORDS):
        return "fp8"
    return max(trainer_dtype, engine_dtype, key=ORDER.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOptions:
    """What is asked how often."""

    every: int
    """Versions between two checks; 0: never."""
    bound: float
    """Nats."""
    is_fatal: bool = False
    """Whether the run ends, rather than pauses, above the bound."""

    def is_due(self, version: int, checked: int | None) -> bool:
        """The first time, then at every multiple of `every`, or at the first version after it that engines are given.
        `checked`: the version that was looked at last; None: none yet."""
        return self.every > 0 and (checked is None or version // self.every > checked // self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a check found."""

    mean_diff: float
    """Mean |log p(engine) - log p(trainer)| over the tokens compared, nats."""
    max_diff: float
    num_tokens: int
    """Tokens compared; 0: nothing can be said."""
    complaint: str = ""
    """Why the run must not go on; empty when it may."""


def as_train_samples(samples: Sequence[Sample]) -> tuple[TrainSample, ...]:
    """What a trainer rank can score: the engine's tokens, no advantage."""
    return tuple(
        TrainSample(
            group_id=sample.group_id,
            index=sample.index,
            token_ids=np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int32, copy=False),
            prompt_len=len(sample.prompt_ids),
            loss_mask=sample.loss_mask,
            logprobs=sample.logprobs,
            versions=sample.versions,
            reward=0.0,
            advantage=0.0,
            temperature=sample.temperature or 1.0,
        )
        for sample in samples
    )


def judge(version: int, who: str, samples: Sequence[Sample], scores: F32, bound: float) -> Verdict:
    """Compare. `scores`: float32 [sum of R], the trainer's log-probs of all response tokens in order.

    Tokens that another version generated are left out. A difference that is no number is above every bound. Raises
    ValueError when the scores are of other tokens.
    """
    if not samples:
        return Verdict(mean_diff=0.0, max_diff=0.0, num_tokens=0)
    engine = np.concatenate([sample.logprobs for sample in samples])
    if scores.shape != engine.shape:
        raise ValueError(f"{scores.shape[0]} scores for {engine.shape[0]} tokens")
    versions = np.concatenate([sample.versions for sample in samples])
    mask = np.concatenate([sample.loss_mask for sample in samples])
    chosen = (versions == version) & (mask == 1)
    num_tokens = int(chosen.sum())
    if not num_tokens:
        return Verdict(mean_diff=0.0, max_diff=0.0, num_tokens=0)
    diff = np.abs(engine[chosen].astype(np.float64) - scores[chosen].astype(np.float64))
    mean, most = float(diff.mean()), float(diff.max())
    complaint = ""
    if not mean <= bound:
        complaint = (
            f"{who} and the trainer disagree at weight version {version}: mean |log-prob difference| {mean:.3g} nats "
            f"over {num_tokens} tokens (at most {most:.3g}), guard.bound is {bound:g}"
        )
    return Verdict(mean_diff=mean, max_diff=most, num_tokens=num_tokens, complaint=complaint)
