"""C5: one suite for all ways of giving communicators' memory back, and what is particular to each."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.memory.fake_nccl import MIB, FakeBackend, FakeGroup, together

from myxa.core.errors import ConfigError, MemoryFault
from myxa.memory.communicators import proxy_build
from myxa.memory.communicators.membership import Absent, GangMembers
from myxa.memory.communicators.probe import Rung, choose, probe
from myxa.memory.communicators.reload import ReloadComms
from myxa.memory.communicators.residency import CommResidency, EpochGate, KeepComms, Overrun, RebuildComms, all_at_once
from myxa.memory.communicators.suspend import NcclLibrary, ctypes_comms, native_comms, nccl_backends

torch_dist: Any = dist
WAIT_S = 20.0


@dataclass
class Gang:
    """Ranks of one process, and how to use their groups."""

    residencies: list[CommResidency]
    use: Callable[[int], object]
    num_groups: int

    def all(self, order: str, epoch: int) -> list[Any]:
        return together([lambda r=r: getattr(r, order)(epoch, WAIT_S) for r in self.residencies])

    def use_all(self) -> None:
        for found in together([lambda rank=rank: self.use(rank) for rank in range(len(self.residencies))]):
            if isinstance(found, Exception):
                raise found


def peers(num_ranks: int) -> list[GangMembers]:
    store = torch_dist.HashStore()
    return [GangMembers.over(store, rank, range(num_ranks)) for rank in range(num_ranks)]


def keeping(_: Path) -> Gang:
    return Gang([KeepComms(lambda: {"0": 3 * MIB, "1": MIB}) for _ in range(2)], lambda rank: rank, 2)


def suspending(_: Path) -> Gang:
    backends = fake_backends(2)
    found = [native_comms(p, lambda rank=rank: table(backends[rank])) for rank, p in enumerate(peers(2))]
    return Gang(list(found), lambda rank: [each.use() for each in backends[rank]], 3)


def fake_backends(num_ranks: int) -> list[list[FakeBackend]]:
    """By rank: two groups that were used, one that never was."""
    ranks = tuple(range(num_ranks))
    groups = [FakeGroup(name, ranks) for name in ("1", "0", "2")]
    return [[FakeBackend(group, rank, is_built=group.name != "2") for group in groups] for rank in ranks]


def table(backends: list[FakeBackend]) -> list[tuple[str, tuple[int, ...], Any]]:
    return [(each.group.name, each.group.ranks, each) for each in backends]


class Communicator(ctypes.Structure):
    """What a pointer of the stand-in library points at."""

    _fields_ = [("total", ctypes.c_uint64), ("persist", ctypes.c_uint64), ("suspended", ctypes.c_int), ("busy", ctypes.c_int)]  # fmt: skip


class PointerBackend:
    """What torch's NCCL backend shows of its communicator."""

    def __init__(self) -> None:
        self.communicator = Communicator(128 * MIB, 32 * MIB, 0, 0)

    def _is_initialized(self) -> bool:
        return True

    def _comm_ptr(self) -> int:
        return ctypes.addressof(self.communicator)

    def abort(self) -> None:
        self.communicator.suspended = 0


STAND_IN = """
#include <stdint.h>
typedef struct { uint64_t total, persist; int suspended, busy; } comm;
int ncclGetVersion(int* v) { *v = VERSION; return 0; }
const char* ncclGetErrorString(int s) { return s == 5 ? "invalid usage" : "other"; }
#if VERSION >= 22907
int ncclCommSuspend(comm* c, int flags) { if (flags != 1 || c->suspended || c->busy) return 5; c->suspended = 1; return 0; }
int ncclCommResume(comm* c) { if (!c->suspended) return 5; c->suspended = 0; return 0; }
int ncclCommMemStats(comm* c, int what, uint64_t* v) {
  if (what < 0 || what > 3) return 4;
  *v = what == 0 ? c->total - c->persist : what == 1 ? (uint64_t)c->suspended : what == 2 ? c->persist : c->total;
  return 0;
}
#endif
"""


