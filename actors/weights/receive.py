"""A rollout actor's end of weight sync: prepare and commit a version in its engine, and reach the ranks that send it.

    prepare    the engine gets ready while it generates; the weights that serve stay whole whatever happens
    commit     the next token is of the new version; the stamps of tokens are checked against it from here on

The coordinator calls both (`coordinator`), the engine fetches bytes through `TrainerSenders` from the trainer's ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, cast

from ...core.actor import Actor
from ...core.errors import MyxaError, WeightsRefused
from ...core.messages import WeightAck, WeightManifest
from ...core.protocols import Engine, WeightRebuilder
from ...core.refs import with_deadline
from ...core.weight_channel import AnyOrder, SenderOrder, WeightProgress
from ..contracts import TrainerContract
from ..stream_checks import StreamChecks
from ..telemetry import Reporter

A = TypeVar("A")


@dataclass(slots=True)
class EngineWeights:
    """Of one engine; None: the actor has none, and every version is taken at its word."""

    report: Reporter
    engine: Engine | None
    checks: StreamChecks
    rebuilder: WeightRebuilder | None = None
    """Of deltas; None: they are refused."""
    lineage: int = 0
    """Of the weights that serve (`WeightManifest.lineage`)."""
    _prepared: WeightManifest | None = None

    async def prepare(self, manifest: WeightManifest) -> WeightAck:
        """Bytes beside the weights that serve, which stay whole whatever happens."""
        if self.engine is None:
            return self._ack(manifest.version)
        self._prepared = None
        try:
            await self.engine.prepare_weights(await self._without_deltas(manifest))
        except MyxaError as err:
            return self._ack(manifest.version, reason=str(err), is_whole=True)
        self._prepared = manifest
        return self._ack(manifest.version)

    async def _without_deltas(self, manifest: WeightManifest) -> WeightManifest:
        """What the engine can read. Raises EngineError."""
        if self.rebuilder is None:
            return manifest
        rebuilt, reason = await self.rebuilder.whole(manifest)
        if reason:
            self.report.tell("weights-from-full", f"{self.report.ctx.name}: {reason}", version=manifest.version)
        return rebuilt

    async def close(self) -> None:
        if self.rebuilder is not None:
            await self.rebuilder.close()

    async def commit(self, version: int) -> WeightAck:
        if self.engine is None:
            return self._ack(version)
        if self._prepared is None or self._prepared.version != version:
            return self._ack(
                version, reason=f"{self.report.ctx.name} has not prepared version {version}", is_whole=True
            )
        try:
            await self._swap(self.engine, version)
        except MyxaError as err:
            return self._ack(version, reason=str(err), is_whole=isinstance(err, WeightsRefused))
        self.lineage, self._prepared = self._prepared.lineage, None
        return self._ack(version)

    async def _swap(self, engine: Engine, version: int) -> None:
        """Commit, on its own track in the trace, since generation continues around it."""
        clock = self.report.clock
        started, wall_s = clock.monotonic(), clock.wall()
        self.checks.loading(version)
        try:
            await engine.commit_weights(version)
        except WeightsRefused:
            self.checks.kept()
            raise
        self.checks.loaded()
        took_s = clock.monotonic() - started
        self.report.telemetry.span(
            f"adopt {version}", "compute", wall_s, took_s, track="weights", adopts_version=version
        )

    def progress(self) -> WeightProgress:
        engine = self.engine
        if self.rebuilder is not None and self.rebuilder.at:
            return WeightProgress(at=self.rebuilder.at)
        return WeightProgress(at="no engine") if engine is None else engine.weight_progress()

    def _ack(self, version: int, *, reason: str = "", is_whole: bool = False) -> WeightAck:
        name = self.report.ctx.name
        return WeightAck(rollout=name, version=version, accepted=not reason, reason=reason, is_whole=is_whole)


class TrainerSenders:
    """The trainer ranks that send weights, as the engine of a rollout actor calls them: under deadlines. Fulfils
    `core.protocols.WeightSenders`. An engine is made before its actor has a place in the run, so the actor is named
    later (`speak_as`); nothing is asked before it has started."""

    def __init__(self) -> None:
        self._actor: Actor | None = None

    def speak_as(self, actor: Actor) -> None:
        self._actor = actor

    async def ask(self, sender: str, order: SenderOrder[A]) -> A:
        assert self._actor is not None, "speak_as comes first"
        ref = with_deadline(self._actor.ctx.ref(TrainerContract, sender), order.answer_s)
        return cast(A, await ref.ask_sender(cast(AnyOrder, order)))
