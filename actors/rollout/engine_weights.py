"""New weights into a rollout actor's engine: prepare, commit, how far it is; and the stamps its tokens may bear since.

Knows the engine's protocol and the checks of its streams; must not know who publishes versions, or who waits for them.
"""

from __future__ import annotations

from ...core.activity import TelemetryBuffer
from ...core.chaos import reached
from ...core.clock import Clock
from ...core.errors import MyxaError, WeightsRefused
from ...core.messages import WeightAck, WeightManifest
from ...core.protocols import Engine, TellsProgress
from ...core.weight_channel import WeightProgress
from .stream_checks import StreamChecks


class EngineWeights:
    """Of one engine; None: the actor has none, and every version is taken at its word."""

    def __init__(
        self, name: str, engine: Engine | None, checks: StreamChecks, telemetry: TelemetryBuffer, clock: Clock
    ) -> None:
        self._name = name
        self._engine = engine
        self._checks = checks
        self._telemetry = telemetry
        self._clock = clock
        self._prepared: WeightManifest | None = None
        self.lineage = 0
        """Of the weights that serve (`WeightManifest.lineage`)."""

    async def prepare(self, manifest: WeightManifest) -> WeightAck:
        """Bytes beside the weights that serve, which stay whole whatever happens."""
        if self._engine is None:
            return self._ack(manifest.version)
        reached("rollout.prepare")
        self._prepared = None
        try:
            await self._engine.prepare_weights(manifest)
        except MyxaError as err:
            return self._ack(manifest.version, reason=str(err), is_whole=True)
        self._prepared = manifest
        return self._ack(manifest.version)

    async def commit(self, version: int) -> WeightAck:
        """The next token is of that version."""
        if self._engine is None:
            return self._ack(version)
        if self._prepared is None or self._prepared.version != version:
            return self._ack(version, reason=f"{self._name} has not prepared version {version}", is_whole=True)
        try:
            await self._swap(self._engine, version)
        except MyxaError as err:
            return self._ack(version, reason=str(err), is_whole=isinstance(err, WeightsRefused))
        self.lineage, self._prepared = self._prepared.lineage, None
        return self._ack(version)

    async def _swap(self, engine: Engine, version: int) -> None:
        """Commit, and note it on a track of its own in the trace: generation goes on around it."""
        started, wall_s = self._clock.monotonic(), self._clock.wall()
        reached("rollout.commit")
        self._checks.loading(version)
        try:
            await engine.commit_weights(version)
        except WeightsRefused:
            self._checks.kept()
            raise
        self._checks.loaded()
        self._telemetry.span(
            f"adopt {version}",
            "compute",
            wall_s,
            self._clock.monotonic() - started,
            track="weights",
            adopts_version=version,
        )

    def progress(self) -> WeightProgress:
        """How far an adoption that is under way is."""
        engine = self._engine
        return engine.weight_progress() if isinstance(engine, TellsProgress) else WeightProgress(at="not told")

    def _ack(self, version: int, *, reason: str = "", is_whole: bool = False) -> WeightAck:
        return WeightAck(rollout=self._name, version=version, accepted=not reason, reason=reason, is_whole=is_whole)
