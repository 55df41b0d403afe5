"""Communicators that are dropped and built again inside process groups that stay the same objects.

    comms = ReloadComms()
    comms.register()                                    # torch.distributed now has "myxa_gloo" and "myxa_nccl"
    dist.init_process_group("myxa_nccl", ...)           # new_group, DeviceMesh, parallel_state: as usual
    comms.release(epoch=5, timeout_s=30)                # every member: no communicator is left on the device
    comms.restore(epoch=6, timeout_s=30)                # every member: those that were live are live again

Groups are made through the public `torch.distributed.Backend.register_backend`; no function of torch is replaced. So
the group object, its name, its place in every registry, meshes and functional collectives do not change. Callers see:
`get_backend()` says "myxa_nccl" (torch keeps the requested name; `native_name` maps it), the backend's `name()` "nccl".

A `ProxiedGroup` makes its inner backend at the first operation or at a restore, from the group's own store under a
prefix of the epoch, so keys of an earlier epoch cannot be met. All members (two, for a send or a receive over NCCL)
first pass the membership check, because NCCL's rendezvous has no deadline and gloo's does not name absent members.

Considered: patching torch.distributed's functions (forty names, and code that had imported them earlier bypasses the
patch); destroying and making groups again (identities change); a Python ProcessGroup (functional collectives refuse
it).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ...core.clock import Clock, SystemClock
from ...core.errors import MemoryFault
from .membership import Absent, MembershipCheck
from .proxy_build import load
from .residency import CommStats, EpochGate, Overrun, all_at_once, within

Native = Literal["gloo", "nccl"]
KEYS = "myxa"


def device_of_caller() -> Callable[[], None] | None:
    """What makes another thread use the caller's device; None where CUDA is not used."""
    if not torch.cuda.is_initialized():
        return None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


