"""Single failures of a switch, in virtual time: what the manager does, and what it says."""

from __future__ import annotations

import pytest
from tests.memory.ledger_world import ALL, MIB, RESIDUE, SPANNING, Asset, Process, World

from myxa.core.device_memory import LeaseReply, MemoryCommand


@pytest.fixture
def world() -> World:
    """The trainers have loaded and have their turn."""
    made = World(seed=1)
    made.advance(0.5)
    assert granted(made, "rollout", "trainer")
    assert granted(made, "trainer", "rollout")
    return made


def answer(world: World, gang: str, quiet: str = "", wait_s: float = 31.0) -> LeaseReply:
    asked = world.lease(gang, ALL[gang], (quiet,) if quiet else (), True, 30.0)
    world.advance(wait_s)
    return world.answers[asked]


def granted(world: World, gang: str, quiet: str = "") -> bool:
    reply = answer(world, gang, quiet, 5.0)
    assert reply.granted, reply.reason
    return True


def states(world: World, gang: str) -> set[str]:
    return {p.machine.state for p in world.live.values() if p.gang == gang}


def test_a_straggler_ends_in_the_old_state(world: World) -> None:
    """One rank does not stop in time: nobody released anything, everybody goes on."""
    world.stop("trainer/1")
    asked = world.lease("rollout", ALL["rollout"], ("trainer",), True, 10.0)
    world.advance(7.5)
    world.cont("trainer/1")
    world.advance(3.0)
    reply = world.answers[asked]
    assert not reply.granted
    assert reply.reason == "refused: trainer/1 did not drain within 7.0 s"
    assert states(world, "trainer") == {"active"}
    assert all(a.on_device for p in world.live.values() if p.gang == "trainer" for a in p.assets.values())
    assert granted(world, "rollout", "trainer")


def test_who_never_answers_is_fenced_and_taken_back(world: World) -> None:
    world.stop("trainer/1")
    reply = answer(world, "rollout", "trainer")
    assert not reply.granted
    fenced = world.arbiter.ledger.tenants["trainer/1"]
    assert not fenced.is_usable
    assert fenced.held_bytes == sum(t.num_bytes for t in fenced.report.tags)
    refused = answer(world, "trainer", "rollout")
    assert not refused.granted
    assert "trainer/1 is fenced" in refused.reason
    world.cont("trainer/1")
    world.advance(5.0)
    assert fenced.is_usable
    assert granted(world, "rollout", "trainer")
    assert granted(world, "trainer", "rollout")


def test_a_stranger_that_takes_what_was_freed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given on trust: the switch is refused with the numbers, and who cannot be given back its memory stays
    quiet until there is room."""
    world.has_cheated = True
    leave = world.leave

    def robbed(asset: Asset) -> None:
        world.strangers["gpu-a"] += asset.num_bytes * asset.on_device
        leave(asset)

    monkeypatch.setattr(world, "leave", robbed)
    reply = answer(world, "rollout", "trainer")
    assert not reply.granted
    assert "short on gpu-a, held by" in reply.reason
    assert "by unregistered processes" in reply.reason
    assert world.live["trainer/0"].machine.state in ("quiesced", "released")
    monkeypatch.setattr(world, "leave", leave)
    world.strangers["gpu-a"] = 0
    assert granted(world, "trainer", "rollout")


def test_a_shortage_that_does_not_shrink_is_waited_for_a_second(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was let go of did not become free, and nothing changes any more: something else leaves."""
    granted(world, "rollout", "trainer")
    world.has_cheated = True
    leave = world.leave

    def half_hearted(asset: Asset) -> None:
        if asset.on_device and asset.num_bytes == 420 * MIB:
            world.strangers["gpu-a"] = 250 * MIB
        leave(asset)

    monkeypatch.setattr(world, "leave", half_hearted)
    reply = answer(world, "trainer", "rollout")
    assert reply.granted, reply.reason
    assert world.strangers["gpu-a"] == 250 * MIB
    assert 1.0 <= reply.seconds["verify"] < 1.5, reply.seconds


@pytest.mark.parametrize(("late_s", "is_granted"), [(0.7, True), (1.6, False)])
def test_where_nothing_else_can_leave_a_shortage_is_waited_for_a_second(
    world: World, monkeypatch: pytest.MonkeyPatch, late_s: float, is_granted: bool
) -> None:
    world.has_cheated = True
    leave = world.leave

    def slow_to_show(asset: Asset) -> None:
        if asset.on_device and asset.num_bytes == 240 * MIB:
            world.strangers["gpu-a"] = 610 * MIB
        leave(asset)

    monkeypatch.setattr(world, "leave", slow_to_show)
    world.strangers["gpu-a"] = 370 * MIB  # all that can leave has to
    asked = world.lease("rollout", ALL["rollout"], ("trainer",), True, 30.0)
    while world.strangers["gpu-a"] != 610 * MIB:
        world.advance(0.05)
    world.advance(late_s)
    world.strangers["gpu-a"] = 370 * MIB
    world.advance(30.0)
    assert world.answers[asked].granted is is_granted, world.answers[asked].reason


