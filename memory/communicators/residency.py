"""How the communicators of a process leave its devices and come back: what is asked of it, and its parts.

A release is collective in effect: every member of every group does the same under the same epoch, in one order. The
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
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from ...core.errors import MemoryFault


@dataclass(frozen=True, slots=True, kw_only=True)
class CommStats:
    """Communicators of this process, as far as they report."""

    epoch: int
    num_groups: int
    num_live: int
    """Of them built and not released now."""
    device_bytes: int = 0
    """0 where the library does not report it."""


class CommResidency(Protocol):
    """Releases communicators. Methods block: call them in the backend thread, never on the event loop."""

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
