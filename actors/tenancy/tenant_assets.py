"""What a tenant holds, seen as one list of tags: stores, communicators (tag "nccl"), and what is planned.

`release` and `restore` block and belong into the tenant's thread. `tags` may be asked for from the loop at any time:
while a command works it tells how things were before, because a store at work does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.assets import AssetStore
from ...core.device_memory import MemoryCommand, Tag, TagPolicy, TagReport
from ...core.errors import MyxaError
from ...memory.communicators.residency import CommResidency
from ...memory.communicators.roll_call import Absent

COMMS: Tag = "nccl"


@dataclass(slots=True)
class Carried:
    """What one command moved; seconds by part."""

    copied_bytes: int = 0
    dropped_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, part: str, moved: object) -> None:
        """What a store says of one call."""
        self.copied_bytes += int(getattr(moved, "copied_bytes", 0))
        self.dropped_bytes += int(getattr(moved, "dropped_bytes", 0))
        self._spend(part, getattr(moved, "seconds", 0.0))
        self._spend("", getattr(moved, "parts", None))

    def _spend(self, part: str, told: Mapping[str, float] | float | None) -> None:
        """Seconds of the part, or by parts of its own."""
        if told is None:
            return
        parts = told if isinstance(told, Mapping) else {part: told}
        for name, seconds in parts.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class TenantAssets:
    """See the module's head."""

    def __init__(
        self, planned: Mapping[Tag, tuple[int, TagPolicy]], stores: Sequence[AssetStore], comms: CommResidency | None
    ) -> None:
        self.planned = dict(planned)
        self.stores = list(stores)
        self.comms = comms
        self._granted: set[Tag] = set()
        self._comms_tag: TagReport | None = None
        self._are_comms_away = False
        self.comm_epoch = 0
        """Under which communicators were restored last."""
        self._last: tuple[TagReport, ...] | None = None

    # -- told from the loop

    def tags(self, *, is_busy: bool) -> tuple[TagReport, ...]:
        """Every tag once. A tag that is planned and in a store already counts with the larger number."""
        if not is_busy or self._last is None:
            self._last = self._look()
        return self._last

    def refresh(self) -> None:
        """The work of a command is over: look again."""
        self._last = self._look()

    @property
    def reserved_bytes(self) -> int:
        """Of the planned tags that were granted: not in any store yet."""
        stored = self._stored()
        return sum(
            max(0, num_bytes - (stored[tag].num_bytes if tag in stored else 0))
            for tag, (num_bytes, _) in self.planned.items()
            if tag in self._granted
        )

    @property
    def is_granted(self) -> bool:
        """Something planned may be loaded."""
        return any(tag in self._granted for tag in self.planned)

    def _stored(self) -> dict[Tag, TagReport]:
        return {tag.tag: tag for store in self.stores for tag in store.report()}

    def _look(self) -> tuple[TagReport, ...]:
        found = self._stored()
        for tag, (num_bytes, policy) in self.planned.items():
            known = found.get(tag)
            backing = "mapped_dirty" if tag in self._granted else "discarded"
            if known is None or (known.num_bytes < num_bytes and tag in self._granted):
                found[tag] = TagReport(tag, num_bytes, policy, backing)
        if self._comms_tag is not None:
            found[COMMS] = self._comms_tag
        return tuple(found.values())

    # -- done in the tenant's thread

    def survey_comms(self) -> None:
        """See what the communicators hold now."""
        if self.comms is None:
            return
        stats = self.comms.stats()
        known = self._comms_tag.num_bytes if self._comms_tag is not None else 0
        self._comms_tag = TagReport(
            COMMS,
            known if self._are_comms_away else stats.device_bytes,
            "keep" if stats.kind == "keep" else "rematerialise",
            "discarded" if self._are_comms_away else "mapped_dirty",
        )

    def release(self, command: MemoryCommand) -> Carried:
        """Communicators first: nothing may be in flight on memory that leaves."""
        carried = Carried()
        if COMMS in command.tags:
            self._release_comms(command)
        for store in self.stores:
            if tags := self._known(store, command.tags):
                carried.add("release", store.release(tags))
        stored = self._stored()
        for tag in command.tags:
            if tag in self.planned and tag in self._granted and tag not in stored:
                self._granted.discard(tag)
                carried.dropped_bytes += self.planned[tag][0]
        self.survey_comms()
        return carried

    def restore(self, command: MemoryCommand) -> Carried:
        """Communicators last: they find the device as it will be."""
        carried = Carried()
        for store in self.stores:
            if tags := self._known(store, command.tags):
                carried.add("restore", store.restore(tags))
        self._granted.update(tag for tag in command.tags if tag in self.planned)
        if COMMS in command.tags:
            self._restore_comms(command)
        self.survey_comms()
        return carried

    def _known(self, store: AssetStore, tags: Sequence[Tag]) -> list[Tag]:
        have = {tag.tag for tag in store.report()}
        return [tag for tag in tags if tag in have]

    def _release_comms(self, command: MemoryCommand) -> None:
        if self.comms is None or self._are_comms_away or self.comms.kind == "keep":
            return
        self.survey_comms()  # their size is told while they are away
        try:
            self.comms.release(command.epoch, command.deadline_s)
        except Absent:
            raise  # nobody let go of anything
        except MyxaError:
            self.comms.abort()
            self._are_comms_away = True
            raise
        self._are_comms_away = True

    def _restore_comms(self, command: MemoryCommand) -> None:
        if self.comms is None or not self._are_comms_away:
            return
        try:
            self.comms.restore(command.epoch, command.deadline_s)
        except MyxaError:
            self.comms.abort()
            raise
        self._are_comms_away = False
        self.comm_epoch = command.epoch
