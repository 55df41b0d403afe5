"""Communicators whose library gives their device memory back in place and takes it again at the same addresses.

NCCL's suspend and resume are collective over the members, want an idle communicator, are not idempotent, refuse one
that was never built, and wait for the others without a deadline. So: members first tell each other what each of them
has built; only what all members of a group have built is suspended, in the order of group names, one after the other
(sixteen at a time took as long: the driver unmaps for one caller at a time); all in a thread that is left alone when
the deadline is over. How the library is called is not known here (`native`, `ctypes_suspend`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from typing import Protocol, cast

from ...core.errors import MemoryFault
from .deadline import Overrun, all_at_once, within
from .epochs import EpochGate
from .peers import Peers
from .residency import CommStats, ResidencyKind

ABORT_S = 10.0


class Suspendable(Protocol):
    """One communicator of this process. `name` and `ranks` are equal on all members."""

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    def is_built(self) -> bool: ...
    def suspend(self) -> None: ...
    def resume(self) -> None: ...
    def abort(self) -> None: ...
    def memory(self) -> dict[str, int]:
        """Bytes: "suspend" can leave, "persist" cannot, "total"; and "suspended", 0 or 1."""
        ...


class SuspendComms:
    """CommResidency over `Suspendable`s. Methods block."""

    def __init__(
        self,
        communicators: Callable[[], Iterable[Suspendable]],
        peers: Peers,
        *,
        prepare: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> None:
        """`communicators` is asked anew at each release: groups come and go. `prepare` is called by
        the caller and gives what the thread that calls the library does first (the caller's device)."""
        self._communicators = communicators
        self._peers = peers
        self._prepare = prepare
        self._gate = EpochGate()
        self._suspended: list[Suspendable] = []
        self._is_aborted = False
        self._at = ""

    @property
    def kind(self) -> ResidencyKind:
        return "suspend"

    def stats(self) -> CommStats:
        """`device_bytes`: what is on the device now."""
        known = sorted(self._communicators(), key=lambda each: each.name)
        built = [] if self._is_aborted else [each for each in known if each.is_built()]
        by_group = {each.name: _resident(each.memory()) for each in built}
        return CommStats(
            kind="suspend",
            epoch=self._gate.newest,
            num_groups=len(known),
            num_live=len(built) - len(self._suspended),
            device_bytes=sum(by_group.values()),
            by_group=by_group,
        )

    def release(self, epoch: int, timeout_s: float) -> CommStats:
        """Suspend what all members have built. After an Overrun nothing is known: abort, and make the groups again."""
        if self._gate.asked("release", epoch) == "done":
            self._gate.became("released", epoch)
            return self.stats()
        self._check_whole()
        deadline = self._peers.clock.monotonic() + timeout_s
        mine = {each.name: each for each in self._communicators() if each.is_built()}
        words = self._peers.meet(f"suspend under epoch {epoch}", deadline, json.dumps(sorted(mine)))
        built = {rank: set(cast(list[str], json.loads(word))) for rank, word in words.items()}
        chosen = [mine[name] for name in sorted(mine) if all(name in built.get(rank, ()) for rank in mine[name].ranks)]
        self._carry_out("released", epoch, deadline, lambda: self._suspend(chosen))
        return self.stats()

    def restore(self, epoch: int, timeout_s: float) -> CommStats:
        """Resume what the release suspended, in its order."""
        if self._gate.asked("restore", epoch) == "done" or self._gate.state == "live":
            self._gate.became("live", epoch)
            return self.stats()
        self._check_whole()
        deadline = self._peers.clock.monotonic() + timeout_s
        self._peers.meet(f"resume under epoch {epoch}", deadline)
        self._carry_out("live", epoch, deadline, self._resume)
        return self.stats()

    def abort(self) -> None:
        """The communicators are lost, and their memory with them; the owner has to make the groups again. All at the
        same time: one that hangs keeps no other."""
        self._gate.became("broken", self._gate.newest)
        self._is_aborted = True
        self._suspended = []
        left = {each.name: each for each in self._communicators() if each.is_built()}
        chosen = list(left.values())
        use_device = self._prepare()

        def one(each: Suspendable) -> None:
            if use_device is not None:
                use_device()
            each.abort()
            left.pop(each.name)

        with contextlib.suppress(Overrun):
            self._within(ABORT_S, "abort", lambda: all_at_once(chosen, one, len(chosen)))
        if left:
            raise MemoryFault(
                f"groups {', '.join(sorted(left))} hang in their abort and keep their memory", remedy="end this process"
            )

    def _carry_out(self, state: str, epoch: int, deadline: float, work: Callable[[], None]) -> None:
        try:
            self._within(deadline - self._peers.clock.monotonic(), state, work)
        except BaseException:
            self._gate.became("broken", epoch)
            self._peers.tell(f"broken at group {self._at} under epoch {epoch}")
            raise
        self._gate.became("released" if state == "released" else "live", epoch)
        self._peers.tell(f"{state} under epoch {epoch}")

    def _suspend(self, chosen: list[Suspendable]) -> None:
        for each in chosen:
            self._at = each.name
            each.suspend()
            self._suspended.append(each)

    def _resume(self) -> None:
        while self._suspended:
            each = self._suspended[0]
            self._at = each.name
            each.resume()
            self._suspended.pop(0)

    def _within(self, seconds: float, word: str, work: Callable[[], None]) -> None:
        first = self._prepare()

        def prepared() -> None:
            if first is not None:
                first()
            work()

        rank = "this rank" if self._peers.roll_call is None else f"rank {self._peers.roll_call.rank}"
        within(seconds, lambda: f"{rank}: group {self._at} becoming {word}", prepared)

    def _check_whole(self) -> None:
        if self._is_aborted or self._gate.state == "broken":
            raise MemoryFault(
                f"communicators broke at group {self._at} under epoch {self._gate.newest}",
                remedy="what was suspended is lost: abort, and make the groups again (reload, rebuild)",
            )


def _resident(memory: dict[str, int]) -> int:
    return memory.get("persist", 0) if memory.get("suspended") else memory.get("total", 0)
