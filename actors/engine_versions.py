"""Which version every rollout actor serves, as far as the trainer's present lineage knows it. Pure.

A trainer that went back to version r made the versions above r undone: an engine that still serves one of them counts
as serving r, whatever number it tells, until it tells that it adopted another one. Its number alone says nothing: the
trainer makes the same numbers again.

    draw(v)      says what was served when the draw was sent; it may be older than the newest `adopted`
    adopted(v)   an engine took v; above the newest version that there is: one that is undone
"""

from __future__ import annotations

from dataclasses import dataclass

NONE = -1
ALWAYS_NEWEST = (1 << 31) - 1
"""What an actor without an engine announces: its samples carry no version, so no age ever holds them back."""


@dataclass(slots=True)
class _Engine:
    epoch: int
    version: int
    """Told last of those that count; NONE: nothing yet."""
    undone: int = NONE
    """The undone version that it serves; NONE: it serves none."""
    worth: int = NONE
    """What that counts as: the oldest version that the trainer went back to since."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a draw is judged by."""

    version: int
    is_undone: bool = False
    """The number that it stamps is of another lineage: whatever stamp is above `version` counts as `version`."""


class EngineVersions:
    """See the module's head. One per buffer."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._base: int | None = None
        """The version that the trainer went back to last, as far as this process saw it."""
        self.lineage = 0
        """Counts how often the trainer went back."""

    def drawing(self, rollout: str, epoch: int, version: int, newest: int) -> None:
        """A draw came in. `newest`: version that there is."""
        engine = self._of(rollout, epoch)
        if engine is None or version in (engine.undone, ALWAYS_NEWEST):
            return
        if version > newest:
            engine.undone, engine.worth = version, self._base_of(newest)
        elif engine.undone == NONE:
            engine.version = max(engine.version, version)
        else:
            engine.version, engine.undone = version, NONE

    def adopted(self, rollout: str, epoch: int, version: int, newest: int) -> bool:
        """An engine serves `version` from now on; whether that is news."""
        engine = self._of(rollout, epoch)
        if engine is None or version == ALWAYS_NEWEST:
            return False
        before = (engine.version, engine.undone)
        if version > newest:
            engine.undone, engine.worth = version, self._base_of(newest)
        else:
            engine.version, engine.undone = version, NONE
        return (engine.version, engine.undone) != before

    def rewound(self, version: int) -> None:
        """The trainer went back to `version`."""
        self.lineage += 1
        self._base = version
        for engine in self._engines.values():
            if engine.undone != NONE:
                engine.worth = min(engine.worth, version)
            elif engine.version > version:
                engine.undone, engine.worth = engine.version, version
            engine.version = min(engine.version, version)

    def serving(self, rollout: str, epoch: int, told: int, lineage: int, newest: int) -> Served:
        """By which version a draw that told `told` in `lineage` is judged now."""
        if told == ALWAYS_NEWEST:
            return Served(newest)
        engine = self._engines.get(rollout)
        if engine is None or engine.epoch != epoch:
            return Served(self._base_of(newest), is_undone=True) if told > newest else Served(told)
        if engine.undone != NONE:
            return Served(engine.worth, is_undone=True)
        return Served(max(told, engine.version) if lineage == self.lineage else engine.version)

    def _base_of(self, newest: int) -> int:
        """What a version counts as that was undone before we knew of it."""
        return newest if self._base is None else min(self._base, newest)

    def _of(self, rollout: str, epoch: int) -> _Engine | None:
        """None: that incarnation is over."""
        engine = self._engines.get(rollout)
        if engine is None or engine.epoch < epoch:
            engine = self._engines[rollout] = _Engine(epoch, NONE)
        return engine if engine.epoch == epoch else None