def stand_in(folder: Path, version: int = 22907) -> Path:
    """A library with NCCL's names, compiled; only for what goes over ctypes."""
    source, library = folder / "nccl.c", folder / f"libnccl-{version}.so"
    source.write_text(STAND_IN)
    compiler = proxy_build.find_compiler("cc")
    command = [compiler, "-shared", "-fPIC", f"-DVERSION={version}", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    return library


def calling(folder: Path) -> Gang:
    library = NcclLibrary(stand_in(folder))
    backends = [[PointerBackend() for _ in range(3)] for _ in range(2)]
    found = [
        ctypes_comms(p, library, lambda rank=rank: [(str(i), (0, 1), b) for i, b in enumerate(backends[rank])])
        for rank, p in enumerate(peers(2))
    ]

    def use(rank: int) -> None:
        if any(backend.communicator.suspended for backend in backends[rank]):
            raise RuntimeError("an illegal memory access was encountered")

    return Gang(list(found), use, 3)


def rebuilding(_: Path) -> Gang:
    live = [3, 3]

    def owner(rank: int, p: GangMembers) -> RebuildComms:
        def destroy(epoch: int) -> None:
            live[rank] = 0

        def make(epoch: int) -> int:
            live[rank] = 3
            return 3

        return RebuildComms(destroy, make, p, num_groups=3)

    def use(rank: int) -> None:
        if not live[rank]:
            raise RuntimeError("the group was destroyed")

    return Gang([owner(rank, p) for rank, p in enumerate(peers(2))], use, 3)


def reloading(_: Path) -> Gang:
    """A gang of one, in this very process, over gloo."""
    comms = ReloadComms()
    comms.register()
    dist.init_process_group(
        "myxa_gloo", store=torch_dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20)
    )
    group = dist.new_group([0])

    def use(_: int) -> None:
        for each in (None, group):
            value = torch.ones(2)
            dist.all_reduce(value, group=each)
            assert value.tolist() == [1.0, 1.0]

    use(0)
    return Gang([comms], use, 2)


WAYS = {
    "keep": keeping, "suspend": suspending, "ctypes": calling, "rebuild": rebuilding, "reload": reloading,
}  # fmt: skip


@pytest.fixture(params=sorted(WAYS))
def gang(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Gang]]:
    try:
        yield request.param, WAYS[request.param](tmp_path)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# -- the suite -------------------------------------------------------------------------------------------------------


def test_what_was_released_comes_back_and_can_be_used(gang: tuple[str, Gang]):
    way, ranks = gang
    ranks.use_all()
    for epoch in (1, 3, 5):
        released = ranks.all("release", epoch)
        assert all(stats.epoch == epoch for stats in released), released
        assert all(stats.num_groups == ranks.num_groups for stats in released)
        if way != "keep":
            assert all(stats.num_live == 0 for stats in released), released
            with pytest.raises((RuntimeError, MemoryFault)):
                ranks.use_all()
        restored = ranks.all("restore", epoch + 1)
        assert all(stats.num_live > 0 and stats.epoch == epoch + 1 for stats in restored), restored
        assert all(stats.kind == each.kind for stats, each in zip(restored, ranks.residencies, strict=True))
        ranks.use_all()


def test_order_given_twice_is_carried_out_once(gang: tuple[str, Gang]):
    _, ranks = gang
    first = ranks.all("release", 4)
    assert ranks.all("release", 4) == first
    again = ranks.all("restore", 5)
    assert ranks.all("restore", 5) == again
    ranks.use_all()


def test_late_order_has_no_effect(gang: tuple[str, Gang]):
    _, ranks = gang
    ranks.all("release", 4)
    ranks.all("restore", 7)
    for order, epoch in (("release", 6), ("restore", 4)):
        refused = ranks.all(order, epoch)
        assert all(isinstance(error, MemoryFault) and "epoch 7 was seen" in str(error) for error in refused), refused
    ranks.use_all()


