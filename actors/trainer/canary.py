"""The canary check: does the engine compute what the trainer computes?

Both give log p(token) of the same tokens from the same weights, so the mean absolute difference measures precision,
kernels, a wrong layout of a tensor, a weight that never arrived. The maximum does not separate these: one unlikely
token in bf16 may be off by a nat.

    loop -> coordinator.canary(v)     an engine that serves v answers the canary prompts (the trainer stays at v)
    loop -> all ranks: score          log-probs of those tokens under v
    above the bound                   coordinator.pause(reason): nothing is drawn or claimed until an operator resumes

A check that cannot be made (no engine has that version, an engine failed) is reported and does not stop the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.actor import ActorContext
from ...core.errors import MyxaError, TrainError
from ...core.messages import CanaryAnswers
from ...core.refs import ActorGroup
from ...core.retry import until_answered
from ...core.samples import F32, Sample
from ..contracts import CoordinatorContract, TrainerContract

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
class CanaryVerdict:
    """What a check found."""

    mean_diff: float
    """Mean |log p(engine) - log p(trainer)| over the tokens compared, nats."""
    max_diff: float
    num_tokens: int
    """Tokens compared; 0: nothing can be said."""
    complaint: str = ""
    """Why the run must stop; empty if it may continue."""


def judge(version: int, who: str, samples: Sequence[Sample], scores: F32, bound: float) -> CanaryVerdict:
    """Compare. `scores`: float32 [sum of R], the trainer's log-probs of all response tokens in order. Tokens that
    another version generated are left out. A difference that is no number is above every bound. Raises ValueError when
    the scores are of other tokens."""
    if not samples:
        return CanaryVerdict(mean_diff=0.0, max_diff=0.0, num_tokens=0)
    engine = np.concatenate([sample.logprobs for sample in samples])
    if scores.shape != engine.shape:
        raise ValueError(f"{scores.shape[0]} scores for {engine.shape[0]} tokens")
    versions = np.concatenate([sample.versions for sample in samples])
    mask = np.concatenate([sample.loss_mask for sample in samples])
    chosen = (versions == version) & (mask == 1)
    num_tokens = int(chosen.sum())
    if not num_tokens:
        return CanaryVerdict(mean_diff=0.0, max_diff=0.0, num_tokens=0)
    diff = np.abs(engine[chosen].astype(np.float64) - scores[chosen].astype(np.float64))
    mean, most = float(diff.mean()), float(diff.max())
    complaint = ""
    if not mean <= bound:
        complaint = (
            f"{who} and the trainer disagree at weight version {version}: mean |log-prob difference| {mean:.3g} nats "
            f"over {num_tokens} tokens (at most {most:.3g}), guard.bound is {bound:g}"
        )
    return CanaryVerdict(mean_diff=mean, max_diff=most, num_tokens=num_tokens, complaint=complaint)


REMEDY = "compare both by hand before going on: see docs/engines.md; `guard.every = 0` switches the check off"


@dataclass(slots=True)
class CanaryGuard:
    """See the module's head. One per leader."""

    ctx: ActorContext
    options: CanaryOptions
    ranks: ActorGroup[TrainerContract]
    meter: ActivityMeter
    telemetry: TelemetryBuffer
    _checked: int | None = None
    """Version that was looked at last; None: none yet."""

    async def check(self, version: int, scoring: Callable[[], AbstractAsyncContextManager[None]] = nullcontext) -> None:
        """If it is due. `scoring`: inside it the trainer can score. Raises TrainError above the bound if `is_fatal`."""
        if not self.options.is_due(version, self._checked):
            return
        self._checked = version
        coordinator = self.ctx.ref(CoordinatorContract, "coordinator")
        with self.meter.during("wait-weights", f"canary {version}"):
            try:
                answers = await coordinator.canary(version)
            except MyxaError as err:
                self.telemetry.event("guard-skipped", f"version {version}: {err.message}")
                self.ctx.log.warning("version %d was not compared with an engine: %s", version, err)
                return
            async with scoring():
                verdict = await self._compare(version, answers)
        if not verdict.num_tokens:
            self.telemetry.event("guard-skipped", f"version {version}: the engine answered with no token of it")
            return
        values = {"guard/logprob_diff": verdict.mean_diff, "guard/logprob_diff_max": verdict.max_diff}
        self.telemetry.metric(version, values)
        if not verdict.complaint:
            return
        if self.options.is_fatal:
            raise TrainError(verdict.complaint, remedy=REMEDY)
        self.ctx.log.error("%s -- %s", verdict.complaint, REMEDY)
        reason = f"{verdict.complaint} -- {REMEDY}"
        await until_answered(
            lambda: coordinator.pause(reason), who="coordinator", clock=self.ctx.clock, log=self.ctx.log
        )

    async def _compare(self, version: int, answers: CanaryAnswers) -> CanaryVerdict:
        logprobs = np.zeros(0, np.float32)
        if answers.samples:  # ranks have nothing to run for none
            scores = (await self.ranks.all(TrainerContract.score, answers.samples))["trainer/0"]
            logprobs = np.asarray(scores.logprobs, dtype=np.float32)
        return judge(version, answers.rollout, answers.samples, logprobs, self.options.bound)
