"""What a rollout actor answers to. See `roles.py` for the others."""

from __future__ import annotations

from ...core.engine_profile import EngineTrace
from ...core.handlers import call
from ...core.messages import (
    CanaryAnswers,
    EngineStatus,
    EvalRequest,
    EvalResult,
    WeightAck,
    WeightChannel,
    WeightManifest,
)
from ...core.weight_channel import WeightProgress
from .knobs import KnobsContract
from .memory import TenantContract


class RolloutContract(TenantContract, KnobsContract):
    """One engine and the workflows that use it."""

    @call(deadline=120, reentrant=True)
    async def prepare_weights(self, manifest: WeightManifest) -> WeightAck:
        """Phase 1 of adoption: bytes arrive beside the old weights."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def commit_weights(self, version: int) -> WeightAck:
        """Phase 2: the next token is stamped with `version`."""
        raise NotImplementedError

    @call(deadline=5, reentrant=True, safe=True)
    async def weight_progress(self) -> WeightProgress:
        """How far an adoption that is under way is."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True, safe=True)
    async def judge_channel(self, channel: WeightChannel, host: str) -> str:
        """Why weights that a trainer on `host` (its boot id) publishes by that channel cannot reach this engine; empty:
        they can."""
        raise NotImplementedError

    @call(deadline=600, reentrant=True)
    async def evaluate(self, request: EvalRequest) -> EvalResult:
        """Answer held-out prompts; does not touch the ledger."""
        raise NotImplementedError

    @call(deadline=300, reentrant=True)
    async def answer(self, request: EvalRequest) -> CanaryAnswers:
        """Answer prompts by the engine alone: one turn each, no workflow, no reward, no ledger."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def status(self) -> EngineStatus:
        """Engine version and load."""
        raise NotImplementedError

    @call(deadline=120, reentrant=True, cancellable=False)
    async def profile_engine(self, duration_s: float) -> tuple[EngineTrace, ...]:
        """Have the servers behind this actor profile themselves; empty if the engine is in its own process."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def fence(self, epoch: int, reason: str) -> bool:
        """The engine missed a deadline or serves the wrong weights: the actor fails and is built anew. May be told
        again. False: that was another incarnation, this one goes on."""
        raise NotImplementedError

    @call(deadline=900, reentrant=True)
    async def load_engine(self) -> None:
        """Where engines and trainer take turns: the engine may load. Returns once it has joined the run."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def drain(self) -> int:
        """Abort what runs, return it with its tokens to the buffer; returns the number of groups returned."""
        raise NotImplementedError
