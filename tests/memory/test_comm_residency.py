"""The parts of communicators that leave and return: epochs, meeting, work with a deadline, the build; a gang of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from myxa.actors.backends.torch_backend.world import Gang
from myxa.core.clock import SystemClock
from myxa.core.config.run import MemorySettings
from myxa.core.errors import ConfigError, MemoryFault
from myxa.launch.composition import trainer_parts
from myxa.memory.communicators import reload
from myxa.memory.communicators.reload import Overrun, ReloadComms, all_at_once, built_proxy, within
from myxa.memory.communicators.residency import Absent, MembershipCheck

torch_dist: Any = dist
WAIT_S = 20.0


@pytest.fixture
def alone() -> Iterator[tuple[ReloadComms, Callable[[], None]]]:
    """A gang of one in this process, over gloo, and a use of both its groups."""
    comms = ReloadComms()
    comms.register()
    wait = timedelta(seconds=WAIT_S)
    dist.init_process_group("myxa_gloo", store=torch_dist.HashStore(), rank=0, world_size=1, timeout=wait)
    group = dist.new_group([0])

    def use() -> None:
        for each in (None, group):
            dist.all_reduce(value := torch.ones(2), group=each)
            assert value.tolist() == [1.0, 1.0]

    use()
    yield comms, use
    dist.destroy_process_group()


def test_released_groups_return_and_an_order_that_was_carried_out_changes_nothing(
    alone: tuple[ReloadComms, Callable[[], None]],
):
    comms, use = alone
    comms.restore(1, WAIT_S)
    assert len(comms.live()) == 2, "nothing was released"
    for epoch in (2, 4, 6):
        for _ in range(2):
            comms.release(epoch, WAIT_S)
            assert not comms.live()
        with pytest.raises((RuntimeError, MemoryFault)):
            use()
        for _ in range(2):
            comms.restore(epoch, WAIT_S)
            assert len(comms.live()) == 2
        use()
    comms.abort()
    assert not comms.live()


def test_members_count_on_one_that_arrived_and_leave_no_keys_behind():
    """Two ranks of a group sent to each other first: a later collective of all must not wait for them. A switch every
    minute for a month must not fill the store."""
    store, clock = torch_dist.HashStore(), SystemClock()
    both = [MembershipCheck(store, rank, clock) for rank in range(2)]
    both[0].arrive("epoch 3")
    both[1].meet("epoch 3", (0, 1), clock.monotonic() + WAIT_S)
    with pytest.raises(Absent) as absent:
        both[1].meet("epoch 4", (0, 1), clock.monotonic() + 0.05)
    assert absent.value.ranks == (0,)
    for point in range(20):

        def meet(each: MembershipCheck, point: int = point) -> None:
            each.meet(f"point {point}", (0, 1), clock.monotonic() + WAIT_S, "word")

        all_at_once(both, meet, 2)
    assert store.num_keys() <= 5


def test_all_at_once_raises_the_first_error_after_the_last_end():
    seen: list[int] = []

    def work(item: int) -> None:
        seen.append(item)
        if item == 2:
            raise ValueError("two")

    with pytest.raises(ValueError, match="two"):
        all_at_once(range(6), work, 3)
    assert sorted(seen) == list(range(6))
    all_at_once([], work, 3)


def test_work_that_hangs_is_left_at_its_deadline():
    hangs = threading.Event()
    with pytest.raises(Overrun, match="drop of group 7"):
        within(0.05, lambda: "drop of group 7", lambda: hangs.wait())
    hangs.set()


@pytest.mark.parametrize(
    ("setting", "on_gpus", "lacking", "backend"),
    [
        ("auto", True, "", "myxa_nccl"),
        ("auto", True, "no compiler", ""),
        ("auto", False, "", ""),
        ("keep", True, "", ""),
        ("reload", False, "", "myxa_gloo"),
        ("reload", True, "no compiler", ConfigError),
    ],
)
def test_communicators_are_reloaded_where_that_can_be_had(
    setting: str, on_gpus: bool, lacking: str, backend: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer_parts, "missing_for_build", lambda: lacking)
    memory = MemorySettings.model_validate({"share": "switch", "communicators": setting})
    config: Any = type("Config", (), {"memory": memory})
    gang = Gang(rank=0, world_size=2)
    if backend is ConfigError:
        with pytest.raises(ConfigError, match=lacking):
            trainer_parts.gang_comms(config, gang, on_gpus=on_gpus)
        return
    chosen, make = trainer_parts.gang_comms(config, gang, on_gpus=on_gpus)
    assert chosen.backend == (backend or gang.backend)
    assert (make is not None) == bool(backend)


def test_a_build_is_keyed_by_torch_and_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as bare:
        bare.setenv("PATH", str(tmp_path))
        with pytest.raises(MemoryFault, match=r"no C\+\+ compiler \(c\+\+, .*memory.communicators"):
            built_proxy(tmp_path)
    asked: list[Any] = []
    monkeypatch.setattr(reload.native, "built", lambda *_, facts, **__: asked.append(facts))
    built_proxy(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    built_proxy(tmp_path)
    assert asked[0][1:] == asked[1][1:]
    assert asked[0] != asked[1]
