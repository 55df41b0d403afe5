"""Any order of calls on an arena, against a plain model: dictionaries of bytes, and no memory tricks at all."""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.memory.strict_driver import StrictDriver, view

from myxa.core.device_memory import Tag, TagPolicy
from myxa.core.errors import MemoryFault, OutOfDeviceMemory
from myxa.memory.arenas import libc
from myxa.memory.arenas.arena import Arena, Restoring
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import device_bytes

PAGE = libc.PAGE_BYTES
CAPACITY_PAGES = 17
POOL_PAGES = 10
DEVICE = "host:9"
TAGS: dict[Tag, TagPolicy] = {
    "optimizer": "backup", "frozen": "backup", "grads": "discard", "params": "rematerialise", "context": "keep",
}  # fmt: skip

MOSTLY: list[Tag] = ["optimizer", "frozen", "grads", "params"] * 4
MOSTLY.append("context")
some_tags: st.SearchStrategy[list[Tag]] = st.lists(st.sampled_from(MOSTLY), min_size=1, max_size=4)


class Littered(StrictDriver):
    """Fresh memory is full of somebody's bytes, as a GPU's is."""

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        super().map(address, num_bytes, handle)
        view(address, num_bytes)[:] = b"\xaa" * num_bytes


@dataclass
class Place:
    """One region as it should be."""

    num_bytes: int
    contents: bytes
    pages: int
    copied_pages: int = 0
    """Pages of the host pool it holds."""


@dataclass
class Expected:
    """One tag as it should be."""

    backing: str = "mapped_dirty"
    regions: dict[int, Place] = field(default_factory=dict)

    @property
    def pages(self) -> int:
        return sum(place.pages for place in self.regions.values())

    @property
    def copied_pages(self) -> int:
        return sum(place.copied_pages for place in self.regions.values())


