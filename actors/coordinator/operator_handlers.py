"""The coordinator's handlers that its parts answer: those for operators, owners of knobs, and some for engines.

Knows the parts (`knob_conductor`, `conduct`, `evaluator`, `engine_fleet`), not the run's state.
"""

from __future__ import annotations

from ...core.activity import ActivityMeter
from ...core.knobs import AuditRecord, ChangeReply, ChangeRequest, KnobsInForce, KnobTable, LiveKnobs, Operator
from ...core.messages import CanaryAnswers, EvalResult, WeightManifest
from ..contracts.roles import CoordinatorContract
from ..knobs.owner import OwnsKnobs
from .conduct import Conduct
from .engine_fleet import EngineFleet
from .evaluator import Evaluator
from .knob_conductor import KnobConductor


class OperatorHandlers(OwnsKnobs, CoordinatorContract):
    """See the module's head. The coordinator sets the attributes in `on_start`."""

    meter: ActivityMeter
    conductor: KnobConductor
    conduct: Conduct
    evaluator: Evaluator
    fleet: EngineFleet

    async def change_knobs(self, request: ChangeRequest) -> ChangeReply:
        with self.meter.during("wait-data", "knobs"):
            return await self.conductor.change(request)

    async def undo(self, who: Operator, reason: str, epoch: int = 0) -> ChangeReply:
        with self.meter.during("wait-data", "knobs"):
            return await self.conductor.undo(who, reason, epoch)

    async def knob_table(self) -> KnobTable:
        return await self.conductor.table()

    async def live_knobs(self) -> LiveKnobs:
        await self.conductor.until_decided()
        return self.conductor.live()

    async def knobs_in_force(self, owner: str) -> KnobsInForce:
        await self.conductor.until_decided()
        commits = self.conductor.commits_for(owner)
        return KnobsInForce(commits=commits, is_paused=self.conduct.is_paused, until_step=self.conduct.until_step)

    async def history(self, limit: int) -> tuple[AuditRecord, ...]:
        return await self.conduct.history(limit)

    async def canary(self, version: int) -> CanaryAnswers:
        return await self.evaluator.canary(version)

    async def rollout_leaving(self, rollout: str, reason: str) -> None:
        await self.fleet.leaving(rollout, reason)

    async def weights_lost(self, rollout: str, epoch: int) -> None:
        self.fleet.lost(rollout, epoch)

    async def weights_offered(self, manifest: WeightManifest) -> None:
        self.fleet.offered(manifest)

    async def pause(self, reason: str) -> None:
        await self.conduct.pause(Operator(user="guard", via="auto"), reason)

    async def pause_run(self, who: Operator, reason: str) -> int:
        return await self.conduct.pause(who, reason)

    async def resume_run(self, who: Operator, reason: str) -> None:
        await self.conduct.resume(who, reason)

    async def step_run(self, who: Operator, reason: str, num_steps: int) -> int:
        return await self.conduct.step(who, reason, num_steps)

    async def checkpoint_now(self, who: Operator, reason: str, export: bool) -> str:
        return await self.conduct.checkpoint(who, reason, export=export)

    async def evaluate_now(self, who: Operator, reason: str, name: str) -> EvalResult:
        return await self.conduct.evaluate(who, reason, name)
