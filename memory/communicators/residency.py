"""How the communicators of a process leave its devices and come back: one interface, several ways.

    keep      they stay, and their bytes are reported
    suspend   the library releases their memory in place (NCCL >= 2.29.7 by torch >= 2.12, or through its own C calls)
    reload    a proxy backend drops what is inside a process group and builds it again lazily; the group object stays
    rebuild   the owner destroys its groups and makes new ones; the last resort, identities change

All of them are collective in effect: every member of every group does the same under the same epoch, in one order. The
control group (gloo) of a gang is never among them. `EpochGate` decides what an order means for one process:

    live --release(e)--> released --restore(e' > e)--> live
    any --failed--> broken --restore(e' > newest)--> live

`within` runs library calls that may hang in a daemon thread and abandons them at the deadline; the threads of
`concurrent.futures` would be joined at exit, so that one hung call would keep the process from ending.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from ...core.errors import MemoryFault
from .membership import GangMembers

ResidencyKind = Literal["keep", "suspend", "reload", "rebuild"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommStats:
    """Communicators of this process, as far as they report."""

    kind: ResidencyKind
    epoch: int
    num_groups: int
    num_live: int
    """Of them built and not released now."""
    device_bytes: int = 0
    """0 where the library does not report it."""
    by_group: dict[str, int] = field(default_factory=dict[str, int])


class CommResidency(Protocol):
    """One way to release communicators. Methods block: call them in the backend thread, never on the event loop."""

    @property
    def kind(self) -> ResidencyKind:
        """The way taken."""
        ...

    def stats(self) -> CommStats:
        """Groups and bytes at present."""
        ...

    def release(self, epoch: int, timeout_s: float) -> CommStats:
        """Give the memory back. Idempotent for an epoch; an epoch older than the newest seen is refused.
        Raises MemoryFault naming group and rank when the others did not come within `timeout_s`."""
        ...

    def restore(self, epoch: int, timeout_s: float) -> CommStats:
        """Usable again under `epoch`, which is newer than that of the release."""
        ...

    def abort(self) -> None:
        """A member died: give up whatever hangs in a collective, and the memory with it."""
        ...


GateState = Literal["live", "released", "broken"]
Answer = Literal["do", "done"]

_ON_SAME_EPOCH: dict[tuple[str, GateState], Answer | None] = {
    ("release", "live"): "do",
    ("release", "released"): "done",
    ("release", "broken"): "do",
    ("restore", "live"): "done",
    ("restore", "released"): None,
    ("restore", "broken"): None,
}
"""What is answered to an order under the newest epoch seen; None: it needs a newer one."""


class EpochGate:
    """Which epoch the communicators of this process are in, and whether they may be used."""

    def __init__(self) -> None:
        self.newest = 0
        self.state: GateState = "live"

    def asked(self, order: Literal["release", "restore"], epoch: int) -> Answer:
        """What to do about an order; MemoryFault when it comes too late or too early."""
        if epoch < self.newest:
            raise MemoryFault(
                f"{order} of communicators under epoch {epoch}, but epoch {self.newest} was seen",
                remedy="the order is a late one and has no effect",
            )
        if epoch > self.newest:
            return "done" if order == "release" and self.state == "released" else "do"
        answer = _ON_SAME_EPOCH[order, self.state]
        if answer is None:
            raise MemoryFault(
                f"restore of communicators under epoch {epoch}, under which they were released",
                remedy="members could not distinguish the two incarnations of a group: restore under a newer epoch",
            )
        return answer

    def became(self, state: GateState, epoch: int) -> None:
        """An order was carried out (or failed half way: "broken")."""
        self.state = state
        self.newest = max(self.newest, epoch)


T = TypeVar("T")
K = TypeVar("K")


class Overrun(MemoryFault):
    """The work did not end by its deadline and was abandoned."""


def within(seconds: float, what: Callable[[], str], work: Callable[[], T]) -> T:
    """The result, or error, of `work`; Overrun with `what()` after `seconds`."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again by the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="communicators", daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    if thread.is_alive():
        raise Overrun(f"{what()} did not end within {seconds:.1f} s")
    if errors:
        raise errors[0]
    return results[0]


def all_at_once(items: Iterable[K], work: Callable[[K], None], num_at_once: int) -> None:
    """`work` for every item, begun in their order, so many at a time; the first error is raised when all have ended."""
    left = deque(items)
    errors: list[BaseException] = []

    def run() -> None:
        while True:
            try:
                item = left.popleft()
            except IndexError:
                return
            try:
                work(item)
            except BaseException as error:  # noqa: BLE001  # raised below
                errors.append(error)

    threads = [
        threading.Thread(target=run, name="communicators", daemon=True) for _ in range(min(num_at_once, len(left)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class KeepComms:
    """CommResidency that releases nothing."""

    def __init__(self, bytes_by_group: Callable[[], dict[str, int]] = dict) -> None:
        """`bytes_by_group`: of every live group, as far as the library reports them."""
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


ABORT_S = 10.0


class RebuildComms:
    """CommResidency by two callbacks. Methods block."""

    def __init__(
        self, destroy: Callable[[int], None], make: Callable[[int], int], peers: GangMembers, *, num_groups: int = 0
    ) -> None:
        """`destroy(epoch)` ends all groups; `make(epoch)` makes them (under a prefix of the epoch in the store: old
        keys must not be met) and returns how many. `num_groups`: how many there are now."""
        self._destroy = destroy
        self._make = make
        self._peers = peers
        self._gate = EpochGate()
        self._num_groups = num_groups

    @property
    def kind(self) -> ResidencyKind:
        return "rebuild"

    def stats(self) -> CommStats:
        num_live = self._num_groups if self._gate.state == "live" else 0
        return CommStats(kind="rebuild", epoch=self._gate.newest, num_groups=self._num_groups, num_live=num_live)

    def release(self, epoch: int, timeout_s: float) -> CommStats:
        """Destroy, once all members have come."""
        if self._gate.asked("release", epoch) == "done":
            self._gate.became("released", epoch)
            return self.stats()
        self._step("destroy", "released", epoch, timeout_s, lambda: self._destroy(epoch))
        return self.stats()

    def restore(self, epoch: int, timeout_s: float) -> CommStats:
        """Make, once all members have come."""
        if self._gate.asked("restore", epoch) == "done" or self._gate.state == "live":
            self._gate.became("live", epoch)
            return self.stats()

        def make() -> None:
            self._num_groups = self._make(epoch)

        self._step("make", "live", epoch, timeout_s, make)
        return self.stats()

    def abort(self) -> None:
        """Destroy without asking anybody."""
        newest = self._gate.newest
        self._gate.became("broken", newest)
        within(ABORT_S, lambda: "destroying all groups", lambda: self._destroy(newest))

    def _step(self, word: str, state: GateState, epoch: int, timeout_s: float, work: Callable[[], None]) -> None:
        deadline = self._peers.clock.monotonic() + timeout_s
        self._peers.meet(f"{word} under epoch {epoch}", deadline)
        try:
            left_s = deadline - self._peers.clock.monotonic()
            within(left_s, lambda: f"the owner's callback to {word} all groups under epoch {epoch}", work)
        except BaseException:
            self._gate.became("broken", epoch)
            self._peers.tell(f"broken under epoch {epoch}")
            raise
        self._gate.became(state, epoch)
        self._peers.tell(f"{state} under epoch {epoch}")
