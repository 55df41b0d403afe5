"""Communicators that are dropped and built again inside process groups that stay the same objects.

    comms = ReloadComms()
    comms.register()                                    # torch.distributed now has "myxa_gloo" and "myxa_nccl"
    dist.init_process_group("myxa_nccl", ...)           # new_group, DeviceMesh, parallel_state: as usual
    comms.release(epoch=5, timeout_s=30)                # every member: no communicator is left on the device
    comms.restore(epoch=6, timeout_s=30)                # every member: those that were live are live again

Groups are made through the public `torch.distributed.Backend.register_backend`; no function of torch is replaced, and
the group object, its name, meshes and functional collectives stay. `get_backend()` says "myxa_nccl".

A `ProxiedGroup` makes its inner backend at the first operation or at a restore, from the group's own store under a
prefix of the epoch. All members (two, for a send or a receive over NCCL) first pass the membership check, because
NCCL's rendezvous has no deadline and gloo's does not name absent members. The proxy is C++, compiled against the
installed torch: torch promises no binary interface for `c10d::Backend`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ...core.clock import Clock, SystemClock
from ...core.daemon_thread import begin_in_daemon_thread
from ...core.errors import MemoryFault, first_line
from .. import native
from .residency import Absent, MembershipCheck

Native = Literal["gloo", "nccl"]
KEYS = "myxa"
NAMES: dict[str, Native] = {"myxa_gloo": "gloo", "myxa_nccl": "nccl"}
DEVICES = {"gloo": ["cpu", "cuda"], "nccl": ["cuda"]}
ABORT_S = 10.0
"""For giving up hung communicators; what takes longer is left behind."""
NUM_DROPS = 16
"""Groups dropped at the same time; a drop mostly waits for ends of threads."""


def proxied_name(backend: str) -> str:
    """The name to ask torch for: "myxa_nccl" for "nccl". MemoryFault for a library that has no proxy."""
    for name, library in NAMES.items():
        if backend in (library, name):
            return name
    raise MemoryFault(f"there is no reloadable kind of backend '{backend}'", remedy=f"there are {', '.join(NAMES)}")


# -- the proxy's module ----------------------------------------------------------------------------------------------

MODULE = "myxa_proxy_backend"
SOURCE = Path(__file__).with_name("proxy_backend.cpp")
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w")
BUILD_S = 600.0
REMEDY = 'install what is missing, or set memory.communicators = "keep"'


def missing_for_build() -> str:
    """What a build lacks on this machine, in words; empty: nothing."""
    if not native.find_compiler(native.CPP_COMPILERS):
        return f"no C++ compiler ({', '.join(native.CPP_COMPILERS)}) is on PATH"
    python, torch_headers = Path(sysconfig.get_path("include")), Path(str(torch.__file__)).parent / "include"
    if not (python / "Python.h").exists():
        return f"Python's headers are not in {python}"
    if not (torch_headers / "torch/csrc/distributed/c10d/Backend.hpp").exists():
        return f"torch's headers are not in {torch_headers}"
    return ""


def built_proxy(cache_dir: Path | None = None) -> Path:
    """Path of the compiled proxy for this torch and Python. Raises MemoryFault naming what is missing."""
    if lacking := missing_for_build():
        raise MemoryFault(f"the proxy backend of communicators cannot be built: {lacking}", remedy=REMEDY)
    root = Path(str(torch.__file__)).parent
    folders = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return native.built(
        SOURCE,
        native.CPP_COMPILERS,
        [*FLAGS, abi, *(f"-I{folder}" for folder in folders), str(SOURCE), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"],
        facts=(torch.__version__, str(torch.version.git_version), str(sysconfig.get_config_var("SOABI"))),
        cache_dir=cache_dir,
        timeout_s=BUILD_S,
        remedy=REMEDY,
    )


def load() -> ModuleType:
    """The module with `ReloadableBackend`, compiled first where the cache has none; once a process."""
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    path = built_proxy()
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise MemoryFault(
            f"the proxy backend {path} does not load: {error}", remedy="remove that file; it is built again"
        ) from error
    sys.modules[MODULE] = module
    return module


# -- calls that may hang ---------------------------------------------------------------------------------------------

T = TypeVar("T")
K = TypeVar("K")


class Overrun(MemoryFault):
    """The work did not end by its deadline and was abandoned."""


def within(seconds: float, describe: Callable[[], str], work: Callable[[], T]) -> T:
    """The result, or error, of `work`; Overrun with `what()` after `seconds`. In a daemon thread: one of
    `concurrent.futures` would be joined at exit, so that one hung call would keep the process from ending."""
    future = begin_in_daemon_thread(work, "communicators")
    if not wait([future], max(seconds, 0.0)).done:
        raise Overrun(f"{describe()} did not end within {seconds:.1f} s")
    return future.result()


def all_at_once(items: Iterable[K], work: Callable[[K], None], num_at_once: int) -> None:
    """`work` for every item, in their order, so many at a time; the first error is raised when all have ended."""
    rest, errors = iter(items), list[BaseException]()
    while batch := [*islice(rest, num_at_once)]:
        futures = [begin_in_daemon_thread(partial(work, item), "communicators") for item in batch]
        errors += filter(None, [future.exception() for future in futures])
    if errors:
        raise errors[0]


# -- one group -------------------------------------------------------------------------------------------------------


class Proxy(Protocol):
    """What `proxy_backend.cpp` gives to Python, beside what every torch backend has."""

    is_live: bool

    def build(self) -> None: ...
    def drop(self, how: str) -> bool: ...
    def inner(self) -> Any: ...


class ProxiedGroup:
    """The owner that the proxy calls: `make` when it needs an inner backend, `closed` when the group was destroyed."""

    def __init__(
        self,
        kind: Native,
        request: Any,
        options: Any,
        clock: Clock,
        allowance: Callable[[str], tuple[int, float]],
        on_closed: Callable[[str], object],
    ) -> None:
        """`given`: what torch gave when the group was made; `options`: ProcessGroupNCCL.Options of the caller."""
        self.kind: Native = kind
        self.name = str(request.group_id)
        self.ranks = tuple(request.global_ranks_in_group) or tuple(range(request.group_size))
        """All members, as ranks of WORLD."""
        self.proxy: Proxy | None = None
        self._store: Any = request.store
        self._place: int = request.group_rank
        self._timeout: timedelta = request.timeout
        self._options: Any = options
        self._rank = self.ranks[self._place]
        self._words = f"{kind} group {self.name} of ranks {list(self.ranks)}"
        self._failed_epoch: int = -1
        """Its members did not meet under it: what some of them left in the store would confuse a second try."""
        self._clock = clock
        self._allowance = allowance
        self._on_closed = on_closed
        self._membership = MembershipCheck(PrefixStore(f"{KEYS}-roll", request.store), self._rank, clock)

    def make(self, is_pair: bool) -> object:
        """The inner backend; MemoryFault when communicators are released, or who did not come."""
        epoch, timeout_s = self._allowance(self.name)
        if epoch == self._failed_epoch:
            raise MemoryFault(
                f"group {self.name} could not be built under epoch {epoch}", remedy="restore under a newer epoch"
            )
        try:
            if is_pair and self.kind == "nccl":
                self._membership.arrive(f"epoch {epoch}")  # NCCL joins the two; the others may come later or never
            elif len(self.ranks) > 1:
                self._meet(epoch, timeout_s)
            return self._make(epoch, timeout_s)
        except MemoryFault:
            self._failed_epoch = epoch
            raise
        except RuntimeError as error:
            self._failed_epoch = epoch
            raise MemoryFault(
                f"rank {self._rank}: {self._words} could not be built under epoch {epoch}: {first_line(error)}",
                remedy="a member ended meanwhile, or the network is broken; restore under a newer epoch",
            ) from error

    def closed(self) -> None:
        self.proxy = None  # else proxy and owner would hold each other for ever
        self._on_closed(self.name)

    @property
    def is_live(self) -> bool:
        return self.proxy is not None and self.proxy.is_live

    def drop(self, how: str = "") -> None:
        if self.proxy is not None:
            self.proxy.drop(how or ("shutdown" if self.kind == "nccl" else ""))

    def build(self) -> None:
        """Everything that a first operation would wait for."""
        if self.proxy is None:
            return
        self.proxy.build()
        if self.kind == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
            self.proxy.inner().eager_connect_single_device(device)

    def _meet(self, epoch: int, timeout_s: float) -> None:
        self._membership.tell(f"at epoch {epoch}")
        try:
            self._membership.meet(f"epoch {epoch}", self.ranks, self._clock.monotonic() + timeout_s)
        except Absent as error:
            raise Absent(
                f"rank {self._rank}: {self._words} could not be built under epoch {epoch} within {timeout_s:.1f} s: "
                f"{error.message}",
                error.ranks,
                remedy="those ranks ended, or did not get the order; restore under a newer epoch",
            ) from None

    def _make(self, epoch: int, timeout_s: float) -> object:
        store = PrefixStore(f"{KEYS}-epoch-{epoch}", self._store)
        size = len(self.ranks)
        if self.kind == "gloo":
            meeting = min(timedelta(seconds=timeout_s), self._timeout)
            gloo: Any = cast(Any, dist).ProcessGroupGloo(store, self._place, size, timeout=meeting)
            gloo._set_default_timeout(self._timeout)
            return gloo
        nccl = cast(Any, dist).ProcessGroupNCCL
        options = nccl.Options() if self._options is None else self._options
        options._timeout = self._timeout
        options.global_ranks_in_group = list(self.ranks)
        options.group_name = self.name
        return nccl(store, self._place, size, options)


# -- all groups of a process -----------------------------------------------------------------------------------------


class ReloadComms:
    """CommResidency over proxies; one per process. Methods block.

    live --release--> released --restore--> live;  any --failed--> broken --restore--> live
    """

    def __init__(self, *, first_op_timeout_s: float = 60.0, local_kinds: Collection[Native] = ("nccl",)) -> None:
        """`local_kinds`: whose groups of one copy for themselves instead of building a communicator."""
        self._module = load()
        self._clock = SystemClock()
        self._first_op_timeout_s = first_op_timeout_s
        self._local_kinds = frozenset(local_kinds)
        self._state: Literal["live", "released", "broken"] = "live"
        self._groups: dict[str, ProxiedGroup] = {}
        self._membership: MembershipCheck | None = None
        self._world: tuple[int, ...] = ()
        self._was_live: tuple[str, ...] = ()
        self._epoch = 0
        self._deadline: float | None = None
        self._busy: set[str] = set()
        self._stuck: set[str] = set()

    # -- torch's side

    def register(self) -> None:
        """Make the names known; groups made from now on belong to this object."""
        for name, kind in NAMES.items():

            def create(request: Any, options: Any, kind: Native = kind) -> object:
                return self._create(kind, request, options)

            register = cast(Any, dist.Backend).register_backend
            register(name, create, extended_api=True, devices=DEVICES[kind])

    def _create(self, kind: Native, request: Any, options: Any) -> object:
        group = ProxiedGroup(
            kind, request, options, self._clock, self._allowance, lambda name: self._groups.pop(name, None)
        )
        if group.name in self._groups:
            raise MemoryFault(
                f"group {group.name} asks for two reloadable backends, of which torch would use one for both devices",
                remedy='ask for "cpu:gloo,cuda:myxa_nccl": the CPU half holds no device memory',
            )
        if kind == "nccl" and not dist.is_nccl_available():
            raise MemoryFault(
                "myxa_nccl: this torch was built without NCCL", remedy="myxa_gloo, or a CUDA build of torch"
            )
        if not request.global_ranks_in_group:  # WORLD: whom to agree with, and over what
            store = PrefixStore(f"{KEYS}-control", request.store)
            self._membership, self._world = MembershipCheck(store, request.group_rank, self._clock), group.ranks
            self._membership.tell("at epoch 0")
        group.proxy = self._module.ReloadableBackend(
            request.group_rank, len(group.ranks), kind, kind == "nccl", kind in self._local_kinds, group
        )
        self._groups[group.name] = group
        return group.proxy

    def _allowance(self, name: str) -> tuple[int, float]:
        """Under which epoch an inner backend may be made now, and how long its members may take."""
        if self._deadline is not None:
            return self._epoch, max(self._deadline - self._clock.monotonic(), 0.0)
        if self._state != "live":
            raise MemoryFault(
                f"group {name} was used while communicators are {self._state}",
                remedy="no operation between release and restore: lease the memory first",
            )
        return self._epoch, self._first_op_timeout_s

    # -- the manager's side

    def live(self) -> list[ProxiedGroup]:
        """Groups with a communicator, by name."""
        return [group for _, group in sorted(self._groups.items()) if group.is_live]

    def release(self, epoch: int, timeout_s: float) -> None:
        """Drop every inner backend, once all members have come. A member that does not come keeps all others' alive."""
        if self._state != "released":
            deadline = self._clock.monotonic() + timeout_s
            self._meet(f"release under epoch {epoch}", deadline)
            self._note_live()
            try:
                self._within(deadline, "drop", lambda: self._for_each(self.live(), ProxiedGroup.drop, NUM_DROPS))
            except BaseException as error:
                self._state = "broken"
                if isinstance(error, Overrun):
                    self._stuck |= self._busy
                raise
            self._tell(f"released under epoch {epoch}")
        self._state = "released"

    def restore(self, epoch: int, timeout_s: float) -> None:
        """Groups may be used again, once all members have come; those that were live are built."""
        if self._state != "live":
            deadline = self._clock.monotonic() + timeout_s
            answers = self._meet(f"restore under epoch {epoch}", deadline, json.dumps(self._was_live))
            live_names = {name for word in answers.values() for name in cast(list[str], json.loads(word))}
            groups = [group for name, group in sorted(self._groups.items()) if name in live_names]
            self._epoch, self._deadline = epoch, deadline
            try:
                # One after the other: gloo and NCCL wait inside the store's one connection, on which all would wait.
                self._within(deadline, "build", lambda: self._for_each(groups, ProxiedGroup.build, 1))
            except BaseException:
                self._state = "broken"
                raise
            finally:
                self._deadline = None
            self._was_live = ()
            self._tell(f"at epoch {epoch}")
        self._state = "live"

    def abort(self) -> None:
        """Drop without asking anybody. MemoryFault when the libraries hang even in that: end this process then."""
        self._note_live()
        self._state = "broken"
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

    # -- steps

    def _meet(self, point: str, deadline: float, word: str = "") -> dict[int, str]:
        if self._membership is None:
            return {0: word}
        try:
            return self._membership.meet(point, self._world, deadline, word)
        except Absent as error:
            lost = sorted(name for name, group in self._groups.items() if set(group.ranks) & set(error.ranks))
            raise Absent(
                f"rank {self._membership.rank}: {error.message}, of groups {', '.join(lost)}",
                error.ranks,
                remedy="they ended or did not get the order; abort, and restore under a newer epoch",
            ) from None

    def _tell(self, place: str) -> None:
        if self._membership is not None:
            self._membership.tell(place)

    def _abort_all(self) -> None:
        """All at the same time: each ends its own threads and frees its memory, and frees may wait for what runs
        for others on the device. NCCL's group call does not reach aborts, which torch does in its own threads."""
        groups = [group for _, group in sorted(self._groups.items())]
        self._for_each(groups, lambda group: group.drop("abort"), max(len(groups), 1))

    def _for_each(self, groups: list[ProxiedGroup], work: Callable[[ProxiedGroup], None], num_at_once: int) -> None:
        """On the caller's device; who is being worked at is known meanwhile."""
        use_device = device_of_caller()

        def run(group: ProxiedGroup) -> None:
            self._busy.add(group.name)
            use_device()
            work(group)
            self._busy.discard(group.name)

        self._busy.clear()
        all_at_once(groups, run, num_at_once)

    def _note_live(self) -> None:
        self._was_live = tuple(sorted({group.name for group in self.live()}.union(self._was_live)))

    def _within(self, deadline: float, word: str, work: Callable[[], None]) -> None:
        """In its own thread, on the caller's device."""
        use_device = device_of_caller()

        def on_device() -> None:
            use_device()
            work()

        def what() -> str:
            return f"{word} of groups {', '.join(sorted(self._busy))}"

        within(deadline - self._clock.monotonic(), what, on_device)


def device_of_caller() -> Callable[[], None]:
    """What makes another thread use the caller's device, where CUDA is used."""
    if not torch.cuda.is_initialized():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)
