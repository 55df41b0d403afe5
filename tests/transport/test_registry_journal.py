"""The registry's journal under cuts, damage and full disks; and random histories of grants, ends and restarts."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.core.errors import LaunchError, StaleEpoch
from myxa.transport.registry.directory import Directory, HostedActor, NodeRecord
from myxa.transport.registry.journal import JournalLine, NodeEnded, NodeEntry, RegistryAddress, RegistryJournal
from myxa.transport.registry.registry import KEPT_UPDATES, RegistryState
from myxa.transport.wire import Endpoints

pytestmark = pytest.mark.timeout(60)


def known(name: str, node_id: int, epoch: int, *actors: str) -> NodeEntry:
    records = tuple(HostedActor(name=actor, index=i, handlers={"ping": "1234"}) for i, actor in enumerate(actors))
    return NodeEntry(record=NodeRecord(name=name, node_id=node_id, epoch=epoch, endpoints=Endpoints(), actors=records))


ENTRIES: tuple[JournalLine, ...] = (
    RegistryAddress(node="launcher/0", epoch=1, socket_dir="/tmp/x", tcp="127.0.0.1:4000"),
    known("launcher/0", 1, 1),
    known("far", 2, 1, "rollout/0"),
    NodeEnded(node="far", epoch=1, reason='its process was killed by SIGKILL; "quoted"\nand broken over lines'),
    known("far", 2, 2),
)


def write(path: Path, entries: tuple[JournalLine, ...] = ENTRIES) -> bytes:
    journal = RegistryJournal.open(path)
    for entry in entries:
        journal.append(entry)
    journal.close()
    journal.close()
    return path.read_bytes()


def read(path: Path) -> tuple[JournalLine, ...]:
    journal = RegistryJournal.open(path)
    journal.close()
    return journal.entries


def test_what_was_written_is_there_again_and_is_appended_to(tmp_path: Path):
    path = tmp_path / "journal"
    write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read(path) == ENTRIES
    write(path, (known("near", 3, 1),))
    assert read(path) == (*ENTRIES, known("near", 3, 1))
    journal = RegistryJournal.open(path)
    assert journal.address == ENTRIES[0]
    journal.close()


def test_a_torn_end_is_cut_off_at_every_place_where_it_can_be_torn(tmp_path: Path, caplog):
    path = tmp_path / "journal"
    whole = write(path)
    last = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        caplog.clear()
        assert read(path) == ENTRIES[:-1]
        assert path.read_bytes() == whole[:last]
        assert ("unfinished line were cut off" in caplog.text) == (cut > last)
    path.write_bytes(whole[:last] + b"\0" * 300)  # a machine that died: the size was written, the data was not
    assert read(path) == ENTRIES[:-1]


@pytest.mark.parametrize("line", range(len(ENTRIES) - 1))
def test_damage_before_the_end_is_refused_and_named(tmp_path: Path, line: int):
    path = tmp_path / "journal"
    lines = write(path).splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"epoch":', b'"epocj":')
    path.write_bytes(b"".join(lines))
    with pytest.raises(LaunchError, match=f"damaged at line {line + 1}, and continues after it"):
        RegistryJournal.open(path)
    assert path.read_bytes() == b"".join(lines), "nothing is cut off that may be of use"


def test_a_journal_of_another_make_is_refused(tmp_path: Path):
    path = tmp_path / "journal"
    from zlib import crc32

    body = b'{"type":"pact","with":"the devil"}'
    path.write_bytes(b"%08x %b\n" % (crc32(body), body))
    with pytest.raises(LaunchError, match=r"line 1: .*pact"):
        RegistryJournal.open(path)
    with pytest.raises(LaunchError, match="No such file"):
        RegistryJournal.open(tmp_path / "no/where")


def test_a_full_disk_stops_grants_and_leaves_a_journal_that_can_be_read(tmp_path: Path):
    path = tmp_path / "journal"
    size = len(write(path))
    journal = RegistryJournal.open(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(LaunchError, match=r"cannot be written: .*File too large"):
            journal.append(known("near", 3, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(LaunchError, match="cannot be written"):
        journal.append(known("near", 3, 1))
    journal.close()
    assert read(path) == ENTRIES


async def test_those_who_wait_at_the_same_time_share_one_fsync(tmp_path: Path, monkeypatch):
    journal = RegistryJournal.open(tmp_path / "journal")
    synced: list[int] = []
    real = os.fsync

    def slow(descriptor: int) -> None:
        synced.append((tmp_path / "journal").stat().st_size)
        real(descriptor)

    monkeypatch.setattr("myxa.transport.registry.journal.os.fsync", slow)

    async def grant(epoch: int) -> None:
        journal.append(known("far", 2, epoch))
        await journal.settle()
        assert synced[-1] > 0

    await asyncio.gather(*(grant(epoch) for epoch in range(1, 51)))
    assert 1 <= len(synced) <= 3
    assert synced[-1] == (tmp_path / "journal").stat().st_size, "nobody was answered before his line was on the disk"
    await journal.settle()
    assert len(synced) <= 3
    journal.close()


NAMES = ("launcher/0", "a", "b", "c")
STEPS = st.one_of(
    st.tuples(st.sampled_from(["register", "announce", "depart", "lose answer"]), st.sampled_from(NAMES[1:])),
    st.tuples(st.sampled_from(["restart"]), st.just("")),
    st.tuples(st.sampled_from(["follow one", "follow other"]), st.just("")),
)


class Story:
    """A registry over several incarnations, its journal as a list, and two mirrors that look now and then."""

    def __init__(self) -> None:
        self.journal: list[JournalLine] = []
        self.granted: set[tuple[str, int]] = set()
        self.numbers: dict[str, int] = {}
        self.mirrors = {"follow one": Directory(), "follow other": Directory()}
        self.state = RegistryState()
        self.restart()

    def restart(self) -> None:
        self.state = RegistryState()
        self.state.restore(self.journal)
        record = self.grant("launcher/0")
        self.state.history = record.epoch
        self.state.enter(record)

    def grant(self, name: str) -> NodeRecord:
        record = self.state.grant(name, Endpoints(inproc=f"{name}-{len(self.journal)}"), pid=len(self.journal))
        assert (name, record.epoch) not in self.granted, "an epoch was given out twice"
        assert all(epoch < record.epoch for other, epoch in self.granted if other == name)
        assert self.numbers.setdefault(name, record.node_id) == record.node_id
        assert len(set(self.numbers.values())) == len(self.numbers)
        self.granted.add((name, record.epoch))
        self.journal.append(NodeEntry(record=record))
        return record

    def do(self, what: str, name: str) -> None:
        node = self.state.node(name)
        if what == "restart":
            self.restart()
        elif what in self.mirrors:
            self.follow(what)
        elif what == "register":
            self.state.enter(self.grant(name))
        elif what == "lose answer":
            self.grant(name)
            self.restart()
        elif node is not None and what == "announce":
            actor = HostedActor(name=f"actor-{name}", index=0, handlers={})
            self.journal.append(NodeEntry(record=self.state.announce(name, node.epoch, (actor,), {})))
        elif node is not None and what == "depart":
            assert self.state.depart(name, node.epoch, "asked to")
            self.journal.append(NodeEnded(node=name, epoch=node.epoch, reason="asked to"))

    def follow(self, which: str) -> None:
        mirror = self.mirrors[which]
        for update in self.state.since(mirror.version, mirror.history):
            assert mirror.apply(update) is not None, "the registry sent a gap"
        assert sorted(mirror.nodes(), key=lambda n: n.name) == list(self.state.nodes(""))


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(STEPS, max_size=60))
def test_no_epoch_twice_and_mirrors_agree_over_any_number_of_restarts(steps: list[tuple[str, str]]):
    story = Story()
    for what, name in steps:
        story.do(what, name)
    for which in story.mirrors:
        story.follow(which)


def test_a_restart_says_nobody_is_gone_who_was_there():
    story = Story()
    for what, name in (("register", "a"), ("announce", "a"), ("register", "b"), ("announce", "b"), ("follow one", "")):
        story.do(what, name)
    mirror = story.mirrors["follow one"]
    story.restart()
    assert story.state.presumed == {"a", "b"}
    (snapshot,) = story.state.since(mirror.version, mirror.history)
    assert snapshot.is_snapshot
    events, gone = mirror.apply(snapshot) or ([], [])
    assert events == []
    assert [departure.name for departure in gone] == ["launcher/0"]
    record = story.state.node("a")
    assert record is not None
    assert story.state.rejoin(record) == ""
    assert story.state.presumed == {"b"}


def test_versions_of_another_history_are_a_gap():
    one, other, mirror = RegistryState(), RegistryState(), Directory()
    one.history, other.history = 1, 2
    for state in (one, other):
        for n in range(3):
            state.register(f"n{n}", Endpoints())
    for update in one.since(-1):
        mirror.apply(update)
    assert (mirror.version, mirror.history) == (3, 1)
    other.register("n3", Endpoints())
    late = other.since(3, 2)[0]
    assert not late.is_snapshot
    assert mirror.apply(late) is None
    assert other.since(3, 1)[0].is_snapshot, "the same number of another history says nothing"


def test_who_missed_more_than_is_kept_gets_a_snapshot():
    state = RegistryState()
    for _ in range(KEPT_UPDATES + 10):
        state.register("a", Endpoints())
    assert state.since(5)[0].is_snapshot
    assert [u.version for u in state.since(10)][:1] == [11]
    assert len(state.since(10)) == KEPT_UPDATES


def test_a_grant_that_was_overtaken_does_not_enter():
    state = RegistryState()
    first, second = state.grant("a", Endpoints()), state.grant("a", Endpoints())
    state.enter(second)
    with pytest.raises(StaleEpoch, match="was replaced before it was there"):
        state.enter(first)
