"""A driver that fails in the middle: what is poisoned, what stays whole, and that nothing is ever silently wrong."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator

import pytest
from tests.memory.strict_driver import StrictDriver, view

from myxa.core.device_memory import Tag
from myxa.core.errors import MemoryFault
from myxa.memory.arenas import libc
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import device_bytes

PAGE = libc.PAGE_BYTES
CHUNKS = 4


class Failing(StrictDriver):
    """Fails at the n-th call of one kind (counted from the moment it is told)."""

    def __init__(self) -> None:
        super().__init__("host:5", 1 << 24)
        self.plan: dict[str, int] = {}
        self.slabs: dict[int, int] = {}

    def fail(self, call: str, nth: int, *, by_a_signal: bool = False) -> None:
        self.plan = {call: nth}
        self.by_a_signal = by_a_signal

    def _due(self, call: str) -> None:
        if call in self.plan:
            self.plan[call] -= 1
            if self.plan[call] < 0 and self.by_a_signal:
                del self.plan[call]
                raise KeyboardInterrupt
            if self.plan[call] < 0:
                raise MemoryFault(f"{self.device}: {call} broke", remedy="see the driver")

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._due("map")
        super().map(address, num_bytes, handle)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._due("unmap")
        super().unmap(address, num_bytes)

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> int:
        self._due("copy_out")
        self.slabs[address] = host_address
        return super().copy_out(host_address, address, num_bytes)

    def copy_in(self, address: int, host_address: int, num_bytes: int, *, is_awaited: bool = False) -> int:
        self._due("copy_in")
        return super().copy_in(address, host_address, num_bytes, is_awaited=is_awaited)

    def wait(self, ticket: int) -> None:
        super().wait(ticket)
        self._due("wait")


class Case:
    """An arena with three tags of four pages each, filled."""

    def __init__(self) -> None:
        self.driver = Failing()
        self.pool = HostPool(1 << 24)
        self.arena = Arena(self.driver, self.pool, chunk_bytes=PAGE)
        self.addresses: dict[Tag, int] = {}
        for number, tag in enumerate(("optimizer", "frozen", "grads"), 1):
            self.arena.tag(tag, "discard" if tag == "grads" else "backup")
            self.addresses[tag] = self.arena.empty(tag, CHUNKS * PAGE)
            ctypes.memset(self.addresses[tag], number, CHUNKS * PAGE)

    def backing(self) -> dict[str, str]:
        return {report.tag: report.backing for report in self.arena.report()}

    def first_byte(self, tag: Tag) -> int:
        return view(self.addresses[tag], 1)[0]

    def check_the_rest_works(self) -> None:
        self.driver.plan = {}
        for _ in range(2):
            self.arena.release(["frozen", "grads"])
            self.arena.restore(["frozen", "grads"])
            assert bytes(view(self.addresses["frozen"], CHUNKS * PAGE)) == bytes([2]) * (CHUNKS * PAGE)

    def check_it_can_end(self) -> None:
        self.driver.plan = {}
        self.arena.free(self.addresses["optimizer"])
        assert "optimizer" not in {r.tag for r in self.arena.report() if r.num_bytes or r.host_bytes}
        self.arena.close()
        assert (self.pool.used_bytes, device_bytes([os.getpid()], "host:5")) == (0, 0)


@pytest.fixture
def cases() -> Iterator[Callable[..., Case]]:
    made: list[Case] = []

    def build() -> Case:
        made.append(Case())
        return made[-1]

    yield build
    for case in made:
        case.driver.plan = {}
        case.arena.close()


@pytest.mark.parametrize("call", ["copy_out", "wait", "unmap"])
@pytest.mark.parametrize("nth", range(CHUNKS))
def test_a_release_that_fails_poisons_its_tag_and_no_other(cases: Callable[..., Case], call: str, nth: int):
    case = cases()
    case.driver.fail(call, nth)
    with pytest.raises(MemoryFault, match=f"arena on host:5: tag 'optimizer': host:5: {call} broke -- see the driver"):
        case.arena.release(["optimizer", "frozen"])
    assert case.backing() == {"optimizer": "poisoned", "frozen": "mapped_dirty", "grads": "mapped_dirty"}
    assert case.first_byte("frozen") == 2
    start = case.addresses["optimizer"]
    for index in range(CHUNKS if call == "wait" else 0):  # what was not copied is not given back
        where = case.driver.slabs[start + index * PAGE] if index < nth else start + index * PAGE
        assert bytes(view(where, PAGE)) == bytes([1]) * PAGE, "in one place at least"
    case.driver.plan = {}
    for act in (case.arena.release, case.arena.restore):
        with pytest.raises(MemoryFault, match="'optimizer' is poisoned: a copy of it failed before -- restart this"):
            act(["optimizer"])
    with pytest.raises(MemoryFault, match="poisoned"):
        case.arena.mark_dirty("optimizer")
    with pytest.raises(MemoryFault, match="poisoned"):
        case.arena.empty("optimizer", 1)
    case.check_the_rest_works()
    case.check_it_can_end()


@pytest.mark.parametrize(("nth", "left"), [(0, "mapped_dirty"), (1, "poisoned"), (3, "poisoned"), (4, "host")])
def test_a_release_that_is_interrupted_knows_what_is_whole(cases: Callable[..., Case], nth: int, left: str):
    case = cases()
    case.driver.fail("wait", nth, by_a_signal=True)
    with pytest.raises(KeyboardInterrupt):
        case.arena.release(["optimizer", "frozen"])
    case.driver.plan = {}
    assert case.backing() == {"optimizer": left, "frozen": "mapped_dirty", "grads": "mapped_dirty"}
    case.check_the_rest_works()


@pytest.mark.parametrize("nth", range(CHUNKS))
def test_a_copy_in_that_fails_on_its_way_poisons_its_tag_and_keeps_the_host_copy(cases: Callable[..., Case], nth: int):
    case = cases()
    case.arena.release(["optimizer", "frozen", "grads"])
    case.arena.restore(["frozen", "grads"])
    case.driver.fail("wait", nth)
    with pytest.raises(MemoryFault, match="tag 'optimizer': host:5: wait broke"):
        case.arena.restore(["optimizer"])
    assert case.backing()["optimizer"] == "poisoned"
    assert {r.tag: r.host_bytes for r in case.arena.report()}["optimizer"] == CHUNKS * PAGE
    for index in range(CHUNKS):
        slab = case.driver.slabs[case.addresses["optimizer"] + index * PAGE]
        assert bytes(view(slab, PAGE)) == bytes([1]) * PAGE
    case.check_the_rest_works()
    case.check_it_can_end()


@pytest.mark.parametrize(("call", "nth"), [*(("map", n) for n in range(2 * CHUNKS)), ("copy_in", 0), ("copy_in", 3)])
@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_restore_is_all_or_nothing(cases: Callable[..., Case], call: str, nth: int, is_awaited: bool):
    case = cases()
    case.arena.release(["optimizer", "frozen", "grads"])
    case.driver.fail(call, nth)
    with pytest.raises(
        MemoryFault, match=f"arena on host:5: .* cannot come back .*all is as it was: host:5: {call} broke"
    ):
        case.arena.begin_restore(["optimizer", "grads"], awaited=["optimizer", "grads"] if is_awaited else [])
    assert case.backing() == {"optimizer": "host", "frozen": "host", "grads": "discarded"}
    assert case.driver.free_bytes() == case.driver.capacity_bytes()
    case.driver.plan = {}
    case.arena.restore(["optimizer", "frozen", "grads"])
    assert [case.first_byte(tag) for tag in case.addresses] == [1, 2, 0]
    case.driver.fail("map", 1)
    before = case.driver.free_bytes()
    with pytest.raises(MemoryFault, match="8,192 bytes for tag 'frozen': host:5: map broke"):
        case.arena.empty("frozen", 2 * PAGE)
    assert case.driver.free_bytes() == before
