"""The engines of a run as the coordinator sees them: which actors reported in, and what each serves.

`actors/weights/rollout_update.py` brings them to new versions. Reports of different incarnations may arrive in any
order: a report of an old incarnation never changes what is known of the next one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...core.actor import PeerEvent
from ...core.messages import EngineStatus, WeightManifest
from ..weights.rollout_update import Adopter, Adoption
from .knob_conductor import KnobConductor
from .run_state import RunState


class EngineFleet:
    """The rollout actors that reported in to this incarnation of the coordinator."""

    def __init__(
        self,
        present: dict[str, EngineStatus],
        state: RunState,
        conductor: KnobConductor,
        adoption: Adoption,
        adopter: Adopter,
        *,
        serves: bool,
        keep: Callable[[], Awaitable[None]],
        tell: Callable[[str, str], None],
        on_change: Callable[[], None],
    ) -> None:
        """`present`: empty; filled with the rollout actors that report in. `serves` False: they have no engines.
        `keep`: writes `state` into the journal. `tell`: records an event, its kind and text. `on_change`: called when
        there may be something to adopt."""
        self.present = present
        self._state = state
        self._conductor = conductor
        self._adoption = adoption
        self._adopter = adopter
        self._serves = serves
        self._keep = keep
        self._tell = tell
        self._on_change = on_change
        self._epochs: dict[str, int] = {}
        """Name -> incarnation that is present."""

    async def ready(self, status: EngineStatus, epoch: int) -> None:
        """An actor reports in; with a version if an earlier incarnation had it serve one."""
        name = status.rollout
        if epoch < self._epochs.get(name, epoch):
            return  # its successor was faster
        self.present[name], self._epochs[name] = status, epoch  # from here on it hears of every change
        await self._conductor.joined(name)
        if self._epochs.get(name) != epoch:
            return  # it ended meanwhile
        if self._serves:
            self._adoption.joined(name, epoch, status.version)
            self._adopter.look_again()
        self._tell("engine-joined", f"{name} (epoch {epoch})")
        self._on_change()

    async def leaving(self, rollout: str, reason: str) -> None:
        """It ends on purpose."""
        if self.present.pop(rollout, None) is not None:
            self._epochs.pop(rollout)
            self._adoption.gone(rollout, self._adoption.epoch_of(rollout))
            self._tell("engine-left", f"{rollout}: {reason}")
            self._on_change()

    def gone(self, event: PeerEvent) -> None:
        """An incarnation of one ended; the next one may have reported in before this was heard."""
        name, ended = event.name, event.epoch - 1 if event.kind == "restarted" else event.epoch
        if name in self.present and self._epochs[name] <= ended:
            self._tell("engine-gone", f"{name} (epoch {self._epochs[name]}): {event.reason}")
            self._adoption.gone(name, ended)
            self.present.pop(name)
            self._epochs.pop(name)
            self._on_change()

    def fence(self, rollout: str, why: str) -> None:
        """Have the present incarnation end and be started again."""
        if rollout in self._epochs:
            self._adopter.fence(rollout, self._epochs[rollout], why)

    def lost(self, rollout: str, epoch: int) -> None:
        """It is well, but its weights left the device."""
        self._adoption.lost(rollout, epoch)

    def offered(self, manifest: WeightManifest) -> None:
        self._adoption.published(manifest)
        self._on_change()

    def rewound(self) -> None:
        """The trainer returned to an older version; the numbers above it come again with other weights."""
        self._state.has_stale_engines = self._serves
        self._adoption.rewound()

    def adopted(self, name: str, epoch: int, version: int) -> None:
        """That incarnation serves that version now."""
        if self._epochs.get(name) == epoch:
            self.present[name] = EngineStatus(rollout=name, version=version, running=0, waiting=0)

    async def adopt(self) -> None:
        await self._adopter.adopt_pending()
        if self._state.has_stale_engines and set(self._adoption.serving) <= set(self._adoption.engines_at(None)):
            self._state.has_stale_engines = False
            await self._keep()
