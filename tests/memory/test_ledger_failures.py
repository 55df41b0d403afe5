"""Single failures of a switch, in virtual time: what the manager does, and what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator

import pytest
from tests.memory.ledger_world import ALL, MEMBERS, MIB, RESIDUE, SPANNING, Asset, Members, Process, World

from myxa.core.device_memory import CommandKind, LeaseReply, MemoryCommand, Tag
from myxa.core.errors import MemoryFault

MakeWorld = Callable[..., World]


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    made: list[World] = []

    def make(seed: int, members: Members = MEMBERS) -> World:
        made.append(World(seed, members))
        made[-1].advance(0.5)
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """The trainers have loaded and have their turn."""
    made = make_world(1)
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
    return {p.tenant.state for p in world.live.values() if p.gang == gang}


def stop_at(world: World, kind: CommandKind, name: str) -> None:
    """The process stands still from its first command of that kind on."""

    def before(tenant: str, command: MemoryCommand) -> None:
        if tenant == name and command.kind == kind:
            world.stop(name)
            world.before = lambda _, __: None

    world.before = before


def holds_all(world: World, gang: str) -> bool:
    return all(a.on_device for p in world.live.values() if p.gang == gang for a in p.assets.values())


def test_a_straggler_ends_in_the_old_state(world: World) -> None:
    """One rank does not stop in time: nobody released anything, everybody goes on."""
    stop_at(world, "drain", "trainer/1")
    asked = world.lease("rollout", ALL["rollout"], ("trainer",), True, 10.0)
    world.advance(7.5)
    world.cont("trainer/1")
    world.advance(3.0)
    reply = world.answers[asked]
    assert not reply.granted
    assert reply.reason == "refused: trainer/1 did not drain within 7.0 s"
    assert states(world, "trainer") == {"active"}
    assert holds_all(world, "trainer")
    assert granted(world, "rollout", "trainer")


@pytest.mark.parametrize("kind", ["survey", "drain", "release"])
def test_who_does_not_answer_counts_with_all_its_memory_until_it_does(world: World, kind: CommandKind) -> None:
    stop_at(world, kind, "trainer/1")
    assert not answer(world, "rollout", "trainer").granted
    refused = answer(world, "trainer", "rollout")
    assert not refused.granted
    assert "trainer/1 does not answer (asked for" in refused.reason
    full = answer(world, "rollout", "trainer")
    assert not full.granted
    assert "short on gpu-b, held by trainer/1 optimizer 240 MiB (silent)" in full.reason
    world.cont("trainer/1")
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
    assert world.live["trainer/0"].tenant.state == "quiet"
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


@pytest.mark.parametrize(("late_s", "is_granted"), [(0.7, True), (3.0, False)])
def test_once_nothing_else_can_leave_a_shortage_is_waited_for_a_second(
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

    def always_full(process: Process, tags: Collection[Tag]) -> None:
        if process is engine:
            raise MemoryFault("out of device memory")
        come(process, tags)

    monkeypatch.setattr(world, "come", always_full)
    reply = answer(world, "rollout", "trainer")
    assert not reply.granted
    assert "rollout/1 refused to restore: out of device memory" in reply.reason
    assert states(world, "trainer") == {"active"}, "it has its memory back, and goes on"
    assert {"fallback_restore", "fallback_commit"} <= set(reply.seconds)
    assert holds_all(world, "trainer")


def test_after_a_death_on_several_devices_a_lease_waits_until_each_is_measured_free(make_world: MakeWorld) -> None:
    world = make_world(2, SPANNING)
    granted(world, "trainer", "rollout")
    granted(world, "rollout", "trainer")
    process = world.kill("rollout/0", frees=False)
    assert process is not None
    process.freed.add("gpu-b")
    asked = world.lease("trainer", ALL["trainer"], (), True, 30.0)
    world.advance(5.0)
    assert asked not in world.answers, "gpu-a is not free"
    process.freed.add("gpu-a")
    world.advance(5.0)
    assert world.answers[asked].granted


def test_a_lease_that_the_dead_leave_no_room_for_is_refused_with_the_numbers(make_world: MakeWorld) -> None:
    world = make_world(2)
    granted(world, "trainer")
    granted(world, "rollout", "trainer")
    world.kill("rollout/1", frees=False)
    reply = answer(world, "trainer")
    assert not reply.granted
    assert "short on gpu-b, held by" in reply.reason and "595 MiB by unregistered processes" in reply.reason


def test_a_death_that_was_just_noticed_delays_no_lease(make_world: MakeWorld) -> None:
    world = make_world(5)
    world.strangers["gpu-b"] = 20 * MIB
    granted(world, "trainer")
    granted(world, "rollout", "trainer")
    process = world.kill("rollout/1")
    assert process is not None
    process.freed.update(process.devices)
    world.advance(0.2)
    world.spawn_tenant("rollout/1")
    world.advance(0.2)
    assert granted(world, "rollout", "trainer")


def test_a_new_manager_obeys_the_tenants_and_no_command_of_its_predecessor(world: World) -> None:
    """It uses no epoch that its predecessor can have used; a command that arrives late is refused."""
    epoch = world.leases.epoch
    stop_at(world, "drain", "trainer/1")
    world.lease("rollout", ALL["rollout"], ("trainer",), True, 30.0)
    world.advance(0.5)
    world.restart_manager()
    world.advance(1.0)
    assert not world.answers.keys() & world.requests.keys()
    assert world.leases.epoch > epoch + (1 << 31)
    world.cont("trainer/1")
    world.advance(20.0)
    assert not world.requests
    assert list(world.answers.values())[-1].granted, list(world.answers.values())[-1].reason
    assert granted(world, "trainer", "rollout")


def test_a_new_manager_grants_nothing_before_each_tenant_that_is_there_answers(world: World) -> None:
    stop_at(world, "restore", "rollout/1")
    world.lease("rollout", ALL["rollout"], (), True, 60.0)
    world.advance(1)
    world.requests.clear()
    world.restart_manager()
    reply = answer(world, "trainer")
    assert (reply.granted, reply.reason) == (False, "refused: rollout/1 did not report")
    world.cont("rollout/1")  # and it carries out what the first manager told it
    world.advance(5)
    assert granted(world, "trainer")
    assert granted(world, "rollout")


def test_an_engine_over_several_devices_leaves_and_returns_by_one_command_each(make_world: MakeWorld) -> None:
    world = make_world(3, SPANNING)
    granted(world, "rollout", "trainer")
    for _ in range(2):
        granted(world, "trainer", "rollout")
        assert all(world.live["rollout/0"].used(device) == RESIDUE + 160 * MIB for device in ("gpu-a", "gpu-b"))
        granted(world, "rollout", "trainer")
    kinds = [kind for kind, _ in world.live["rollout/0"].executed]
    assert kinds.count("drain") == kinds.count("release") == 2
    assert kinds.count("restore") == kinds.count("commit") == 3


def test_a_lease_that_is_there_already_disturbs_nobody(world: World) -> None:
    reply = answer(world, "trainer", "rollout", 1.0)
    assert (reply.granted, reply.seconds) == (True, {})
    assert all(p.executed[-1][0] == "survey" for p in world.live.values())


def test_a_gang_of_which_only_some_can_release_communicators_is_refused_by_name(world: World) -> None:
    """They would wait for each other in vain."""
    odd = world.live["trainer/1"]
    odd.tenant.loaded((odd,))
    reply = answer(world, "trainer", "rollout", 1.0)
    assert not reply.granted
    assert "trainer/0 can release communicators and trainer/1 cannot" in reply.reason
    assert 'memory.communicators = "keep"' in reply.reason


def test_leases_of_one_device_are_served_in_order(world: World) -> None:
    world.weather.slow_s = 1.0
    names = [world.lease(g, ALL[g], (q,), True, 60.0) for g, q in [("rollout", "trainer"), ("trainer", "rollout")] * 3]
    world.advance(60.0)
    assert [name for name in world.answers if name in names] == names
    assert all(world.answers[name].granted for name in names)
    epochs = [world.answers[name].epoch for name in names]
    assert epochs == sorted(set(epochs))


def test_devices_that_give_no_reading_are_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "measure", lambda _: asyncio.sleep(3600.0))
    assert "gpu-b could not be measured in time" in answer(world, "rollout", "trainer").reason


def test_a_lease_that_waits_too_long_says_behind_whom(world: World) -> None:
    world.weather.slow_s = 30.0
    world.lease("rollout", ALL["rollout"], ("trainer",), True, 60.0)
    late = world.lease("trainer", ALL["trainer"], ("rollout",), True, 1.0)
    world.advance(1.5)
    assert not world.answers[late].granted
    assert "waited 1.0 s for its turn behind rollout: weights, kv_cache, cuda_graph" in world.answers[late].reason
