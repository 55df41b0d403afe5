"""What leaves for a lease, and the words of what cannot be had."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.core.device_memory import (
    OPTIMIZER_PARTS,
    Backing,
    DeviceReading,
    LeaseRequest,
    Tag,
    TagPolicy,
    TagReport,
    TenantReport,
    TenantState,
)
from myxa.memory.leases.lease_ledger import (
    Candidate,
    LeaseLedger,
    Shortage,
    SwitchPlan,
    build,
    choose,
    rank_of,
)

GIB = 1 << 30


def tag(name: Tag, gib: float, policy: TagPolicy = "discard", backing: Backing = "mapped_dirty") -> TagReport:
    return TagReport(name, int(gib * GIB), policy, backing)


def tenant(name: str, gang: str, *tags: TagReport, state: TenantState = "active", device: str = "gpu") -> TenantReport:
    return TenantReport(name, 1, gang, tuple(device.split()), (1,), state, tags)


def ledger_of(*reports: TenantReport, free_gib: float | None = None) -> LeaseLedger:
    ledger = LeaseLedger(reserve_bytes=GIB, margin_bytes=0)
    for report in reports:
        ledger.add(report)
    for device in ledger.devices:
        free = 100 * GIB - ledger.held(device) if free_gib is None else int(free_gib * GIB)
        ledger.readings[device] = DeviceReading(100 * GIB, free)
    return ledger


def ask(gang: str, *tags: Tag, quiet: tuple[str, ...] = (), is_active: bool = True) -> LeaseRequest:
    return LeaseRequest(gang=gang, tags=tags, quiet=quiet, is_active=is_active, request_id="r")


TRAINER = (
    tag("grads", 30),
    tag("params", 16, "rematerialise"),
    tag("optimizer", 24.5, "backup"),
    tag("frozen", 8, "backup", "mapped_clean"),
    tag("context", 1, "keep"),
)
ENGINE = (tag("weights", 16, "discard", "discarded"), tag("kv_cache", 60, "discard", "discarded"))


def plan_of(ledger: LeaseLedger, request: LeaseRequest) -> SwitchPlan:
    plan = build(ledger, request)
    assert isinstance(plan, SwitchPlan), plan
    return plan


sizes = st.integers(1, 40)
candidates = st.lists(st.tuples(sizes, st.integers(0, 3)), max_size=9).map(
    lambda rows: [Candidate(f"t{i}", "g", "params", size, rank) for i, (size, rank) in enumerate(rows)]
)


@settings(max_examples=100, deadline=None)
@given(candidates, st.integers(-3, 200))
def test_the_choice_suffices_and_is_no_dearer_than_needed(given_: list[Candidate], short: int) -> None:
    chosen = choose(given_, short)
    total = sum(c.num_bytes for c in given_)
    if chosen is None:
        assert total < short
        return
    freed = sum(c.num_bytes for c in chosen)
    assert freed >= short
    worst = max((c.rank for c in chosen), default=None)
    if worst is not None:  # nothing dearer than needed: the cheaper classes together would not have sufficed
        assert sum(c.num_bytes for c in given_ if c.rank < worst) < short
        assert freed - min(c.num_bytes for c in chosen if c.rank == worst) < short, "no more of it than needed"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(sizes, st.sampled_from(["a", "b", "c", "a b", "b c", "a b c"])), max_size=8),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 60), min_size=1),
)
def test_what_leaves_several_devices_suffices_on_each_and_nothing_of_it_could_stay(
    tenants: list[tuple[int, str]], asked: dict[str, int]
) -> None:
    quiet = [
        tenant(f"t/{i}", "quiet", tag("params", size, "backup"), state="quiet", device=on)
        for i, (size, on) in enumerate(tenants)
    ]
    asking = [
        tenant(f"x/{on}", "x", tag("weights", size, "discard", "discarded"), state="quiet", device=on)
        for on, size in asked.items()
    ]
    ledger = ledger_of(*quiet, *asking)
    ledger.readings = dict.fromkeys(ledger.devices, DeviceReading(1000 * GIB, 0))
    plan = build(ledger, ask("x", "weights"))
    there = {on: [size for size, devices in tenants if on in devices.split()] for on in asked}
    if isinstance(plan, Shortage):
        assert any(sum(there[on]) < size for on, size in asked.items())
        return
    left = [tenants[int(name.removeprefix("t/"))] for name in plan.release]

    def suffices(rows: list[tuple[int, str]]) -> bool:
        return all(sum(n for n, devices in rows if on in devices.split()) >= size for on, size in asked.items())

    assert suffices(left)
    assert not any(suffices(left[:i] + left[i + 1 :]) for i in range(len(left)))


def test_the_order_is_discard_clean_rematerialise_streamed_backup() -> None:
    masters = tag("masters", 8, "backup")
    ranks = [rank_of(each) for each in (TRAINER[0], TRAINER[3], TRAINER[1], TRAINER[2], masters)]
    assert ranks == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("tags", "leaves"),
    [
        (("weights",), set()),  # 79.5 held, 19.5 free but for the reserve
        (("weights", "kv_cache"), {"grads", "frozen", "optimizer"}),  # 56.5 short: 62.5 leave, params and context stay
    ],
)
def test_a_lease_takes_no_more_than_it_needs(tags: tuple[Tag, ...], leaves: set[str]) -> None:
    ledger = ledger_of(tenant("trainer/0", "trainer", *TRAINER), tenant("rollout/0", "rollout", *ENGINE, state="quiet"))
    plan = plan_of(ledger, ask("rollout", *tags, quiet=("trainer",)))
    assert {t for names in plan.release.values() for t in names} == leaves
    assert plan.drain == ("trainer/0",)
    assert plan.commit == ("rollout/0",)


@pytest.mark.parametrize(
    ("wanted", "others", "num_parts"),
    [
        (55, set(), 0),  # 44 of 100 held, 1 never promised
        (75, {"grads"}, 0),
        (78, {"grads"}, 2),
        (91, {"grads"}, 8),
        (92, {"grads", "masters"}, 5),
    ],
)
def test_of_an_optimizer_in_parts_as_many_leave_as_are_needed(wanted: int, others: set[str], num_parts: int) -> None:
    parts = [tag(part, 2, "backup") for part in OPTIMIZER_PARTS]
    trainer = tenant("trainer/0", "trainer", tag("grads", 20), tag("masters", 8, "backup"), *parts)
    engine = tenant("rollout/0", "rollout", tag("kv_cache", wanted, "discard", "discarded"), state="quiet")
    plan = plan_of(ledger_of(trainer, engine), ask("rollout", "kv_cache", quiet=("trainer",)))
    left = set(plan.release.get("trainer/0", ()))
    assert left - set(OPTIMIZER_PARTS) == others
    assert len(left & set(OPTIMIZER_PARTS)) == num_parts


@pytest.mark.parametrize(("wanted", "leaves"), [(84, {"workspace"}), (88, {"workspace", "grads"})])
def test_room_that_was_not_taken_yet_frees_nothing_when_it_leaves(wanted: int, leaves: set[Tag]) -> None:
    tags = (tag("grads", 10), tag("workspace", 24))
    trainer = TenantReport("trainer/0", 1, "trainer", ("gpu",), (1,), "active", tags, reserved_bytes=4 * GIB)
    engine = tenant("rollout/0", "rollout", tag("kv_cache", wanted, "discard", "discarded"), state="quiet")
    # Of 100 GiB strangers have 5 and the trainer 30: 85 are free once its room has left, 95 without its gradients.
    plan = plan_of(ledger_of(trainer, engine, free_gib=65), ask("rollout", "kv_cache"))
    assert set(plan.release["trainer/0"]) == leaves


def test_parts_are_one_holder() -> None:
    parts = [tag(part, 2, "backup") for part in OPTIMIZER_PARTS]
    ledger = ledger_of(tenant("trainer/0", "trainer", *parts))
    assert ledger.short_words("gpu", GIB).endswith("held by trainer/0 optimizer 16.0 GiB (active)")


def test_communicators_leave_on_all_members_or_on_none() -> None:
    members = [
        tenant(f"trainer/{i}", "trainer", tag("nccl", 4, "rematerialise"), tag("grads", 30), device=f"gpu{i}")
        for i in range(2)
    ]
    engine = tenant("rollout/0", "rollout", tag("kv_cache", 98, "discard", "discarded"), device="gpu0", state="quiet")
    ledger = ledger_of(*members, engine)
    plan = plan_of(ledger, ask("rollout", "kv_cache", quiet=("trainer",)))
    assert plan.release == {"trainer/0": ("nccl", "grads"), "trainer/1": ("nccl",)}
    assert plan.drain == ("trainer/0", "trainer/1")
    ledger.tenants["trainer/1"].silent = "does not answer"
    assert isinstance(build(ledger, ask("rollout", "kv_cache")), Shortage)


def test_a_refusal_says_how_much_is_short_and_who_holds_it() -> None:
    trainer = tenant("trainer/0", "trainer", tag("optimizer", 40, "keep"), tag("grads", 30))
    ghost = tenant("ghost/0", "ghost", *(tag(part, 1, "keep") for part in OPTIMIZER_PARTS), state="active")
    engine = tenant("rollout/0", "rollout", tag("kv_cache", 70, "discard", "discarded"), state="quiet")
    ledger = ledger_of(trainer, ghost, engine, free_gib=20.5)
    refused = build(ledger, ask("rollout", "kv_cache", quiet=("trainer",)))
    assert isinstance(refused, Shortage)
    assert refused.reason == (
        "refused: 19.5 GiB short on gpu, held by trainer/0 optimizer 40.0 GiB (active), trainer/0 grads 30.0 GiB (active), "
        "ghost/0 optimizer 8.0 GiB (active), 1.5 GiB by unregistered processes"
    )


def test_lost_contents_are_not_leased() -> None:
    ledger = ledger_of(tenant("t/0", "t", tag("optimizer", 1, "backup", "poisoned"), state="quiet"))
    refused = build(ledger, ask("t", "optimizer"))
    assert isinstance(refused, Shortage)
    assert "t/0 lost the contents of optimizer" in refused.reason


def test_what_the_driver_keeps_for_itself_is_held_by_somebody() -> None:
    ledger = ledger_of(tenant("trainer/0", "trainer", *TRAINER), free_gib=19.0)
    stranger = 100 * GIB - 19 * GIB - ledger.held("gpu")
    assert ledger.unattributed("gpu") == stranger == int(1.5 * GIB)
    ledger.readings["gpu"] = DeviceReading(100 * GIB, 19 * GIB, driver_bytes=GIB)
    assert ledger.unattributed("gpu") == stranger - GIB
    assert ledger.short_words("gpu", GIB).endswith(", 512 MiB by unregistered processes")