class Proxy(Protocol):
    """What `proxy_backend.cpp` gives to Python, beside what every torch backend has."""

    is_live: bool

    def build(self) -> None: ...
    def drop(self, how: str) -> bool: ...
    def inner(self) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What torch gave when the group was made."""

    name: str
    native: Native
    store: Any
    rank: int
    """Of this process, inside the group."""
    ranks: tuple[int, ...]
    """All members, as ranks of WORLD."""
    timeout: timedelta
    options: Any = None
    """ProcessGroupNCCL.Options that the caller gave."""


class ProxiedGroup:
    """The owner that the proxy calls. `closed` means: out of the registry."""

    def __init__(
        self,
        facts: GroupFacts,
        clock: Clock,
        allowance: Callable[[str], tuple[int, float]],
        on_closed: Callable[[str], None],
    ) -> None:
        self.facts = facts
        self.proxy: Proxy | None = None
        self.failed_epoch: int = -1
        """Its members did not meet under it: what some of them left in the store would confuse a second try."""
        self._clock = clock
        self._allowance = allowance
        self._on_closed = on_closed
        self._membership = MembershipCheck(PrefixStore(f"{KEYS}-roll", facts.store), facts.ranks[facts.rank], clock)

    # -- called by the proxy -------------------------------------------------------------------------------------------

    def make(self, is_pair: bool) -> object:
        """The inner backend; MemoryFault when communicators are released, or who did not come."""
        epoch, timeout_s = self._allowance(self.facts.name)
        if epoch == self.failed_epoch:
            raise MemoryFault(
                f"group {self.facts.name} could not be built under epoch {epoch}", remedy="restore under a newer epoch"
            )
        try:
            if is_pair and self.facts.native == "nccl":
                self._membership.arrive(f"epoch {epoch}")  # NCCL joins the two; the others may come later or never
            elif len(self.facts.ranks) > 1:
                self._meet(epoch, timeout_s)
            return self._make(epoch, timeout_s)
        except MemoryFault:
            self.failed_epoch = epoch
            raise
        except RuntimeError as error:
            self.failed_epoch = epoch
            raise MemoryFault(
                f"rank {self._rank}: {self._words} could not be built under epoch {epoch}: {_first_line(error)}",
                remedy="a member ended meanwhile, or the network is broken; restore under a newer epoch",
            ) from error

    def closed(self) -> None:
        self.proxy = None  # else proxy and owner would hold each other for ever
        self._on_closed(self.facts.name)

    # -- called by the residency ---------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        return self.proxy is not None and self.proxy.is_live

    def drop(self, how: str) -> None:
        if self.proxy is not None:
            self.proxy.drop(how)

    def build(self) -> None:
        """Everything that a first operation would wait for."""
        if self.proxy is None:
            return
        self.proxy.build()
        if self.facts.native == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
            self.proxy.inner().eager_connect_single_device(device)

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return self.facts.ranks[self.facts.rank]

    @property
    def _words(self) -> str:
        return f"{self.facts.native} group {self.facts.name} of ranks {list(self.facts.ranks)}"

    def _meet(self, epoch: int, timeout_s: float) -> None:
        self._membership.tell(f"at epoch {epoch}")
        try:
            self._membership.meet(f"epoch {epoch}", self.facts.ranks, self._clock.monotonic() + timeout_s)
        except Absent as error:
            raise Absent(
                f"rank {self._rank}: {self._words} could not be built under epoch {epoch} within {timeout_s:.1f} s: "
                f"{error.message}",
                error.ranks,
                remedy="those ranks ended, or did not get the order; restore under a newer epoch",
            ) from None

    def _make(self, epoch: int, timeout_s: float) -> object:
        store = PrefixStore(f"{KEYS}-epoch-{epoch}", self.facts.store)
        size = len(self.facts.ranks)
        if self.facts.native == "gloo":
            meeting = min(timedelta(seconds=timeout_s), self.facts.timeout)
            gloo: Any = cast(Any, dist).ProcessGroupGloo(store, self.facts.rank, size, timeout=meeting)
            gloo._set_default_timeout(self.facts.timeout)
            return gloo
        nccl = cast(Any, dist).ProcessGroupNCCL
        options = nccl.Options() if self.facts.options is None else self.facts.options
        options._timeout = self.facts.timeout
        options.global_ranks_in_group = list(self.facts.ranks)
        options.group_name = self.facts.name
        return nccl(store, self.facts.rank, size, options)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]


NAMES: dict[str, Native] = {"myxa_gloo": "gloo", "myxa_nccl": "nccl"}
DEVICES = {"gloo": ["cpu", "cuda"], "nccl": ["cuda"]}
ABORT_S = 10.0
"""For giving up hung communicators; what takes longer is left behind."""


def native_name(backend: str) -> str:
    """The library behind a backend's name: "nccl" for "myxa_nccl", itself for any other."""
    return NAMES.get(backend, backend)


def proxied_name(backend: str) -> str:
    """The name to ask torch for: "myxa_nccl" for "nccl". MemoryFault for a library that has no proxy."""
    for name, native in NAMES.items():
        if backend in (native, name):
            return name
    raise MemoryFault(f"there is no reloadable kind of backend '{backend}'", remedy=f"there are {', '.join(NAMES)}")


