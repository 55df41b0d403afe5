"""Which engine adopts which weight version when: pure bookkeeping, no IO, time is not needed.

Engines adopt in turn (rolling), `at_once` of them side by side, each straight to the newest published version: versions
in between are skipped by engines that were busy. A published version stays readable while it is the newest one, or
while an engine is in the middle of adopting it; everything older is released, oldest first.

    engine:  JOINED -> ADOPTING(v) -> SERVING(v) -> ADOPTING(v') -> ...
                          |-> FENCED (missed a deadline, or has torn weights; only a new incarnation comes back)
    ADOPTING(v) -> what it was before, when it refused and its old weights are whole: it is asked again later
    SERVING(v) -> JOINED when the engine's weights were taken off its device: it is given a version anew

A trainer that goes on from an older state undoes versions: numbers above that state come again and mean other weights.
Every engine is then behind, whatever number it serves, until it adopted a version that was published afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ...core.messages import WeightManifest


class EngineState(Enum):
    """Life of one engine incarnation as adoption sees it."""

    JOINED = "joined"
    ADOPTING = "adopting"
    SERVING = "serving"
    FENCED = "fenced"


_ALLOWED: dict[EngineState, frozenset[EngineState]] = {
    EngineState.JOINED: frozenset({EngineState.ADOPTING, EngineState.FENCED}),
    EngineState.ADOPTING: frozenset({EngineState.SERVING, EngineState.JOINED, EngineState.FENCED}),
    EngineState.SERVING: frozenset({EngineState.ADOPTING, EngineState.JOINED, EngineState.FENCED}),
    EngineState.FENCED: frozenset(),
}

_UNKNOWN_LINEAGE = -1


@dataclass(slots=True)
class _Engine:
    epoch: int
    version: int
    state: EngineState
    lineage: int = _UNKNOWN_LINEAGE
    """Number of rewinds before `version` was published."""
    target: int = -1
    """Version that it is adopting."""
    target_lineage: int = _UNKNOWN_LINEAGE
    num_refusals: int = 0
    """Since it adopted last."""
    is_put_off: bool = False
    """It refused its target and is not asked for that one just now."""

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

    def __init__(self, *, keeps_newest: bool = True, at_once: int = 1) -> None:
        """`keeps_newest` False: the newest version too is released once every engine serves it, since the trainer's
        memory is wanted; an engine that comes later has to wait until it is published again. `at_once`: engines that
        may be in the middle of adopting at the same time."""
        self._keeps_newest = keeps_newest
        self.at_once = at_once
        """May be changed at any time; engines that adopt already are left to it."""
        self._engines: dict[str, _Engine] = {}
        self._manifests: dict[int, WeightManifest] = {}
        self._lineage = 0

    @property
    def newest(self) -> int:
        """Newest published version, -1 before the first, and after a rewind before the next."""
        return max(self._manifests, default=-1)

    @property
    def lineage(self) -> int:
        """How often the trainer went back."""
        return self._lineage

    @property
    def serving(self) -> dict[str, int]:
        """Engine -> version, for engines that serve (an adopting engine serves its old version); after a rewind that
        may be a version that was undone."""
        return {
            name: e.version for name, e in self._engines.items() if e.state is not EngineState.FENCED and e.version >= 0
        }

    @property
    def adopting(self) -> tuple[str, ...]:
        """Engines in the middle of adopting, by name."""
        return tuple(sorted(n for n, e in self._engines.items() if e.state is EngineState.ADOPTING))

    def engines_at(self, version: int | None) -> list[str]:
        """Engines that serve that version of the trainer as it is now, not one that was undone; None: any of its
        versions."""
        return [
            name
            for name, served in self.serving.items()
            if version in (None, served) and self._engines[name].lineage == self._lineage
        ]

    def published(self, manifest: WeightManifest) -> None:
        """A new version can be read. An older one is ignored, and the same one again (a repeated message). The newest
        number with another manifest was published anew, since nobody could take it, or by a gang that was started again
        before it had made any other: what engines refused is forgotten."""
        if manifest.version < self.newest or manifest == self._manifests.get(manifest.version):
            return
        if manifest.version in self._manifests:
            for engine in self._engines.values():
                if self._waits(engine):
                    engine.is_put_off, engine.num_refusals = False, 0
        self._manifests[manifest.version] = manifest

    def holds(self, version: int) -> bool:
        """Whether that version was published and can still be read."""
        return version in self._manifests

    def rewound(self) -> None:
        """The trainer goes on from an older state, in a new process: what was published before cannot be read any more
        and is forgotten, not released. Every engine is behind from now on; those that serve go on serving."""
        self._lineage += 1
        self._manifests.clear()

    def joined(self, engine: str, epoch: int, version: int = -1) -> None:
        """An engine reported in. `version` >= 0: it serves that already (it was told by an earlier coordinator), and it
        is taken as such unless it is newer than what the trainer has or there was a rewind: then it adopts again. An
        older incarnation of the name is forgotten."""
        known = self._engines.get(engine)
        if known is not None and known.epoch >= epoch:
            return
        joined = _Engine(epoch=epoch, version=version, state=EngineState.JOINED)
        if version >= 0:
            joined.state = EngineState.SERVING
            joined.lineage = self._lineage if self._lineage == 0 else _UNKNOWN_LINEAGE
        self._engines[engine] = joined

    def gone(self, engine: str, epoch: int) -> None:
        """That incarnation is dead."""
        known = self._engines.get(engine)
        if known is not None and known.epoch <= epoch:
            del self._engines[engine]

    def epoch_of(self, engine: str) -> int:
        """Of the incarnation that joined last; -1: none is known."""
        known = self._engines.get(engine)
        return known.epoch if known is not None else -1

    def next(self) -> Adopt | None:
        """The engine that is furthest behind and may adopt now, or None. Marks it ADOPTING."""
        newest = self.newest
        if newest < 0 or len(self.adopting) >= self.at_once:
            return None
        behind = [
            (e.lineage if e.version >= 0 else _UNKNOWN_LINEAGE - 1, e.version, name)
            for name, e in self._engines.items()
            if e.state in (EngineState.JOINED, EngineState.SERVING) and self._is_behind(e) and not self._waits(e)
        ]
        if not behind:
            return None
        name = min(behind)[-1]
        engine = self._engines[name]
        engine.move(name, EngineState.ADOPTING)
        engine.target, engine.target_lineage, engine.is_put_off = newest, self._lineage, False
        return Adopt(engine=name, epoch=engine.epoch, manifest=self._manifests[newest])

    def adopted(self, engine: str, epoch: int, version: int) -> bool:
        """The engine serves `version`. The word of a dead or fenced incarnation has no effect: False."""
        known = self._engines.get(engine)
        if known is None or known.epoch != epoch or known.state is EngineState.FENCED:
            return False
        known.move(engine, EngineState.SERVING)
        known.version = version
        known.lineage = known.target_lineage
        known.num_refusals = 0
        return True

    def put_off(self, engine: str, epoch: int) -> int:
        """The engine refused and goes on with what it served before; it gets nothing until `ask_again`, or until there
        is something newer. Returns how often it refused since it adopted last; 0 for a dead or fenced incarnation."""
        known = self._engines.get(engine)
        if known is None or known.epoch != epoch or known.state is EngineState.FENCED:
            return 0
        known.move(engine, EngineState.SERVING if known.version >= 0 else EngineState.JOINED)
        known.is_put_off = True
        known.num_refusals += 1
        return known.num_refusals

    def ask_again(self, engine: str, epoch: int) -> None:
        """An engine that was put off may be given what it refused."""
        known = self._engines.get(engine)
        if known is not None and known.epoch == epoch:
            known.is_put_off = False

    def lost(self, engine: str, epoch: int) -> None:
        """The engine is well, but its weights are gone."""
        known = self._engines.get(engine)
        if known is not None and known.epoch == epoch and known.state is EngineState.SERVING:
            known.move(engine, EngineState.JOINED)
            known.version = -1

    def fenced(self, engine: str, epoch: int) -> None:
        """The engine missed a deadline or refused: it gets nothing more."""
        known = self._engines.get(engine)
        if known is None or known.epoch != epoch or known.state is EngineState.FENCED:
            return
        known.move(engine, EngineState.FENCED)

    def releasable(self) -> tuple[int, ...]:
        """Versions nobody will read again, oldest first; they are forgotten by this call."""
        engines = self._engines.values()
        keep = {e.target for e in engines if e.state is EngineState.ADOPTING and e.target_lineage == self._lineage}
        if self._keeps_newest or any(self._is_behind(e) for e in engines if e.state is not EngineState.FENCED):
            keep.add(self.newest)
        free = tuple(sorted(v for v in self._manifests if v not in keep))
        for version in free:
            del self._manifests[version]
        return free

    def _is_behind(self, engine: _Engine) -> bool:
        """Or ahead: a number that the trainer does not have is one of weights that were undone."""
        return engine.lineage != self._lineage or engine.version != self.newest

    def _waits(self, engine: _Engine) -> bool:
        return engine.is_put_off and (engine.target_lineage, engine.target) == (self._lineage, self.newest)