def test_two_lives_never_share_an_epoch(gang: tuple[str, Gang]):
    _, ranks = gang
    ranks.all("release", 4)
    refused = ranks.all("restore", 4)
    assert all(isinstance(error, MemoryFault) and "newer epoch" in str(error) for error in refused), refused
    ranks.all("restore", 5)
    ranks.use_all()


def test_restore_of_what_was_never_released_does_nothing(gang: tuple[str, Gang]):
    _, ranks = gang
    assert all(stats.num_live > 0 for stats in ranks.all("restore", 3))
    ranks.use_all()


def test_abort_ends_and_is_told(gang: tuple[str, Gang]):
    way, ranks = gang
    together([each.abort for each in ranks.residencies])
    if way != "keep":
        assert all(each.stats().num_live == 0 for each in ranks.residencies)


# -- suspend -----------------------------------------------------------------------------------------------------------


def test_bytes_are_those_on_the_device_and_unbuilt_groups_are_left_alone():
    backends = fake_backends(2)
    residencies = [native_comms(p, lambda rank=rank: table(backends[rank])) for rank, p in enumerate(peers(2))]
    assert residencies[0].stats().by_group == {"0": 128 * MIB, "1": 128 * MIB}
    released = together([lambda r=r: r.release(1, WAIT_S) for r in residencies])
    assert [stats.device_bytes for stats in released] == [64 * MIB] * 2
    assert [each.calls for each in backends[0]] == [["suspend"], ["suspend"], []]


def test_group_that_one_member_never_built_is_suspended_by_nobody():
    backends = fake_backends(2)
    backends[1][0]._is_built = False  # a pair of ranks sent to each other, this one took no part
    residencies = [native_comms(p, lambda rank=rank: table(backends[rank])) for rank, p in enumerate(peers(2))]
    for found in together([lambda r=r: r.release(1, WAIT_S) for r in residencies]):
        assert not isinstance(found, Exception), found
    assert [each.calls for each in backends[0]] == [[], ["suspend"], []]


def test_peer_that_dies_in_a_suspend_is_left_by_the_deadline():
    """It came to the roll call and never to the library's own barrier, which has no deadline."""
    backends = fake_backends(2)
    both = peers(2)
    mine = native_comms(both[0], lambda: table(backends[0]))
    said = '["0", "1"]'

    def dies() -> None:
        assert both[1].membership is not None
        both[1].membership.meet("suspend under epoch 1", (0, 1), both[1].clock.monotonic() + WAIT_S, said)

    found = together([lambda: mine.release(1, 2.0), dies])
    assert isinstance(found[0], Overrun), found
    assert "rank 0: group 0 becoming released did not end within" in str(found[0])
    with pytest.raises(MemoryFault, match="make the groups again"):
        mine.restore(2, 1.0)
    mine.abort()
    assert all(each.group.aborted for each in backends[0][:2])
    with pytest.raises(MemoryFault, match="broke at group"):
        mine.release(3, 1.0)


def test_overlapping_groups_leave_and_come_back():
    """No member waits in a group for one that waits for it in another."""
    lists = [(0, 1, 2), (1, 2), (0, 2), (0, 1), (2,), (0, 1, 2), (0, 2)]
    groups = [FakeGroup(str(number), ranks) for number, ranks in enumerate(lists)]
    backends = [[FakeBackend(group, rank) for group in groups if rank in group.ranks] for rank in range(3)]
    ranks = [native_comms(each, lambda rank=rank: table(backends[rank])) for rank, each in enumerate(peers(3))]
    for epoch in (1, 3, 5):
        told = together([lambda r=r, epoch=epoch: r.release(epoch, WAIT_S) for r in ranks])
        assert [each.num_live for each in told] == [0, 0, 0]
        told = together([lambda r=r, epoch=epoch: r.restore(epoch + 1, WAIT_S) for r in ranks])
        assert [each.num_live for each in told] == [len(each) for each in backends]
    assert [each.calls for each in backends[2]] == [["suspend", "resume"] * 3] * 6


