"""Large arrays between processes of one host: by every way they arrive equal, and nothing is left of them."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from myxa.core.errors import BadRequest, CallError, DeadlineExceeded, OutcomeUnknown, SlabError, TensorLost
from myxa.core.handlers import handlers_of
from myxa.core.refs import with_deadline
from myxa.transport.tensors import kernel, same_host_peers, shared_array_transfer, slabs
from myxa.transport.tensors.same_host_peers import ReachState
from myxa.transport.tensors.shared_array_transfer import PullHandle, SlabHandle, TensorPolicy, join, part

sys.path.insert(0, str(Path(__file__).parent))
from conftest import World, no_tasks_left
from tests.transport.keepers import Keeper, KeeperContract

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

WAYS = {
    "pull": TensorPolicy(),
    "slab": TensorPolicy(may_pull=False),
    "wire": TensorPolicy(threshold_bytes=0),
}
LARGE = 300_000
"""Elements of float64: 2.3 MiB."""


@pytest_asyncio.fixture
async def ipc(tmp_path):
    made = World("ipc", tmp_path)
    await made.found()
    yield made
    await made.close()
    await no_tasks_left()


def numbers(count: int = LARGE) -> np.ndarray:
    return np.random.default_rng(3).normal(size=count)


async def settled(node, seconds=5.0):
    """Until no block, lease or loan of that node is left."""
    for _ in range(int(seconds / 0.02)):
        gc.collect()
        counters = node.tensors.counters()
        if not (counters["tensor_blocks"] or counters["tensor_leases"] or counters["tensor_loans"]):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(node.tensors.counters())


def ways_used(node) -> dict[str, int]:
    return {way: n for way, n in node.tensors.transfer.num_by.items() if n}


async def two_nodes(world, policy=None):
    actor = Keeper()
    near, far = await world.pair(actor)
    for node in (near, far):
        node.tensors.policy = policy or TensorPolicy()
    return near, far, near.ref(KeeperContract, "callee"), actor


# -- every way


@pytest.mark.parametrize("way", WAYS)
async def test_arrays_arrive_equal_and_belong_to_the_receiver(ipc, way):
    near, far, ref, _ = await two_nodes(ipc, WAYS[way])
    for count in (LARGE, 40_000, 2_000_000):
        data = numbers(count)
        expected = float((data + 1).sum())
        assert await ref.total(data) == expected
        np.testing.assert_array_equal(data, numbers(count))  # the receiver changed its own
    # replies and items are copied before the actor goes on
    first, second = await ref.state(), await ref.state()
    assert (first == 1).all()
    assert (second == 2).all()
    first += 5
    got = [piece.copy() async for piece in ref.pieces(4)]
    assert [piece[0] for piece in got] == [0, 1, 2, 3]
    assert all((piece == piece[0]).all() for piece in got)
    if way != "wire":
        assert ways_used(near) == {way: 3}
        assert ways_used(far) == {"slab": 6}
    else:
        assert not ways_used(near)
        assert not ways_used(far)
    await settled(near)
    await settled(far)


@pytest.mark.parametrize("way", WAYS)
async def test_a_cast_s_array_may_change_when_it_is_on_its_way(ipc, way):
    near, _, ref, actor = await two_nodes(ipc, WAYS[way])
    actor.gate.clear()
    data = np.ones(LARGE)
    await ref.add(data)
    data[:] = 100
    await ref.add(data)
    data[:] = 7
    actor.gate.set()
    while actor.num_runs < 2:
        await asyncio.sleep(0.01)
    assert (await ref.state() == 102).all()
    assert ways_used(near) == ({} if way == "wire" else {"slab": 2})
    await settled(near)


@pytest.mark.parametrize("way", WAYS)
async def test_a_put_runs_once_and_its_answer_can_be_had_again(ipc, way):
    _, _, ref, actor = await two_nodes(ipc, WAYS[way])
    data = numbers()
    one, two = await asyncio.gather(ref.store("a", data), ref.store("a", data))
    np.testing.assert_array_equal(one, 2 * data)
    np.testing.assert_array_equal(two, 2 * data)
    assert actor.num_runs == 1
    assert not (await ref.store("a", data + 1) == one).any()
    assert actor.num_runs == 2


async def test_below_the_threshold_and_without_ipc_everything_goes_by_the_wire(ipc):
    near, _, ref, _ = await two_nodes(ipc)
    await ref.total(numbers(1000))
    assert not ways_used(near)
    near.tensors.policy = TensorPolicy(threshold_bytes=1000)
    await ref.total(numbers(1000))
    assert ways_used(near) == {"pull": 1}


@pytest.mark.parametrize("kind", ["inproc", "tcp"])
async def test_other_transports_share_no_memory(world):
    near, far, ref, _ = await two_nodes(world)
    data = numbers()
    assert await ref.total(data) == float((data + 1).sum())
    assert (await ref.state() == 1).all()
    assert {*ways_used(near), *ways_used(far)} == {"wire"}
    assert near.tensors._same_host_peers.known() == []


async def test_an_actor_of_the_same_process_has_an_array_of_its_own(ipc):
    actor = Keeper()
    near = await ipc.join("near")
    await near.start(actor, "callee")
    ref = near.ref(KeeperContract, "callee")
    data = numbers()
    assert await ref.total(data) == float((data + 1).sum())
    np.testing.assert_array_equal(data, numbers())
    assert ways_used(near) == {"pull": 1}
    async with actor.ctx.tensors.allocate(LARGE, "float64") as block:
        block.array[:] = 1
        assert await ref.total(block.array) == 2 * LARGE
    assert ways_used(near) == {"pull": 1, "in place": 1}


async def test_large_and_small_arrays_in_one_message_and_many_at_once(ipc):
    near, _, ref, _ = await two_nodes(ipc, TensorPolicy(pool_bytes=8 << 20, wait_s=2.0))
    sizes = [LARGE + i for i in range(12)]
    got = await asyncio.gather(*(ref.total(np.ones(n)) for n in sizes))
    assert got == [2.0 * n for n in sizes]
    await settled(near)


# -- produced in place


async def test_in_place_nothing_is_copied_and_the_lease_ends_with_the_view(ipc):
    near, _, ref, actor = await two_nodes(ipc)
    async with near.tensors.allocate((500, 600), "float64") as block:
        assert block.array.shape == (500, 600)
        block.array[:] = 2
        assert await ref.keep(block.array) == 600_000
        assert block.is_lent
        assert await ref.keep(block.array[100:200]) == 120_000  # a contiguous part
        assert ways_used(near) == {"in place": 2}
        with pytest.raises(SlabError, match=r"still read after 0.05 s by node"):
            await block.reclaim(0.05)
        view = actor.arrays[0]
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        part_of_it = np.asarray(view)[3:]
        del view
        await ref.drop()
        await asyncio.sleep(0.05)
        assert block.is_lent  # a view of the view is left
        assert (part_of_it == 2).all()
        del part_of_it
        await block.reclaim(5)
        block.array[:] = 3
        assert await ref.total(block.array.reshape(-1)) == 4 * 300_000
        kept = block.array
    with pytest.raises(SlabError, match="left"):
        _ = block.array
    with pytest.raises(ValueError, match="read-only"):
        kept[:] = 0
    await settled(near)


async def test_a_block_outlives_its_producer_while_it_is_read(ipc):
    near, _, ref, actor = await two_nodes(ipc)
    async with near.tensors.allocate(LARGE, "float64") as block:
        block.array[:] = 1
        await ref.keep(block.array)
    async with near.tensors.allocate(LARGE, "float64") as other:
        other.array[:] = 9
    assert await ref.kept() == [LARGE]
    assert near.tensors.counters()["tensor_blocks"] == 1
    actor.arrays.clear()
    await settled(near)


async def test_a_leased_answer(ipc):
    near, far, ref, _ = await two_nodes(ipc)
    view = await ref.look()
    assert not view.flags.writeable
    assert view.sum() == 0
    assert far.tensors.counters()["tensor_leases"] == 1
    del view
    await settled(far)
    assert ways_used(near) == {}


async def test_a_private_array_for_a_leased_parameter_is_pulled_and_read_only(ipc):
    near, _, ref, actor = await two_nodes(ipc)
    assert await ref.keep(np.ones(LARGE)) == LARGE
    assert await ref.keep(np.ones(10)) == 10
    assert [array.flags.writeable for array in actor.arrays] == [False, False]
    assert ways_used(near) == {"pull": 1}
    await settled(near)


async def test_no_room_says_who_has_it_and_messages_do_without(ipc):
    near, _, ref, _ = await two_nodes(ipc, TensorPolicy(pool_bytes=4 << 20, may_pull=False, wait_s=0.05))
    async with near.tensors.allocate(3 << 20, "uint8"):
        with pytest.raises(SlabError, match="1 blocks are in use"):
            async with near.tensors.allocate(2 << 20, "uint8", timeout_s=0.05):
                pass
        assert await ref.total(np.ones(LARGE)) == 2 * LARGE
        assert ways_used(near) == {"wire": 1}
        waiting = asyncio.ensure_future(near.tensors._pool.allocate(3 << 20, 5.0))
        await asyncio.sleep(0.02)
        assert not waiting.done()
    block = await waiting  # as soon as there is room
    assert block is not None
    near.tensors._pool.freed(near.tensors._block_table.drop(block))
    with pytest.raises(SlabError, match="no room"):
        async with near.tensors.allocate(5 << 20, "uint8"):
            pass
    with pytest.raises(SlabError, match="numbers only"):
        async with near.tensors.allocate(5, "object"):
            pass


# -- what is not permitted


async def test_where_pulling_is_forbidden_the_slab_is_used_and_else_the_wire(ipc, monkeypatch):
    def forbidden(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(same_host_peers, "read_bytes", forbidden)
    near, far, ref, _ = await two_nodes(ipc)
    assert await ref.total(np.ones(LARGE)) == 2 * LARGE
    assert ways_used(near) == {"slab": 1}
    reach = near.tensors._same_host_peers.get(far._key).reach
    assert (reach.can_pull, reach.can_map) == (False, True)

    monkeypatch.setattr(slabs.os, "open", forbidden)
    third = await ipc.join("third")
    other = third.ref(KeeperContract, "callee")
    assert await other.total(np.ones(LARGE)) == 2 * LARGE
    assert ways_used(third) == {"wire": 1}
    assert third.tensors._same_host_peers.get(far._key).reach.state is ReachState.SHUT


async def test_what_was_permitted_and_is_not_any_more_costs_one_more_try(ipc, monkeypatch):
    def forbidden(*_):
        raise PermissionError(1, "Operation not permitted")

    near, _, ref, actor = await two_nodes(ipc)
    await ref.total(np.ones(LARGE))
    monkeypatch.setattr(shared_array_transfer, "pull", forbidden)
    assert await ref.total(np.ones(LARGE)) == 2 * LARGE
    assert ways_used(near) == {"pull": 2, "slab": 1}
    monkeypatch.setattr(shared_array_transfer.SharedArrayTransfer, "_mapping", forbidden)
    assert await ref.total(np.ones(LARGE)) == 2 * LARGE
    assert ways_used(near) == {"pull": 2, "slab": 2, "wire": 1}
    assert actor.num_runs == 3
    await settled(near)


async def test_a_challenge_cannot_be_met_for_another_process(ipc):
    """Who names a process that is not its own has no way to have it read."""
    near, far, ref, _ = await two_nodes(ipc)
    await ref.kept()
    hood = far.tensors._same_host_peers
    victim = await ipc.child("victim")
    found = await hood.probe(near._key, victim.pid, same_host_peers.boot_id())
    assert (found.can_pull, found.can_map) == (False, False)
    assert not hood.get(near._key).is_readable
    assert (await hood.probe(near._key, os.getpid(), same_host_peers.boot_id())).why  # it said another number before
    assert (await hood.probe(ipc.host._key, 1 << 30, same_host_peers.boot_id())).pid == 0
    assert (await hood.probe(ipc.host._key, os.getpid(), "another boot")).pid == 0


# -- hostile and stale handles


async def sent(near, far, handles, method="total"):
    """Send such a request as if our own transfer had made it."""
    call_client = near._call_client
    spec = handlers_of(KeeperContract).by_name[method]
    order = call_client._order("callee", spec, spec.request(np.zeros(4)), 10.0)
    order = msgspec.structs.replace(order, body=join(handles, b'[{"data":["float64",[4],0]}]'), frames=(b"",))
    return await call_client._exchange(order, await call_client._route(order, spec))


def _board_of(node):
    board = node.tensors._same_host_peers._board
    return board.path, board.slab_id


async def test_handles_that_point_nowhere_are_refused_and_harm_nobody(ipc):
    near, far, ref, actor = await two_nodes(ipc)
    pull = PullHandle(frame=0, address=4096, num_bytes=32, word=4096, generation=1)
    with pytest.raises(TensorLost, match="nothing is known"):
        await sent(near, far, [pull])
    await ref.total(np.ones(LARGE))  # now it is
    block = SlabHandle(
        frame=0, path=f"/proc/{os.getpid()}/fd/0", slab_id=1, offset=0, num_bytes=32, slot=0, generation=1, ticket=1
    )
    for handle, why in (
        (pull, "Bad address"),
        (msgspec.structs.replace(pull, num_bytes=1 << 40), "more than the host has"),
        (block, "no slab"),
        (msgspec.structs.replace(block, path="/proc/1/fd/0"), "which is not of process"),
        (msgspec.structs.replace(block, path="/etc/passwd"), "which is not of process"),
    ):
        with pytest.raises(TensorLost, match=why):
            await sent(near, far, [handle])
    path, slab_id = _board_of(near)
    real = msgspec.structs.replace(block, path=path, slab_id=slab_id)
    for handle, why in (
        (real, "written again"),
        (msgspec.structs.replace(real, offset=1 << 50), "outside"),
        (msgspec.structs.replace(real, slot=100_000), "written again"),
        (msgspec.structs.replace(real, slab_id=77), "is not slab"),
    ):
        with pytest.raises(TensorLost, match=why):
            await sent(near, far, [handle])
    with pytest.raises(BadRequest, match="handles for frames"):
        await sent(near, far, [msgspec.structs.replace(pull, frame=1)])
    assert actor.num_runs == 1
    assert await ref.total(np.ones(LARGE)) == 2 * LARGE
    assert far.counters()["arrays_lost"] == 10


async def test_an_array_of_the_wrong_size_is_refused(ipc):
    near, far, ref, actor = await two_nodes(ipc)
    await ref.total(np.ones(LARGE))
    loan = near.tensors._grants.lend(memoryview(bytes(100)))
    handle = PullHandle(frame=0, address=loan.address, num_bytes=100, word=loan.word, generation=loan.generation)
    with pytest.raises(BadRequest, match="does not fit 100 bytes"):
        await sent(near, far, [handle])
    near.tensors._grants.end(loan)
    assert actor.num_runs == 1


async def test_what_is_lent_no_longer_is_never_used(ipc, monkeypatch):
    """The word is read before and after the data: a loan that ends in the middle voids what was copied."""
    near, _, ref, actor = await two_nodes(ipc, TensorPolicy(may_map=False))
    pulled = kernel.pull

    def late(pid, source, target, num_bytes, word):
        before, _ = pulled(pid, source, target, num_bytes, word)
        near.tensors._grants._words[:] = 0
        return before, pulled(pid, word, target, 8, word)[1]

    monkeypatch.setattr(shared_array_transfer, "pull", late)
    assert await ref.total(np.ones(40_000)) == 80_000  # by the wire at last
    assert actor.num_runs == 1
    assert near.tensors.transfer.num_by["pull"] == 1


async def test_an_offer_that_expired_is_not_read(ipc):
    near, far, ref, actor = await two_nodes(ipc)
    await ref.total(np.ones(LARGE))
    async with near.tensors.allocate(4, "float64") as block:
        found = near.tensors._pool.find(block.array.__array_interface__["data"][0], 32)
        packed = shared_array_transfer.Packed(b"", ())
        handle = near.tensors.transfer._offered(packed, *found, 32, far._key, 0, False, 1.0)
        near.tensors._pool.freed(near.tensors._block_table.expire(near.clock.monotonic() + 1e6))
        await block.reclaim(1)
        with pytest.raises(TensorLost, match="written again"):
            await sent(near, far, [handle])
        with pytest.raises(TensorLost, match="lease is over"):
            await sent(near, far, [handle], method="keep")
    assert actor.num_runs == 1


async def test_an_answer_that_cannot_be_read_is_an_unknown_outcome(ipc, monkeypatch):
    def gone(*_):
        raise SlabError("gone")

    _, _, ref, actor = await two_nodes(ipc)
    monkeypatch.setattr(shared_array_transfer.SharedArrayTransfer, "_mapping", gone)
    with pytest.raises(OutcomeUnknown, match=r"callee.state ran, but its answer is lost"):
        await ref.state()
    assert actor.sum[0] == 1


# -- deadlines and cancellation


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_that_ends_early_takes_back_what_it_lent(ipc, way):
    near, far, ref, _ = await two_nodes(ipc, WAYS[way])
    with pytest.raises(DeadlineExceeded):
        await with_deadline(ref, 1.0).wait(np.ones(LARGE))
    task = asyncio.ensure_future(ref.wait(np.ones(LARGE)))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settled(near)
    assert await ref.total(np.ones(LARGE)) == 2 * LARGE
    await settled(far)


async def test_a_caller_that_leaves_in_the_middle_of_a_copy(ipc, monkeypatch):
    near, far, ref, actor = await two_nodes(ipc)
    await ref.total(np.ones(LARGE))
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    pulled = kernel.pull

    def slow(*args):
        loop.call_soon_threadsafe(begun.set)
        import time

        time.sleep(0.02)
        return pulled(*args)

    monkeypatch.setattr(shared_array_transfer, "pull", slow)
    data = np.ones(4 << 20)  # four steps of 8 MiB
    task = asyncio.ensure_future(ref.total(data))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    data[:] = 9
    await settled(near)
    assert await ref.total(data) == 10.0 * data.size
    assert actor.num_runs == 2
    assert far.tensors.counters()["tensor_loans"] == 0


async def test_a_node_that_closes_in_the_middle_of_a_copy_leaves_nothing(ipc):
    near, far, ref, _ = await two_nodes(ipc)
    task = asyncio.ensure_future(ref.total(np.ones(16 << 20)))
    await asyncio.sleep(0.02)
    await far.close(grace_s=0.0)
    ipc.nodes.remove(far)
    with pytest.raises(CallError) as caught:
        await task
    assert caught.value.callee == "callee"
    del caught
    await settled(near)


# -- processes


async def test_between_processes_and_when_the_reader_is_killed(ipc):
    near = await ipc.join("near")
    child = await ipc.child("keeper", "keeper")
    await near.wait_for("keeper", timeout_s=20)
    ref = near.ref(KeeperContract, "keeper")
    data = numbers()
    assert await ref.total(data) == float((data + 1).sum())
    assert (await ref.state() == 1).all()
    async with near.tensors.allocate(LARGE, "float64") as block:
        block.array[:] = 1
        assert await ref.keep(block.array) == LARGE
        assert block.is_lent
        doomed = asyncio.ensure_future(ref.wait(data))
        await asyncio.sleep(0.1)
        child.kill()
        await block.reclaim(5)  # its pidfd says it: nobody reads it any more
        await child.wait()
        await ipc.host.registry.process_exited("keeper", 0, -9, child.pid)
        with pytest.raises(OutcomeUnknown):
            await doomed
    assert ways_used(near) == {"pull": 2, "in place": 1}
    await settled(near)
    assert near.tensors._same_host_peers.known() == []


async def test_an_incarnation_that_is_over_has_no_leases(ipc):
    """Fenced, but its process lives on."""
    near, far, ref, _ = await two_nodes(ipc)
    async with near.tensors.allocate(LARGE, "float64") as block:
        block.array[:] = 1
        await ref.keep(block.array)
        near._session.peer_over(far._key, "it was replaced")
        await block.reclaim(5)


async def test_a_view_stays_readable_when_its_owner_is_killed(ipc):
    near = await ipc.join("near")
    child = await ipc.child("keeper", "keeper")
    await near.wait_for("keeper", timeout_s=20)
    view = await near.ref(KeeperContract, "keeper").look()
    child.kill()
    await child.wait()
    assert view.sum() == 0
    await asyncio.sleep(0.1)
    del view
    await settled(near)


async def test_warm_memory_is_used_again_and_given_back_when_idle(ipc):
    _, far, ref, _ = await two_nodes(ipc)
    landing = far.tensors._receive_memory
    for _ in range(3):
        await ref.total(np.ones(LARGE))
    assert 0 < landing.num_spare_bytes + sum(map(len, landing._back)) <= 4 << 20
    landing.trim(far.clock.monotonic() + 100)
    landing.trim(far.clock.monotonic() + 200)
    assert landing.num_spare_bytes == 0


async def test_handles_are_small_whatever_they_stand_for(ipc):
    near, far, ref, _ = await two_nodes(ipc)
    await ref.total(np.ones(LARGE))
    sizes = []
    for count in (40_000, 4_000_000):
        packed = await near.tensors.transfer.pack(
            far._key, None, b"[1]", (np.ones(count).view(np.uint8).data,), is_lent=True, left_s=1.0
        )
        sizes.append(len(packed.body) + sum(map(len, packed.frames)))
        assert len(part(packed.body, 1)[0]) == 1
        packed.end()
    assert max(sizes) < 400