class ReloadComms:
    """CommResidency over proxies; one per process. Methods block."""

    def __init__(
        self,
        *,
        cache: Path | None = None,
        first_op_timeout_s: float = 60.0,
        is_eager: bool = True,
        local_kinds: Collection[Native] = ("nccl",),
        num_drops: int = 16,
        free_bytes: Callable[[], int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`is_eager`: restore builds what had been live before the release, and answers for it; else the first
        operation of each group does. `local_kinds`: whose groups of one copy for themselves instead of asking the
        library, which would build a communicator. `num_drops`: groups dropped at the same time; a drop mostly waits
        for ends of threads. `free_bytes` measures the device before and after a drop."""
        self._module = load(cache)
        self._clock = clock or SystemClock()
        self._first_op_timeout_s = first_op_timeout_s
        self._is_eager = is_eager
        self._local_kinds = frozenset(local_kinds)
        self._free_bytes = free_bytes
        self._gate = EpochGate()
        self._groups: dict[str, ProxiedGroup] = {}
        self._membership: MembershipCheck | None = None
        self._world: tuple[int, ...] = ()
        self._was_live: tuple[str, ...] = ()
        self._freed_bytes = 0
        self._epoch = 0
        self._deadline: float | None = None
        self._num_drops = num_drops
        self._busy: set[str] = set()
        self._stuck: set[str] = set()

    # -- torch's side --------------------------------------------------------------------------------------------------

    def register(self) -> None:
        """Make the names known; groups made from now on belong to this object."""
        for name, native in NAMES.items():

            def create(given: Any, options: Any, native: Native = native) -> object:
                return self._create(native, given, options)

            register = cast(Any, dist.Backend).register_backend
            register(name, create, extended_api=True, devices=DEVICES[native])

    def _create(self, native: Native, given: Any, options: Any) -> object:
        ranks = tuple(given.global_ranks_in_group) or tuple(range(given.group_size))
        name = str(given.group_id)
        if name in self._groups:
            raise MemoryFault(
                f"group {name} asks for two reloadable backends, of which torch would use one for both devices",
                remedy='ask for "cpu:gloo,cuda:myxa_nccl": the CPU half holds no device memory',
            )
        if native == "nccl" and not dist.is_nccl_available():
            raise MemoryFault(
                "myxa_nccl: this torch was built without NCCL", remedy="myxa_gloo, or a CUDA build of torch"
            )
        facts = GroupFacts(
            name=name, native=native, store=given.store, rank=given.group_rank, ranks=ranks, timeout=given.timeout,
            options=options,
        )  # fmt: skip
        if not given.global_ranks_in_group:
            self._begin(given.store, given.group_rank, ranks)
        group = ProxiedGroup(facts, self._clock, self._allowance, self._forget)
        group.proxy = self._module.ReloadableBackend(
            facts.rank, len(ranks), native, native == "nccl", native in self._local_kinds, group
        )
        self._groups[name] = group
        return group.proxy

    def _begin(self, store: Any, rank: int, ranks: tuple[int, ...]) -> None:
        """WORLD is made: whom to agree with, and over what."""
        self._membership = MembershipCheck(PrefixStore(f"{KEYS}-control", store), rank, self._clock)
        self._membership.tell("at epoch 0")
        self._world = ranks

    def _forget(self, name: str) -> None:
        self._groups.pop(name, None)

    def _allowance(self, name: str) -> tuple[int, float]:
        """Under which epoch an inner backend may be made now, and how long its members may take."""
        if self._gate.state != "live" and self._deadline is None:
            raise MemoryFault(
                f"group {name} was used while communicators are {self._gate.state} (epoch {self._gate.newest})",
                remedy="no operation between release and restore: lease the memory first",
            )
        if self._deadline is None:
            return self._epoch, self._first_op_timeout_s
        return self._epoch, max(self._deadline - self._clock.monotonic(), 0.0)

    # -- the manager's side --------------------------------------------------------------------------------------------

    def stats(self) -> CommStats:
        """`device_bytes`: what left with the last drop, if measured, while it is back."""
        is_live = self._gate.state == "live"
        return CommStats(
            epoch=self._gate.newest,
            num_groups=len(self._groups),
            num_live=sum(group.is_live for group in self._groups.values()),
            device_bytes=self._freed_bytes if is_live else 0,
        )

    def release(self, epoch: int, timeout_s: float) -> CommStats:
        """Drop every inner backend, once all members have come. A member that does not come keeps all others' alive."""
        if self._gate.asked("release", epoch) == "done":
            self._gate.became("released", epoch)
            return self.stats()
        deadline = self._clock.monotonic() + timeout_s
        self._meet(f"release under epoch {epoch}", deadline)
        self._note_live()
        before = self._free_bytes() if self._free_bytes else 0
        try:
            self._within(deadline, "drop", self._drop_all)
        except BaseException as error:
            self._gate.became("broken", epoch)
            if isinstance(error, Overrun):
                self._stuck |= self._busy
            raise
        self._gate.became("released", epoch)
        self._tell(f"released under epoch {epoch}")
        if self._free_bytes:
            self._freed_bytes = max(self._free_bytes() - before, 0)
        return self.stats()

    def restore(self, epoch: int, timeout_s: float) -> CommStats:
        """Groups may be used again, once all members have come."""
        if self._gate.asked("restore", epoch) == "done" or self._gate.state == "live":
            self._gate.became("live", epoch)
            return self.stats()
        deadline = self._clock.monotonic() + timeout_s
        words = self._meet(f"restore under epoch {epoch}", deadline, json.dumps(self._was_live))
        self._epoch = epoch
        wanted = {name for word in words.values() for name in cast(list[str], json.loads(word))}
        self._deadline = deadline
        try:
            if self._is_eager:
                self._within(deadline, "build", lambda: self._build(wanted))
        except BaseException:
            self._gate.became("broken", epoch)
            raise
        finally:
            self._deadline = None
        self._was_live = ()
        self._gate.became("live", epoch)
        self._tell(f"at epoch {epoch}")
        return self.stats()

    def abort(self) -> None:
        """Drop without asking anybody. MemoryFault when the libraries hang even in that: end this process then."""
        self._note_live()
        self._gate.became("broken", self._gate.newest)
        self._busy.clear()
        try:
            self._within(self._clock.monotonic() + ABORT_S, "abort", self._abort_all)
        except Overrun:
            self._stuck |= self._busy
        if self._stuck:
            raise MemoryFault(
                f"groups {', '.join(sorted(self._stuck))} hang in their abort and keep their memory",
                remedy="end this process",
            )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _meet(self, point: str, deadline: float, word: str = "") -> dict[int, str]:
        if self._membership is None:
            return {0: word}
        try:
            return self._membership.meet(point, self._world, deadline, word)
        except Absent as error:
            lost = sorted(name for name, group in self._groups.items() if set(group.facts.ranks) & set(error.ranks))
            raise Absent(
                f"rank {self._membership.rank}: {error.message}, of groups {', '.join(lost)}",
                error.ranks,
                remedy="they ended or did not get the order; abort, and restore under a newer epoch",
            ) from None

    def _tell(self, where: str) -> None:
        if self._membership is not None:
            self._membership.tell(where)

    def _drop_all(self) -> None:
        def drop(group: ProxiedGroup) -> None:
            group.drop("shutdown" if group.facts.native == "nccl" else "")

        self._for_each([group for _, group in self._sorted() if group.is_live], drop, self._num_drops)

    def _build(self, wanted: Collection[str]) -> None:
        chosen = [group for name, group in self._sorted() if name in wanted]
        # One after the other: gloo and NCCL wait inside the store's one connection, on which the others would wait.
        self._for_each(chosen, ProxiedGroup.build, 1)

    def _for_each(self, groups: list[ProxiedGroup], work: Callable[[ProxiedGroup], None], num_at_once: int) -> None:
        """On the caller's device; who is being worked at is known meanwhile."""
        use_device = device_of_caller()

        def run(group: ProxiedGroup) -> None:
            self._busy.add(group.facts.name)
            if use_device is not None:
                use_device()
            work(group)
            self._busy.discard(group.facts.name)

        self._busy.clear()
        all_at_once(groups, run, num_at_once)

    def _abort_all(self) -> None:
        """All at the same time: each ends its own threads and frees its memory, and frees may wait for what runs
        for others on the device. NCCL's group call does not reach aborts, which torch does in its own threads."""
        groups = [group for _, group in self._sorted()]
        self._for_each(groups, lambda group: group.drop("abort"), max(len(groups), 1))

    def _note_live(self) -> None:
        live = {name for name, group in self._groups.items() if group.is_live}
        self._was_live = tuple(sorted(live.union(self._was_live)))

    def _sorted(self) -> Iterator[tuple[str, ProxiedGroup]]:
        """The one order that all members share."""
        return iter(sorted(self._groups.items()))

    def _within(self, deadline: float, word: str, work: Callable[[], None]) -> None:
        """In its own thread, on the caller's device."""
        use_device = device_of_caller()

        def on_device() -> None:
            if use_device is not None:
                use_device()
            work()

        def what() -> str:
            return f"{word} of groups {', '.join(sorted(self._busy))}"

        within(deadline - self._clock.monotonic(), what, on_device)