def test_abort_that_hangs_keeps_no_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("myxa.memory.communicators.suspend.ABORT_S", 0.5)
    backends = fake_backends(1)
    hangs = threading.Event()
    monkeypatch.setattr(backends[0][1], "abort", hangs.wait)
    comms = native_comms(peers(1)[0], lambda: table(backends[0]))
    with pytest.raises(MemoryFault, match="groups 0 hang in their abort"):
        comms.abort()
    assert backends[0][0].group.aborted
    hangs.set()


def test_work_in_flight_is_an_error_and_not_a_hang():
    backends = fake_backends(1)
    backends[0][0].has_work = True
    residency = native_comms(peers(1)[0], lambda: table(backends[0]))
    with pytest.raises(RuntimeError, match="work pending"):
        residency.release(1, WAIT_S)
    with pytest.raises(MemoryFault, match="broke at group 1"):
        residency.restore(2, WAIT_S)


def test_error_of_the_c_call_is_told(tmp_path: Path):
    library, backend = NcclLibrary(stand_in(tmp_path)), PointerBackend()
    assert library.version == (2, 29, 7)
    backend.communicator.busy = 1
    residency = ctypes_comms(GangMembers.alone(), library, lambda: [("0", (0,), backend)])
    with pytest.raises(MemoryFault, match=r"ncclCommSuspend answered 5 \(invalid usage\).*idle"):
        residency.release(1, WAIT_S)


def test_library_that_is_too_old_or_not_loaded_is_refused(tmp_path: Path):
    with pytest.raises(MemoryFault, match=r"NCCL 2.28.9 has no ncclCommSuspend.*LD_PRELOAD a libnccl.so.2 of 2.29.7"):
        NcclLibrary(stand_in(tmp_path, 22809))
    if not torch.cuda.is_available():
        with pytest.raises(MemoryFault, match="is not loaded in this process"):
            NcclLibrary()


def test_gloo_groups_are_not_among_ncclS():
    dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        assert list(nccl_backends()) == []
    finally:
        dist.destroy_process_group()


# -- meeting --------------------------------------------------------------------------------------------------------------


def test_member_that_arrived_without_waiting_is_counted_on():
    """Two ranks of a group sent to each other first; a later collective of all must not wait for them."""
    both = [each.membership for each in peers(2)]
    assert both[0] is not None
    assert both[1] is not None
    both[0].arrive("epoch 3")
    both[1].meet("epoch 3", (0, 1), both[1]._clock.monotonic() + WAIT_S)
    with pytest.raises(Absent, match=r"rank 0 \(never heard of\) did not come to 'epoch 4'"):
        both[1].meet("epoch 4", (0, 1), both[1]._clock.monotonic() + 0.05)


def test_keys_of_former_points_are_taken_away():
    """A switch every minute for a month must not fill the store."""
    store = torch_dist.HashStore()
    both = [GangMembers.over(store, rank, (0, 1)) for rank in range(2)]
    for point in range(20):
        together(
            [
                lambda each=each, point=point: each.meet(f"point {point}", each.clock.monotonic() + WAIT_S, "word")
                for each in both
            ]
        )
    assert store.num_keys() <= 2 * 2


def test_all_at_once_tells_the_first_error_after_the_last_end():
    seen: list[int] = []

    def work(item: int) -> None:
        seen.append(item)
        if item == 2:
            raise ValueError("two")

    with pytest.raises(ValueError, match="two"):
        all_at_once(range(6), work, 3)
    assert sorted(seen) == list(range(6))
    all_at_once([], work, 3)


# -- rebuild -------------------------------------------------------------------------------------------------------------


def test_callback_that_fails_leaves_the_groups_broken_until_a_newer_epoch():
    tries: list[int] = []

    def make(epoch: int) -> int:
        tries.append(epoch)
        if epoch == 2:
            raise RuntimeError("no route to host")
        return 1

    comms = RebuildComms(lambda epoch: None, make, GangMembers.alone(), num_groups=1)
    comms.release(1, WAIT_S)
    with pytest.raises(RuntimeError, match="no route"):
        comms.restore(2, WAIT_S)
    assert comms.stats().num_live == 0
    assert comms.restore(3, WAIT_S).num_live == 1
    assert tries == [2, 3]


