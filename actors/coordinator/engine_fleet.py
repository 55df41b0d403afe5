"""The engines of a run as the coordinator knows them: who reported in, what each serves, who is behind after a rewind.

Part of the coordinator. Which engine adopts what and when is judged in `adoption`, and done by `adopter`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...core.actor import PeerEvent
from ...core.chaos import reached
from ...core.messages import EngineStatus, WeightManifest
from .adopter import Adopter
from .adoption import Adoption
from .knob_conductor import KnobConductor
from .run_state import RunState


class EngineFleet:
    """See the module's head."""

    def __init__(
        self,
        state: RunState,
        adoption: Adoption,
        *,
        serves: bool,
        keep: Callable[[], Awaitable[None]],
        tell: Callable[[str, str], None],
        on_change: Callable[[], None],
    ) -> None:
        """`serves` False: the rollout actors have no engines. `keep`: puts `state` into the journal; `tell`: an event,
        its kind and text; `on_change`: there may be something to adopt. `conductor` and `adopter` are set later."""
        self.conductor: KnobConductor
        self.adopter: Adopter
        self.present: dict[str, EngineStatus] = {}
        """Rollout actors that reported in to this incarnation, and how they stood."""
        self._reporting: dict[str, int] = {}
        """Incarnations whose report waits for a change of knobs to be decided; gone from here if they end meanwhile."""
        self._epochs: dict[str, int] = {}
        """Incarnation of each that is present."""
        self._state = state
        self._adoption = adoption
        self._serves = serves
        self._keep = keep
        self._tell = tell
        self._on_change = on_change

    async def ready(self, status: EngineStatus, epoch: int) -> None:
        """An actor reports in; with a version if an earlier incarnation had it serve one."""
        reached("coordinator.ready")
        name = status.rollout
        self._reporting[name] = epoch
        await self.conductor.until_decided()
        if self._reporting.get(name) != epoch or epoch < self._epochs.get(name, epoch):
            return  # it ended meanwhile, or its successor was faster
        del self._reporting[name]
        self.present[name], self._epochs[name] = status, epoch  # from here on it is asked about every change
        await self.conductor.joined(name)
        if self._epochs.get(name) != epoch:
            return  # it ended meanwhile
        if self._serves:
            self._adoption.joined(name, epoch, status.version)
            self.adopter.look_again()
        if name not in self._state.engines:
            self._state.engines.add(name)
            await self._keep()
        self._tell("engine-joined", f"{name} (epoch {epoch})")
        self._on_change()

    async def leaving(self, rollout: str, reason: str) -> None:
        """It ends on purpose."""
        if rollout in self._state.engines:
            self._state.engines.discard(rollout)
            await self._keep()
        if self.present.pop(rollout, None) is not None:
            self._epochs.pop(rollout)
            self._adoption.gone(rollout, self._adoption.epoch_of(rollout))
            self._tell("engine-left", f"{rollout}: {reason}")
            self._on_change()

    def gone(self, event: PeerEvent) -> None:
        """An incarnation of one ended; the next one may have reported in before this was heard."""
        name, ended = event.name, event.epoch - 1 if event.kind == "restarted" else event.epoch
        if self._reporting.get(name, ended + 1) <= ended:
            del self._reporting[name]
        if name in self.present and self._epochs[name] <= ended:
            self._tell("engine-gone", f"{name} (epoch {self._epochs[name]}): {event.reason}")
            self._adoption.gone(name, ended)
            self.present.pop(name)
            self._epochs.pop(name)
            self._on_change()

    def fence(self, rollout: str, why: str) -> None:
        """Have the incarnation that is present end and be built anew."""
        if rollout in self._epochs:
            self.adopter.fence(rollout, self._epochs[rollout], why)

    def lost(self, rollout: str, epoch: int) -> None:
        """It is well, but its weights left the device."""
        self._adoption.lost(rollout, epoch)

    def offered(self, manifest: WeightManifest) -> None:
        """A version can be read (again)."""
        self._adoption.published(manifest)
        self._on_change()

    def rewound(self) -> None:
        """The trainer goes on from an older version; numbers above it come again and mean other weights."""
        self._state.has_stale_engines = self._serves
        self._adoption.rewound()

    def adopted(self, name: str, epoch: int, version: int) -> None:
        """That incarnation serves that version now."""
        if self._epochs.get(name) == epoch:
            self.present[name] = EngineStatus(rollout=name, version=version, running=0, waiting=0)

    async def adopt(self) -> None:
        """Bring everybody to the newest version."""
        await self.adopter.adopt_pending()
        if self._state.has_stale_engines and set(self._adoption.serving) <= set(self._adoption.engines_at(None)):
            self._state.has_stale_engines = False
            await self._keep()