def test_a_restore_that_stays_impossible_gives_the_device_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.has_cheated = True
    engine = world.live["rollout/1"]
    come = world.come

    def always_full(process: Process, command: MemoryCommand) -> str:
        return "out of device memory" if process is engine else come(process, command)

    monkeypatch.setattr(world, "come", always_full)
    reply = answer(world, "rollout", "trainer")
    assert not reply.granted
    assert "rollout/1 refused to restore: out of device memory" in reply.reason
    assert states(world, "trainer") == {"active"}, "it has its memory back, and goes on"
    assert {"fallback_restore", "fallback_commit"} <= set(reply.seconds)
    assert all(a.on_device for p in world.live.values() if p.gang == "trainer" for a in p.assets.values())


def test_after_a_death_on_several_devices_a_lease_waits_until_each_is_measured_free() -> None:
    world = World(2, SPANNING)
    world.advance(0.5)
    granted(world, "trainer", "rollout")
    granted(world, "rollout", "trainer")
    process = world.live.pop("rollout/0")
    process.is_alive = False
    world.do(world.arbiter.died("rollout/0", process.epoch, "killed", world.now))
    process.freed.add("gpu-b")
    asked = world.lease("trainer", ALL["trainer"], (), True, 30.0)
    world.advance(5.0)
    assert asked not in world.answers, "gpu-a is not free"
    process.freed.add("gpu-a")
    world.advance(5.0)
    assert world.answers[asked].granted


def test_a_lease_that_the_dead_leave_no_room_for_is_refused_with_the_numbers() -> None:
    world = World(2)
    world.advance(0.5)
    granted(world, "trainer")
    granted(world, "rollout", "trainer")
    process = world.live.pop("rollout/1")
    process.is_alive = False
    world.do(world.arbiter.died("rollout/1", process.epoch, "killed", world.now))
    reply = answer(world, "trainer")
    assert not reply.granted
    assert "short on gpu-b, held by" in reply.reason and "595 MiB by unregistered processes" in reply.reason


@pytest.mark.parametrize("unnoticed_s", [0.1, 5.5])
def test_a_death_that_is_noticed_late_delays_no_lease(unnoticed_s: float) -> None:
    world = World(5)
    world.advance(0.5)
    world.strangers["gpu-b"] = 20 * MIB
    granted(world, "trainer")
    granted(world, "rollout", "trainer")
    world.advance(5.5)
    process = world.live.pop("rollout/1")
    process.is_alive = False
    process.freed.update(process.devices)
    world.advance(unnoticed_s)
    world.do(world.arbiter.died("rollout/1", process.epoch, "killed", world.now))
    world.spawn("rollout/1")
    world.advance(0.2)
    assert granted(world, "rollout", "trainer")


def test_a_new_manager_trusts_no_tenant_before_it_has_answered(world: World) -> None:
    """And uses no epoch that its predecessor can have used."""
    epoch = world.arbiter.epoch
    world.stop("trainer/1")
    world.restart_manager()
    asked = world.lease("rollout", ALL["rollout"], ("trainer",), True, 30.0)
    world.advance(1.5)
    assert asked not in world.answers
    usable = {name for name, tenant in world.arbiter.ledger.tenants.items() if tenant.is_usable}
    assert usable == set(world.members) - {"trainer/1"}
    assert world.arbiter.epoch > epoch + (1 << 31)
    world.cont("trainer/1")
    world.advance(20.0)
    assert world.answers[asked].granted, world.answers[asked].reason


def test_an_engine_over_several_devices_leaves_and_returns_by_one_command_each() -> None:
    world = World(3, SPANNING)
    world.advance(0.5)
    granted(world, "rollout", "trainer")
    for _ in range(2):
        granted(world, "trainer", "rollout")
        assert all(world.live["rollout/0"].used(device) == RESIDUE + 160 * MIB for device in ("gpu-a", "gpu-b"))
        granted(world, "rollout", "trainer")
    kinds = [name.split(".")[2] for name, _ in world.live["rollout/0"].executed]
    assert kinds.count("drain") == kinds.count("release") == 2
    assert kinds.count("restore") == kinds.count("commit") == 3


def test_a_lease_that_is_there_already_costs_nothing(world: World) -> None:
    epoch = world.arbiter.epoch
    reply = answer(world, "trainer", "rollout", 1.0)
    assert (reply.granted, reply.seconds, reply.epoch, world.arbiter.epoch) == (True, {}, epoch, epoch)


def test_leases_of_one_device_are_served_in_order(world: World) -> None:
    world.weather.slow_s = 1.0
    names = [world.lease(g, ALL[g], (q,), True, 60.0) for g, q in [("rollout", "trainer"), ("trainer", "rollout")] * 3]
    world.advance(60.0)
    assert [name for name in world.answers if name in names] == names
    assert all(world.answers[name].granted for name in names)
    epochs = [world.answers[name].epoch for name in names]
    assert epochs == sorted(set(epochs))


def test_a_lease_that_waits_too_long_says_behind_whom(world: World) -> None:
    world.weather.slow_s = 30.0
    world.lease("rollout", ALL["rollout"], ("trainer",), True, 60.0)
    late = world.lease("trainer", ALL["trainer"], ("rollout",), True, 1.0)
    world.advance(1.5)
    assert not world.answers[late].granted
    assert "waited 1.0 s for its turn behind rollout: weights, kv_cache, cuda_graph on gpu-a, gpu-b" in (
        world.answers[late].reason
    )
