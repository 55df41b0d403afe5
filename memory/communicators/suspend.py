"""Communicators whose library releases their device memory in place and takes it back at the same addresses.

NCCL's suspend and resume are collective over the members, need an idle communicator, are not idempotent, refuse one
that was never built, and wait for the others without a deadline. So members first report what each has built. Only what
all members of a group have built is suspended, in the order of group names, one after the other (sixteen at a time took
as long: the driver unmaps for one caller at a time), in a thread that is abandoned at the deadline.

The library is called through torch >= 2.12 (`NativeComm`), or by NCCL's own C calls (`CtypesComm`) for a torch without
them: torch 2.11 is built against NCCL 2.28.9 and uses the `libnccl.so.2` that the process loaded first (LD_PRELOAD). A
library of 2.29.7 or newer has the three calls, and `ProcessGroupNCCL._comm_ptr()` gives the communicator.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from ...core.errors import MemoryFault
from .membership import GangMembers
from .residency import CommStats, EpochGate, Overrun, ResidencyKind, all_at_once, within

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
        peers: GangMembers,
        *,
        prepare: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> None:
        """`communicators` is called at each release: groups come and go. `prepare` is called by
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

        rank = "this rank" if self._peers.membership is None else f"rank {self._peers.membership.rank}"
        within(seconds, lambda: f"{rank}: group {self._at} becoming {word}", prepared)

    def _check_whole(self) -> None:
        if self._is_aborted or self._gate.state == "broken":
            raise MemoryFault(
                f"communicators broke at group {self._at} under epoch {self._gate.newest}",
                remedy="what was suspended is lost: abort, and make the groups again (reload, rebuild)",
            )


def _resident(memory: dict[str, int]) -> int:
    return memory.get("persist", 0) if memory.get("suspended") else memory.get("total", 0)


@dataclass(frozen=True, slots=True)
class NativeComm:
    """One group's backend, as `Suspendable`."""

    name: str
    ranks: tuple[int, ...]
    backend: Any

    def is_built(self) -> bool:
        """A group that was never used has no communicator yet, and NCCL refuses to suspend it."""
        is_initialized = getattr(self.backend, "_is_initialized", None)
        return bool(is_initialized()) if callable(is_initialized) else False

    def suspend(self) -> None:
        self.backend.suspend()

    def resume(self) -> None:
        self.backend.resume()

    def abort(self) -> None:
        self.backend.abort()

    def memory(self) -> dict[str, int]:
        return {str(name): int(value) for name, value in self.backend.memory_stats().items()}


def nccl_backends() -> Iterable[tuple[str, tuple[int, ...], Any]]:
    """(name, ranks, backend) of every group of this process whose CUDA half is NCCL.

    torch has no public list of groups; its table of names is read, never written.
    """
    world: Any = cast(Any, dist.distributed_c10d)._world
    device = torch.device("cuda")
    for group, name in list(world.pg_names.items()):
        if device in group._device_types:
            backend = group._get_backend(device)
            if backend.name() == "nccl":
                yield str(name), tuple(dist.get_process_group_ranks(group)), backend


def native_comms(
    peers: GangMembers, find: Callable[[], Iterable[tuple[str, tuple[int, ...], Any]]] = nccl_backends
) -> SuspendComms:
    """Residency of this process's NCCL groups. `find`: which they are."""
    return SuspendComms(lambda: [NativeComm(*each) for each in find()], peers, prepare=device_of_caller)


def device_of_caller() -> Callable[[], None] | None:
    """What makes another thread use the caller's device; None where CUDA is not used."""
    if not torch.cuda.is_initialized():
        return None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


LIBRARY = "libnccl.so.2"
SUSPEND_MEMORY = 1
STATS = {"suspend": 0, "suspended": 1, "persist": 2, "total": 3}
"""ncclCommMemStat_t, by the names that torch gives them."""
NEEDED = ("ncclCommSuspend", "ncclCommResume", "ncclCommMemStats")
NEEDED_VERSION = (2, 29, 7)


class NcclLibrary:
    """The calls, of a library that this process has loaded already."""

    def __init__(self, library: str | Path = LIBRARY) -> None:
        """Raises MemoryFault when it is not loaded or too old. A path is loaded (for tests)."""
        flags = os.RTLD_NOW | (os.RTLD_NOLOAD if library == LIBRARY else 0)
        try:
            self._library = ctypes.CDLL(str(library), mode=flags)
        except OSError as error:
            raise MemoryFault(
                f"{library} is not loaded in this process ({error})", remedy="a torch with NCCL"
            ) from error
        self.version = self._version()
        missing = [name for name in NEEDED if not hasattr(self._library, name)]
        if missing or self.version < NEEDED_VERSION:
            raise MemoryFault(
                f"NCCL {'.'.join(map(str, self.version))} has no {', '.join(missing) or 'usable suspend'}",
                remedy=f"LD_PRELOAD a libnccl.so.2 of {'.'.join(map(str, NEEDED_VERSION))} or newer",
            )

    def suspend(self, pointer: int) -> None:
        self._check("ncclCommSuspend", self._library.ncclCommSuspend(ctypes.c_void_p(pointer), SUSPEND_MEMORY))

    def resume(self, pointer: int) -> None:
        self._check("ncclCommResume", self._library.ncclCommResume(ctypes.c_void_p(pointer)))

    def memory(self, pointer: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, number in STATS.items():
            value = ctypes.c_uint64()
            status = self._library.ncclCommMemStats(ctypes.c_void_p(pointer), number, ctypes.byref(value))
            self._check("ncclCommMemStats", status)
            found[name] = value.value
        return found

    def _check(self, call: str, status: int) -> None:
        if status == 0:
            return
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        text: bytes = self._library.ncclGetErrorString(status) or b""
        raise MemoryFault(
            f"{call} answered {status} ({text.decode(errors='replace')})",
            remedy="a communicator must be idle, and built with NCCL_CUMEM_ENABLE=1",
        )

    def _version(self) -> tuple[int, int, int]:
        code = ctypes.c_int()
        self._library.ncclGetVersion(ctypes.byref(code))
        return code.value // 10000, code.value // 100 % 100, code.value % 100


@dataclass(frozen=True, slots=True)
class CtypesComm:
    """One group's communicator, as `Suspendable`."""

    name: str
    ranks: tuple[int, ...]
    backend: Any
    library: NcclLibrary

    def is_built(self) -> bool:
        """`_comm_ptr` of a group that was never used is an error."""
        is_initialized = getattr(self.backend, "_is_initialized", None)
        return bool(is_initialized()) if callable(is_initialized) else False

    def suspend(self) -> None:
        self.library.suspend(self.backend._comm_ptr())

    def resume(self) -> None:
        self.library.resume(self.backend._comm_ptr())

    def abort(self) -> None:
        self.backend.abort()

    def memory(self) -> dict[str, int]:
        return self.library.memory(self.backend._comm_ptr())


def ctypes_comms(
    peers: GangMembers,
    library: NcclLibrary,
    find: Callable[[], Iterable[tuple[str, tuple[int, ...], Any]]] = nccl_backends,
) -> SuspendComms:
    """Residency of this process's NCCL groups. `find`: which they are."""
    return SuspendComms(lambda: [CtypesComm(*each, library) for each in find()], peers, prepare=device_of_caller)