class ArenaAgainstModel(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.driver = Littered(DEVICE, CAPACITY_PAGES * PAGE)
        self.pool = HostPool(POOL_PAGES * PAGE)
        self.arena = Arena(self.driver, self.pool, chunk_bytes=1)
        self.model: dict[Tag, Expected] = {}
        self.streams: list[tuple[Restoring, list[Tag]]] = []
        for tag, policy in TAGS.items():
            self.arena.tag(tag, policy)
            self.model[tag] = Expected()
            self.allocate(tag, self.dice.randrange(1, 3 * PAGE + 1))

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()
            assert device_bytes([os.getpid()], DEVICE) == 0

    # -- what the model knows ------------------------------------------------------------------------------------

    def used_pages(self) -> int:
        return sum(m.pages for m in self.model.values() if m.backing not in ("host", "discarded"))

    def pool_pages(self) -> int:
        return sum(m.copied_pages for m in self.model.values())

    def settle(self, tag: Tag) -> None:
        expected = self.model[tag]
        if expected.backing == "copy_in" and not (TAGS[tag] == "rematerialise" and expected.regions):
            expected.backing = "mapped_clean" if TAGS[tag] == "backup" else "mapped_dirty"

    def admit(self, tags: list[Tag]) -> bool:
        """Pool pages for copies of `tags`; False: refused."""
        places = [place for tag in tags for place in self.model[tag].regions.values() if not place.copied_pages]
        if sum(place.pages for place in places) > POOL_PAGES - self.pool_pages():
            return False
        for place in places:
            place.copied_pages = place.pages
        return True

    def write(self, tag: Tag) -> None:
        """As the owner does: new bytes, then the word."""
        for address, place in self.model[tag].regions.items():
            place.contents = self.dice.randbytes(place.num_bytes)
            view(address, place.num_bytes)[:] = place.contents

    def allocate(self, tag: Tag, num_bytes: int) -> None:
        address, expected = self.arena.empty(tag, num_bytes), self.model[tag]
        contents = self.dice.randbytes(num_bytes)
        view(address, num_bytes)[:] = contents
        expected.regions[address] = Place(num_bytes, contents, -(-num_bytes // PAGE))
        if expected.backing != "copy_in":
            expected.backing = "mapped_dirty"

    def refused(self, call, *args, kind=MemoryFault, says: str = "") -> None:
        with pytest.raises(kind, match=re.escape(says)):
            call(*args)

    # -- calls ------------------------------------------------------------------------------------------------------

    @rule(tag=st.sampled_from(sorted(TAGS)), num_bytes=st.integers(1, 3 * PAGE))
    def empty(self, tag: Tag, num_bytes: int) -> None:
        self.settle(tag)
        expected = self.model[tag]
        if expected.backing in ("host", "discarded"):
            return self.refused(self.arena.empty, tag, num_bytes, says="cannot be given more memory")
        pages = -(-num_bytes // PAGE)
        if self.used_pages() + pages > CAPACITY_PAGES:
            return self.refused(self.arena.empty, tag, num_bytes, kind=OutOfDeviceMemory, says="were asked for")
        self.allocate(tag, num_bytes)
        return None

    @precondition(lambda self: sum(len(m.regions) for m in self.model.values()) > 4)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        filled: list[Tag] = [tag for tag, m in self.model.items() if m.regions]
        tag = data.draw(st.sampled_from(filled))
        address = data.draw(st.sampled_from(sorted(self.model[tag].regions)))
        self.settle(tag)
        self.arena.free(address)
        del self.model[tag].regions[address]
        self.refused(self.arena.free, address, says="no region begins")

    @rule(tag=st.sampled_from(sorted(TAGS)))
    def mark_dirty(self, tag: Tag) -> None:
        expected = self.model[tag]
        if expected.backing in ("host", "discarded"):
            return self.refused(self.arena.mark_dirty, tag, says="restore the tag first")
        if expected.backing == "copy_in" and TAGS[tag] != "rematerialise":
            return self.refused(self.arena.mark_dirty, tag, says="while its contents still come in")
        self.write(tag)
        self.arena.mark_dirty(tag)
        expected.backing = "mapped_dirty"
        return None

    @rule(tags=some_tags)
    def release(self, tags: list[Tag]) -> None:
        tags = [tag for index, tag in enumerate(tags) if tag not in tags[:index]]
        if "context" in tags:
            return self.refused(self.arena.release, tags, says="is kept")
        leaving: list[Tag] = [tag for tag in tags if self.model[tag].backing not in ("host", "discarded")]
        for tag in leaving:
            self.settle(tag)
        dirty: list[Tag] = [t for t in leaving if TAGS[t] == "backup" and self.model[t].backing == "mapped_dirty"]
        if not self.admit(dirty):
            return self.refused(self.arena.release, tags, says="nothing was moved")
        copied = sum(self.model[tag].pages for tag in dirty)
        moved = self.arena.release(tags)
        assert moved == copied * PAGE
        for tag in leaving:
            self.model[tag].backing = "host" if TAGS[tag] == "backup" else "discarded"
        return None

    @rule(tags=some_tags, waits=st.booleans())
    def restore(self, tags: list[Tag], waits: bool) -> None:
        tags = [tag for index, tag in enumerate(tags) if tag not in tags[:index]]
        coming: list[Tag] = [tag for tag in tags if self.model[tag].backing in ("host", "discarded")]
        if self.used_pages() + sum(self.model[tag].pages for tag in coming) > CAPACITY_PAGES:
            return self.refused(self.arena.restore, tags, kind=OutOfDeviceMemory, says="all is as it was")
        copied = sum(self.model[tag].pages for tag in coming if self.model[tag].backing == "host")
        for tag in coming:
            expected = self.model[tag]
            if expected.backing == "discarded":
                for place in expected.regions.values():
                    place.contents = bytes(place.num_bytes)
            expected.backing = "copy_in"
        stream = self.arena.begin_restore(tags)
        if waits:
            assert stream.wait_all() == copied * PAGE
            for tag in tags:
                self.settle(tag)
        else:
            self.streams.append((stream, tags))
        return None

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        stream, tags = data.draw(st.sampled_from(self.streams))
        self.streams.remove((stream, tags))
        stream.wait_all()
        for tag in tags:
            self.settle(tag)

    # -- what must always hold ------------------------------------------------------------------------------------------

    @invariant()
    def every_number_is_the_models(self) -> None:
        if not hasattr(self, "arena"):
            return
        for report in self.arena.report():
            expected = self.model[report.tag]
            assert report.backing == expected.backing, report
            assert report.num_bytes == expected.pages * PAGE, report
            assert report.host_bytes == expected.copied_pages * PAGE, report
        assert device_bytes([os.getpid()], DEVICE) == self.used_pages() * PAGE
        assert self.driver.free_bytes() == (CAPACITY_PAGES - self.used_pages()) * PAGE
        assert self.pool.used_bytes == self.pool_pages() * PAGE

    @invariant()
    def contents_are_the_models(self) -> None:
        if not hasattr(self, "arena"):
            return
        for tag, expected in self.model.items():
            if expected.backing in ("mapped_dirty", "mapped_clean"):
                for address, place in expected.regions.items():
                    assert bytes(view(address, place.num_bytes)) == place.contents, (tag, address)


TestArenaAgainstModel = ArenaAgainstModel.TestCase
TestArenaAgainstModel.settings = settings(
    max_examples=20, stateful_step_count=50, deadline=None, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip
