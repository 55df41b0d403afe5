"""Communicators that stay where they are: nothing to do, and their bytes are told so that the ledger counts them."""

from __future__ import annotations

from collections.abc import Callable

from .epochs import EpochGate
from .residency import CommStats, ResidencyKind


class KeepComms:
    """CommResidency that releases nothing."""

    def __init__(self, bytes_by_group: Callable[[], dict[str, int]] = dict) -> None:
        """`bytes_by_group`: of every live group, as far as the library tells."""
        self._bytes_by_group = bytes_by_group
        self._gate = EpochGate()

    @property
    def kind(self) -> ResidencyKind:
        return "keep"

    def stats(self) -> CommStats:
        """All groups are live, whatever was ordered."""
        by_group = self._bytes_by_group()
        return CommStats(
            kind="keep",
            epoch=self._gate.newest,
            num_groups=len(by_group),
            num_live=len(by_group),
            device_bytes=sum(by_group.values()),
            by_group=by_group,
        )

    def release(self, epoch: int, timeout_s: float) -> CommStats:
        """Only the epoch is noted; a late order is refused as everywhere."""
        del timeout_s
        self._gate.asked("release", epoch)
        self._gate.became("released", epoch)
        return self.stats()

    def restore(self, epoch: int, timeout_s: float) -> CommStats:
        """Only the epoch is noted."""
        del timeout_s
        self._gate.asked("restore", epoch)
        self._gate.became("live", epoch)
        return self.stats()

    def abort(self) -> None:
        self._gate.became("broken", self._gate.newest)