# -- the ladder ------------------------------------------------------------------------------------------------------------


def test_probe_tells_of_every_rung_why():
    rungs = probe({})
    assert [(rung.kind, rung.way) for rung in rungs] == [
        ("keep", ""), ("suspend", "native"), ("suspend", "ctypes"), ("reload", "proxy"), ("rebuild", ""),
    ]  # fmt: skip
    assert all(rung.reason for rung in rungs)
    by_way = {rung.way or rung.kind: rung for rung in rungs}
    assert by_way["keep"].is_available
    assert by_way["proxy"].is_available, "this machine compiles, other tests do"
    if not torch.cuda.is_available():
        assert by_way["native"].reason == by_way["ctypes"].reason == "no NCCL here"
        assert choose("auto").kind == "keep"


def ladder(*available: str) -> tuple[Rung, ...]:
    rung: Any = Rung
    return tuple(
        rung(kind, way, (way or kind) in available, f"{way or kind}: because")
        for kind, way in (("keep", ""), ("suspend", "native"), ("suspend", "ctypes"), ("reload", "proxy"), ("rebuild", ""))
    )  # fmt: skip


@pytest.mark.parametrize(
    ("available", "kind", "way"),
    [
        (("keep", "native", "ctypes", "proxy", "rebuild"), "reload", "proxy"),
        (("keep", "native", "ctypes", "rebuild"), "suspend", "native"),
        (("keep", "ctypes", "rebuild"), "suspend", "ctypes"),
        (("keep", "rebuild"), "keep", ""),
    ],
)
def test_auto_takes_what_was_seen_through_and_gives_memory_back(available: tuple[str, ...], kind: str, way: str):
    rung = choose("auto", ladder(*available))
    assert (rung.kind, rung.way) == (kind, way)


def test_impossible_choice_is_refused_with_the_reasons():
    with pytest.raises(ConfigError, match=r"'suspend' here: native: native: because; ctypes: ctypes: because.*reload"):
        choose("suspend", ladder("keep", "proxy"))
    with pytest.raises(ConfigError, match="there is no way 'quickly'"):
        choose("quickly", ladder("keep"))  # pyright: ignore[reportArgumentType]  # on purpose


# -- the build ---------------------------------------------------------------------------------------------------------------


def test_build_without_a_compiler_names_what_is_missing(tmp_path: Path):
    target = proxy_build.built_path(tmp_path, "no-such-compiler")
    with pytest.raises(MemoryFault, match=r"no C\+\+ compiler \(no-such-compiler\) is on PATH.*memory.communicators"):
        proxy_build._build(target, "no-such-compiler", 5.0)
    assert not target.exists()


def test_build_that_fails_leaves_nothing_and_tells_the_compilers_words(tmp_path: Path):
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo broken 1.0 && exit\necho 'x.hpp:1: error: gone' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    target = proxy_build.built_path(tmp_path, str(compiler))
    with pytest.raises(MemoryFault, match=r"cannot compile.*torch.*error: gone"):
        proxy_build._build(target, str(compiler), 30.0)
    assert [path.name for path in target.parent.iterdir()] == ["myxa_proxy_backend.lock"]


def test_cache_is_keyed_by_source_torch_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = proxy_build.built_path(tmp_path)
    assert proxy_build.built_path(tmp_path) == here
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert proxy_build.built_path(tmp_path) != here


# -- epochs ------------------------------------------------------------------------------------------------------------------


def test_gate_after_a_failure_wants_a_newer_epoch_for_the_restore():
    gate = EpochGate()
    gate.became("broken", 4)
    assert gate.asked("release", 4) == "do", "what failed may be tried again"
    with pytest.raises(MemoryFault, match="newer epoch"):
        gate.asked("restore", 4)
    assert gate.asked("restore", 5) == "do"
