"""The canary check as the trainer's leader makes it, between two steps: engine's answers, trainer's scores, verdict.

    leader -> coordinator.canary(v)   an engine that serves v answers the canary prompts (the trainer stands at v)
    leader -> all ranks: score        log-probs of those tokens under v
    above the bound                   coordinator.pause(reason): nothing is drawn or claimed until somebody resumes

A check that cannot be made (no engine came to that version, an engine failed) is told and does not stop the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace

import numpy as np

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.actor import ActorContext
from ...core.actor_group import ActorGroup
from ...core.errors import MyxaError, TrainError
from ...core.messages import CanaryAnswers
from ...core.patience import until_answered
from ..contracts.roles import CoordinatorContract, TrainerContract
from .canary import CanaryOptions, Verdict, as_train_samples, judge

REMEDY = "compare both by hand before going on: see docs/engines.md; `guard.every = 0` switches the check off"


class Guard:
    """See the module's head. One per leader."""

    def __init__(
        self,
        ctx: ActorContext,
        options: CanaryOptions,
        ranks: ActorGroup[TrainerContract],
        meter: ActivityMeter,
        telemetry: TelemetryBuffer,
    ) -> None:
        self._ctx = ctx
        self._options = options
        self.every = options.every
        """Live: versions between two checks; 0: never."""
        self._checked: int | None = None
        self._ranks = ranks
        self._meter = meter
        self._telemetry = telemetry
        self._coordinator = ctx.ref(CoordinatorContract, "coordinator")

    async def check(
        self,
        version: int,
        scoring: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """If it is due. `scoring`: inside it the trainer can score. Raises TrainError above the bound when the options
        say that this is fatal."""
        if not replace(self._options, every=self.every).is_due(version, self._checked):
            return
        self._checked = version
        with self._meter.during("wait-weights", f"canary {version}"):
            try:
                answers = await self._coordinator.canary(version)
            except MyxaError as err:
                self._telemetry.event("guard-skipped", f"version {version}: {err.message}")
                self._ctx.log.warning("version %d was not compared with an engine: %s", version, err)
                return
            async with scoring():
                verdict = await self._compare(version, answers)
        if not verdict.num_tokens:
            self._telemetry.event("guard-skipped", f"version {version}: the engine answered with no token of it")
            return
        values = {"guard/logprob_diff": verdict.mean_diff, "guard/logprob_diff_max": verdict.max_diff}
        self._telemetry.metric(version, values)
        if not verdict.complaint:
            return
        if self._options.is_fatal:
            raise TrainError(verdict.complaint, remedy=REMEDY)
        self._ctx.log.error("%s -- %s", verdict.complaint, REMEDY)
        reason = f"{verdict.complaint} -- {REMEDY}"
        await until_answered(
            lambda: self._coordinator.pause(reason), who="coordinator", clock=self._ctx.clock, log=self._ctx.log
        )

    async def _compare(self, version: int, answers: CanaryAnswers) -> Verdict:
        logprobs = np.zeros(0, np.float32)
        if answers.samples:  # ranks have nothing to run for none
            scores = (await self._ranks.all(TrainerContract.score, as_train_samples(answers.samples)))["trainer/0"]
            logprobs = np.asarray(scores.logprobs, dtype=np.float32)
        return judge(version, answers.rollout, answers.samples, logprobs, self._options.bound)
