"""Arenas of several devices as one store: whole on all of them, or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from myxa.core.clock import SystemClock
from myxa.core.errors import MemoryFault, OutOfDeviceMemory
from myxa.memory.arenas.arena import Arena, SpreadArenas
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostVmmDriver, device_bytes

MIB = 1 << 20
DEVICES = ("host:7", "host:8")
stranger_bytes = dict.fromkeys(DEVICES, 0)


def held() -> list[int]:
    return [device_bytes([os.getpid()], device) for device in DEVICES]


@pytest.fixture
def spread() -> Iterator[SpreadArenas]:
    """Weights of 2 MiB on the first device and 3 MiB on the second, an optimizer of 1 MiB on the first alone."""
    made: list[Arena] = []
    stranger_bytes.update(dict.fromkeys(DEVICES, 0))
    for device, num_mib in zip(DEVICES, (2, 3), strict=True):
        driver = HostVmmDriver(
            device, 8 * MIB, free=lambda d=device: 8 * MIB - stranger_bytes[d] - device_bytes([os.getpid()], d)
        )
        arena = Arena(driver, HostPool(4 * MIB), SystemClock(), chunk_bytes=MIB)
        arena.tag("weights", "discard")
        arena.tag("optimizer", "backup")
        arena.empty("weights", num_mib * MIB)
        made.append(arena)
    made[0].empty("optimizer", MIB)
    made[0].mark_dirty("optimizer")
    store = SpreadArenas(made)
    yield store
    store.close()
    assert held() == [0, 0]


def test_tags_leave_all_devices_and_come_back_to_all(spread: SpreadArenas) -> None:
    weights, optimizer = spread.report()
    assert (weights.num_bytes, weights.backing) == (3 * MIB, "mapped_dirty"), "as the fullest device has it"
    assert (optimizer.num_bytes, optimizer.backing) == (MIB, "mapped_dirty")
    before = spread.arenas[0].digest("optimizer")
    moved = spread.release(("weights", "optimizer"))
    assert (moved.copied_bytes, moved.dropped_bytes) == (MIB, 5 * MIB)
    assert held() == [0, 0]
    assert {tag.backing for tag in spread.report()} == {"discarded", "host"}
    spread.restore(("weights", "optimizer"))
    assert held() == [3 * MIB, 3 * MIB]
    assert spread.arenas[0].digest("optimizer") == before


def test_what_does_not_fit_on_one_device_comes_back_to_none(spread: SpreadArenas) -> None:
    before = spread.arenas[0].digest("optimizer")
    spread.release(("weights", "optimizer"))
    stranger_bytes["host:8"] = 6 * MIB
    with pytest.raises(OutOfDeviceMemory):
        spread.restore(("weights", "optimizer"))
    assert held() == [0, 0]
    assert {tag.backing for tag in spread.report()} == {"discarded", "host"}
    stranger_bytes["host:8"] = 0
    spread.restore(("weights", "optimizer"))
    assert held() == [3 * MIB, 3 * MIB]
    assert spread.arenas[0].digest("optimizer") == before


def test_a_tag_that_is_left_on_one_device_counts_as_there(spread: SpreadArenas) -> None:
    spread.arenas[0].release(("weights",))
    assert spread.report()[0].backing == "mapped_dirty"
    spread.restore(("weights",))
    spread.release(("weights",))
    assert held() == [MIB, 0]


def test_a_store_over_no_device_is_refused() -> None:
    with pytest.raises(MemoryFault, match="no device"):
        SpreadArenas(())
