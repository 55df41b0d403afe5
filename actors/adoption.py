"""Which engine adopts which weight version when: pure bookkeeping, no IO, time is not needed.

Engines adopt one after another (rolling), each straight to the newest published version: versions in between are
skipped by engines that were busy. A published version stays readable while it is the newest one, or while an engine
is in the middle of adopting it; everything older is released, oldest first.

    engine:  JOINED -> ADOPTING(v) -> SERVING(v) -> ADOPTING(v') -> ...
                          |-> FENCED (missed a deadline or refused; only a new incarnation comes back)
    SERVING(v) -> JOINED when the engine's weights were taken off its device: it is given a version anew
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..core.messages import WeightManifest


class EngineState(Enum):
    """Life of one engine incarnation as adoption sees it."""

    JOINED = "joined"
    ADOPTING = "adopting"
    SERVING = "serving"
    FENCED = "fenced"


_ALLOWED: dict[EngineState, frozenset[EngineState]] = {
    EngineState.JOINED: frozenset({EngineState.ADOPTING, EngineState.FENCED}),
    EngineState.ADOPTING: frozenset({EngineState.SERVING, EngineState.FENCED}),
    EngineState.SERVING: frozenset({EngineState.ADOPTING, EngineState.JOINED, EngineState.FENCED}),
    EngineState.FENCED: frozenset(),
}


@dataclass(slots=True)
class _Engine:
    epoch: int
    version: int
    state: EngineState

    def move(self, name: str, to: EngineState) -> None:
        if to not in _ALLOWED[self.state]:
            raise ValueError(f"{name} (epoch {self.epoch}) cannot go from {self.state.value} to {to.value}")
        self.state = to


@dataclass(frozen=True, slots=True)
class Adopt:
    """Instruction: bring `engine` (that incarnation) to `manifest`."""

    engine: str
    epoch: int
    manifest: WeightManifest


class Adoption:
    """See the module's head. Methods raise ValueError for moves that the table does not allow."""

    def __init__(self, *, keeps_newest: bool = True) -> None:
        """`keeps_newest` False: the newest version too is released once every engine serves it, since the trainer's
        memory is wanted; an engine that comes later has to wait until it is published again."""
        self._keeps_newest = keeps_newest
        self._engines: dict[str, _Engine] = {}
        self._manifests: dict[int, WeightManifest] = {}
        self._target: dict[str, int] = {}

    @property
    def newest(self) -> int:
        """Newest published version, -1 before the first."""
        return max(self._manifests, default=-1)

    @property
    def serving(self) -> dict[str, int]:
        """Engine -> version, for engines that serve (an adopting engine serves its old version)."""
        return {
            name: e.version for name, e in self._engines.items() if e.state is not EngineState.FENCED and e.version >= 0
        }

    def published(self, manifest: WeightManifest) -> None:
        """A new version can be read. An older or equal one is ignored (a repeated message)."""
        if manifest.version > self.newest:
            self._manifests[manifest.version] = manifest

    def joined(self, engine: str, epoch: int) -> None:
        """An engine reported in; it serves nothing yet. An older incarnation of the name is forgotten."""
        known = self._engines.get(engine)
        if known is not None and known.epoch >= epoch:
            return
        self._target.pop(engine, None)
        self._engines[engine] = _Engine(epoch=epoch, version=-1, state=EngineState.JOINED)

    def gone(self, engine: str, epoch: int) -> None:
        """That incarnation is dead."""
        known = self._engines.get(engine)
        if known is not None and known.epoch <= epoch:
            del self._engines[engine]
            self._target.pop(engine, None)

    def next(self) -> Adopt | None:
        """The engine that is furthest behind and may adopt now, or None. Marks it ADOPTING."""
        newest = self.newest
        behind = [
            (e.version, name)
            for name, e in self._engines.items()
            if e.state in (EngineState.JOINED, EngineState.SERVING) and e.version < newest
        ]
        if not behind:
            return None
        _, name = min(behind)
        engine = self._engines[name]
        engine.move(name, EngineState.ADOPTING)
        self._target[name] = newest
        return Adopt(engine=name, epoch=engine.epoch, manifest=self._manifests[newest])

    def adopted(self, engine: str, epoch: int, version: int) -> None:
        """The engine serves `version`. A dead incarnation's word has no effect."""
        known = self._engines.get(engine)
        if known is None or known.epoch != epoch:
            return
        known.move(engine, EngineState.SERVING)
        known.version = version
        self._target.pop(engine, None)

    def lost(self, engine: str, epoch: int) -> None:
        """The engine is well, but its weights are gone."""
        known = self._engines.get(engine)
        if known is not None and known.epoch == epoch and known.state is EngineState.SERVING:
            known.move(engine, EngineState.JOINED)
            known.version = -1

    def fenced(self, engine: str, epoch: int) -> None:
        """The engine missed a deadline or refused: it gets nothing more."""
        known = self._engines.get(engine)
        if known is None or known.epoch != epoch:
            return
        known.move(engine, EngineState.FENCED)
        self._target.pop(engine, None)

    def releasable(self) -> tuple[int, ...]:
        """Versions nobody will read again, oldest first; they are forgotten by this call."""
        keep = set(self._target.values())
        if self._keeps_newest or any(
            e.version < self.newest for e in self._engines.values() if e.state is not EngineState.FENCED
        ):
            keep.add(self.newest)
        free = tuple(sorted(v for v in self._manifests if v not in keep))
        for version in free:
            del self._manifests[version]
        return free
