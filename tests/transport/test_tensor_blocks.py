"""Blocks, leases, free ranges and what is known of neighbours: tables, rules, invariants. No memory, no loop."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from myxa.core.ids import PeerKey
from myxa.transport.codec import UndecodableError
from myxa.transport.tensors.blocks import (
    BLOCK_TABLE,
    LEASE_TABLE,
    NUM_SLOTS,
    PAGE,
    BlockState,
    BlockTable,
    FreeBytes,
    Lease,
    LeaseState,
    SharedBlock,
    whole_pages,
)
from myxa.transport.tensors.same_host_peers import REACH_TABLE, SHUT_S, PeerReach, ReachState
from myxa.transport.tensors.shared_array_transfer import PullHandle, SlabHandle, has_handles, join, part

ANNE, BERT = PeerKey(2, 1), PeerKey(3, 1)


def ledger_with(num_pages: int) -> BlockTable:
    made = BlockTable(1000)
    made.add_slab(0, num_pages * PAGE)
    return made


# -- tables


def test_free_and_ended_are_final_and_everything_else_can_get_there():
    for table, final in ((BLOCK_TABLE, BlockState.FREE), (LEASE_TABLE, LeaseState.ENDED)):
        assert not [state for state, _ in table if state is final]
        reached = {final}
        for _ in range(len(table)):
            reached |= {state for (state, _), after in table.items() if after in reached}
        assert reached == set(type(final))


def test_what_the_table_does_not_know_is_a_bug_that_shows():
    block_table = ledger_with(4)
    block = block_table.allocate(PAGE)
    assert block is not None
    block_table.drop(block)
    with pytest.raises(KeyError):
        block_table.drop(block)
    with pytest.raises(KeyError):
        block_table.offer(block, ANNE, 1.0)


# -- the block_table, by example


def test_a_block_is_free_when_its_owner_and_all_readers_are_done():
    block_table = ledger_with(4)
    block = block_table.allocate(PAGE)
    assert block is not None
    to_anne, to_bert = block_table.offer(block, ANNE, 10.0), block_table.offer(block, BERT, 10.0)
    assert block_table.holders_of(block) == [ANNE, BERT]
    assert block_table.drop(block) == []
    assert block_table.release([to_anne.ticket], ANNE) == []
    assert block_table.release([to_bert.ticket], BERT) == [block]
    assert block_table.num_blocks == block_table.num_leases == 0


def test_offers_expire_but_what_is_held_stays():
    block_table = ledger_with(4)
    block = block_table.allocate(PAGE)
    assert block is not None
    held, offered = block_table.offer(block, ANNE, 10.0), block_table.offer(block, BERT, 10.0)
    block_table.drop(block)
    assert block_table.hold(held.ticket, ANNE)
    assert block_table.expire(9.9) == []
    assert block_table.num_leases == 2
    assert block_table.expire(10.0) == []
    assert block_table.num_leases == 1
    assert not block_table.hold(offered.ticket, BERT)
    assert block_table.withdraw(held) == []  # its call ended; the reader keeps it
    assert block_table.release([held.ticket], ANNE) == [block]


def test_a_lease_is_its_holders_only():
    block_table = ledger_with(4)
    block = block_table.allocate(PAGE)
    assert block is not None
    lease = block_table.offer(block, ANNE, 10.0)
    block_table.drop(block)
    assert not block_table.hold(lease.ticket, BERT)
    assert block_table.release([lease.ticket, 77], BERT) == []
    assert block_table.over(BERT) == []
    assert block_table.over(ANNE) == [block]
    assert block_table.release([lease.ticket], ANNE) == []  # late


def test_a_block_that_is_written_again_has_another_generation():
    block_table = ledger_with(4)
    block = block_table.allocate(PAGE)
    assert block is not None
    before = block.generation
    lease = block_table.offer(block, ANNE, 10.0)
    with pytest.raises(ValueError, match="lent"):
        block_table.renew(block)
    block_table.withdraw(lease)
    block_table.renew(block)
    assert block.generation > before


def test_a_slab_has_no_more_blocks_than_generation_words():
    block_table = ledger_with(NUM_SLOTS + 10)
    assert all(block_table.allocate(1) is not None for _ in range(NUM_SLOTS))
    assert block_table.allocate(1) is None
    block_table.add_slab(1, PAGE)
    more = block_table.allocate(1)
    assert more is not None
    assert more.slab == 1


def test_only_idle_slabs_go():
    block_table = ledger_with(4)
    block = block_table.allocate(1)
    assert block is not None
    assert block_table.idle_slabs() == ()
    with pytest.raises(ValueError, match="in use"):
        block_table.remove_slab(0)
    block_table.drop(block)
    assert block_table.idle_slabs() == (0,)
    block_table.remove_slab(0)
    assert block_table.allocate(1) is None


def test_own_memory_is_recognised_while_its_owner_holds_it():
    block_table = ledger_with(8)
    first, second = block_table.allocate(PAGE), block_table.allocate(2 * PAGE)
    assert first is not None
    assert second is not None
    assert block_table.find(0, second.offset + 10, PAGE) is second
    assert block_table.find(0, first.offset + 10, PAGE) is None  # over its end
    assert block_table.find(1, 0, 1) is None
    block_table.drop(first)
    assert block_table.find(0, first.offset, 10) is None


# -- the block_table, against everything


class LedgerMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: readable memory is nobody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.block_table = BlockTable(0)
        self.block_table.add_slab(0, 12 * PAGE)
        self.block_table.add_slab(1, 5 * PAGE)
        self.owned: list[SharedBlock] = []
        self.leases: list[Lease] = []
        self.generations: set[int] = set()
        self.now = 0.0

    @rule(pages=st.integers(1, 6))
    def allocate(self, pages):
        block = self.block_table.allocate(pages * PAGE - 5)
        if block is not None:
            assert block.generation not in self.generations
            self.generations.add(block.generation)
            self.owned.append(block)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), holder=st.sampled_from([ANNE, BERT]), seconds=st.integers(0, 3))
    def offer(self, data, holder, seconds):
        block = data.draw(st.sampled_from(self.owned))
        self.leases.append(self.block_table.offer(block, holder, self.now + seconds))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def drop(self, data):
        block = data.draw(st.sampled_from(self.owned))
        self.owned.remove(block)
        freed = self.block_table.drop(block)
        assert freed == ([] if block.leases else [block])

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def renew(self, data):
        block = data.draw(st.sampled_from(self.owned))
        if not block.leases:
            self.block_table.renew(block)
            assert block.generation not in self.generations
            self.generations.add(block.generation)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), who=st.sampled_from([ANNE, BERT]))
    def hold(self, data, who):
        lease = data.draw(st.sampled_from(self.leases))
        could = lease.state is not LeaseState.ENDED and lease.holder == who
        assert self.block_table.hold(lease.ticket, who) is could

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), who=st.sampled_from([ANNE, BERT]))
    def release(self, data, who):
        lease = data.draw(st.sampled_from(self.leases))
        state = lease.state
        self.check_freed(self.block_table.release([lease.ticket], who))
        assert lease.state is (LeaseState.ENDED if lease.holder == who else state)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def withdraw(self, data):
        lease = data.draw(st.sampled_from(self.leases))
        was_held = lease.state is LeaseState.HELD
        self.check_freed(self.block_table.withdraw(lease))
        assert lease.state is (LeaseState.HELD if was_held else LeaseState.ENDED)

    @rule(who=st.sampled_from([ANNE, BERT]))
    def over(self, who):
        self.check_freed(self.block_table.over(who))
        assert who not in self.block_table.holders()

    @rule(seconds=st.integers(0, 2))
    def expire(self, seconds):
        self.now += seconds
        self.check_freed(self.block_table.expire(self.now))
        assert all(x.expires_at > self.now for x in self.leases if x.state is LeaseState.OFFERED)

    def check_freed(self, freed):
        for block in freed:
            assert block not in self.owned
            assert all(lease.state is LeaseState.ENDED for lease in self.leases if lease.block is block)

    @invariant()
    def nobody_shares_memory_or_a_word(self):
        blocks = [block for group in self.block_table._blocks.values() for block in group]
        for slab in (0, 1):
            mine = sorted((b for b in blocks if b.slab == slab), key=lambda b: b.offset)
            for one, next_one in itertools.pairwise(mine):
                assert one.offset + whole_pages(one.num_bytes) <= next_one.offset
            assert len({b.slot for b in mine}) == len(mine)
            used = sum(whole_pages(b.num_bytes) for b in mine)
            shelf = self.block_table._shelves[slab]
            assert used + shelf.free_bytes == shelf.num_bytes

    @invariant()
    def a_live_lease_has_a_live_block(self):
        live = [lease for lease in self.leases if lease.state is not LeaseState.ENDED]
        assert self.block_table.num_leases == len(live)
        assert all(lease.block.state in (BlockState.LENT, BlockState.ORPHAN) for lease in live)

    def teardown(self):
        for block in self.owned:
            self.block_table.drop(block)
        self.block_table.over(ANNE)
        self.block_table.over(BERT)
        assert self.block_table.num_blocks == self.block_table.num_leases == 0
        assert self.block_table.idle_slabs() == (0, 1)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9 * PAGE)), max_size=60))
def test_ranges_never_overlap_and_join_again(steps):
    shelf, taken = FreeBytes(32 * PAGE), {}
    for is_take, number in steps:
        if is_take or not taken:
            offset = shelf.take(number)
            if offset is None:
                assert whole_pages(number) > PAGE or shelf.free_bytes == 0
                continue
            assert all(offset + whole_pages(number) <= o or o + whole_pages(n) <= offset for o, n in taken.items())
            taken[offset] = number
        else:
            offset = sorted(taken)[number % len(taken)]
            shelf.give(offset, taken.pop(offset))
        assert shelf.free_bytes == 32 * PAGE - sum(map(whole_pages, taken.values()))
    for offset, number in taken.items():
        shelf.give(offset, number)
    assert shelf.take(32 * PAGE) == 0


def test_a_range_is_given_back_once():
    shelf = FreeBytes(4 * PAGE)
    offset = shelf.take(2 * PAGE)
    assert offset == 0
    shelf.give(0, 2 * PAGE)
    for start in (0, PAGE, 3 * PAGE):
        with pytest.raises(ValueError, match="free already"):
            shelf.give(start, PAGE)


# -- neighbours


def test_what_can_reach_us_and_what_cannot_any_more():
    reach = PeerReach()
    assert reach.is_due(0.0)
    reach.on("ask")
    assert not reach.is_due(0.0)
    reach.found(can_pull=True, can_map=True, now=1.0)
    assert reach.state is ReachState.OPEN
    reach.lost(pull=True, now=2.0)
    assert (reach.state, reach.can_pull, reach.can_map) == (ReachState.OPEN, False, True)
    reach.lost(pull=False, now=2.0)
    assert reach.state is ReachState.SHUT
    reach.lost(pull=False, now=3.0)
    assert not reach.is_due(2.9 + SHUT_S)
    assert reach.is_due(3.0 + SHUT_S)


def test_no_way_at_all_shuts_it_for_a_while():
    reach = PeerReach()
    reach.on("ask")
    reach.found(can_pull=False, can_map=False, now=5.0)
    assert reach.state is ReachState.SHUT
    assert not reach.is_due(6.0)
    assert {state for state, _ in REACH_TABLE} == set(ReachState)


# -- handles


def test_handles_come_back_and_the_body_behind_them():
    handles = [
        PullHandle(frame=1, address=2**47, num_bytes=10, word=2**46, generation=2**61),
        SlabHandle(frame=0, path="/proc/1/fd/3", slab_id=2**62, offset=0, num_bytes=1, slot=3, generation=9, ticket=8),
    ]
    body = join(handles, b'[{"x":["int8",[1],0]}]')
    assert has_handles(body)
    assert not has_handles(b"[1]")
    assert not has_handles(b"")
    found, rest = part(memoryview(body), 2)
    assert found == handles
    assert bytes(rest) == b'[{"x":["int8",[1],0]}]'


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 3))
def test_arbitrary_handles_never_raise_anything_else(junk, num_frames):
    for body in (junk, b"{" + junk, b'{"arrays":[' + junk + b"]}\n[1]"):
        try:
            handles, _ = part(body, num_frames)
        except UndecodableError:
            continue
        assert all(0 <= handle.frame < num_frames for handle in handles)


@pytest.mark.parametrize(
    "line",
    [
        b'{"arrays":[{"type":"pull","frame":0,"address":-1,"num_bytes":1,"word":0,"generation":1}]}\n[1]',
        b'{"arrays":[{"type":"pull","frame":0,"address":1,"num_bytes":0,"word":0,"generation":1}]}\n[1]',
        b'{"arrays":[{"type":"pull","frame":0,"address":1,"num_bytes":2000000000000,"word":0,"generation":1}]}\n[1]',
        b'{"arrays":[{"type":"pull","frame":1,"address":1,"num_bytes":1,"word":0,"generation":1}]}\n[1]',
        b'{"arrays":[{"type":"file","frame":0}]}\n[1]',
        b'{"arrays":[]}',
        b"{" * 100_000 + b"\n[1]",
    ],
)
def test_handles_that_make_no_sense_are_refused(line):
    with pytest.raises(UndecodableError):
        part(line, 1)
