"""One rank of the communicators' benchmark; started by memory_communicators.py.

    python memory_comm_rank.py STAGE OUT RANK NUM_RANKS PORT DEVICE [key=value ...]

Writes OUT/<stage>.<rank>.json. What is measured is told in the parent.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from myxa.core.errors import MemoryFault
from myxa.memory.communicators.reload import ReloadComms

torch_dist: Any = dist
TIMEOUT_S = 60.0
CHANGE_S = 30.0
"""For a release or a restore: less than what ends a rank that stands still, for it says which group it is."""
MIB = 1 << 20


class Rank:
    """This process: its device, its gang, what it found."""

    def __init__(
        self, stage: str, out: Path, rank: int, num_ranks: int, port: int, device: str, **options: str
    ) -> None:
        self.stage, self.out, self.rank, self.num_ranks = stage, out, rank, num_ranks
        self.options = options
        self.is_cuda = device == "cuda"
        self.device = torch.device("cuda", rank) if self.is_cuda else torch.device("cpu")
        self.native = "nccl" if self.is_cuda else "gloo"
        self.found: dict[str, Any] = {}
        if self.is_cuda:
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
        wait = timedelta(seconds=TIMEOUT_S)
        self.store = torch_dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=wait)
        self._number = 0

    def join(self, backend: str) -> None:
        store = PrefixStore("torch", self.store)
        wait = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.num_ranks, timeout=wait)

    def free(self) -> int:
        """Bytes free on the device, once everything submitted is done; 0 without one."""
        if not self.is_cuda:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def reach(self, point: str) -> None:
        """Everybody, and the numbers of it are the store's."""
        self._number += 1
        key = f"{point}.{self._number}"
        self.store.set(f"{key}/{self.rank}", "1")
        self.store.wait([f"{key}/{rank}" for rank in range(self.num_ranks)], timedelta(seconds=TIMEOUT_S))

    def keep(self, **facts: Any) -> None:
        self.found |= facts
        draft = self.out / f"{self.stage}.{self.rank}.partial"
        draft.write_text(json.dumps(self.found))
        draft.replace(self.out / f"{self.stage}.{self.rank}.json")

    def number(self, name: str, default: float) -> float:
        return float(self.options.get(name, default))

    def goes_on(self, cycle: int, until: float) -> bool:
        """Whether there is another cycle: rank 0's clock says, for all."""
        self.reach("cycle")
        if self.rank == 0:
            self.store.set(f"go on {cycle}", "1" if time.monotonic() < until or cycle < 3 else "0")
        return self.store.get(f"go on {cycle}") == b"1"

    def step(self, what: str) -> None:
        """Into the log: the last line of one that stands still says in what. It ends by itself, with its stacks."""
        print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)
        faulthandler.dump_traceback_later(self.number("hangs", 45.0), exit=True)


def counts() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def group_set(num_ranks: int) -> list[list[int]]:
    """Overlapping lists of ranks, as Megatron would make them: with WORLD every rank is in twelve groups."""
    everyone = list(range(num_ranks))
    if num_ranks == 2:
        return [*[everyone] * 10, [0], [1]]
    halves, across, corners = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]
    return [*halves, *across, everyone, *corners, everyone, *halves, everyone, *across, everyone, *halves, everyone]


def make_groups(me: Rank, lists: list[list[int]]) -> list[Any]:
    made = [(ranks, dist.new_group(ranks)) for ranks in lists]
    return [group for ranks, group in made if me.rank in ranks]


def use(me: Rank, group: Any, number: float) -> None:
    """An all-reduce whose sum is known."""
    size = dist.get_world_size(group)
    value = torch.full((MIB,), number + dist.get_rank(group), device=me.device)
    dist.all_reduce(value, group=group)
    expected = number * size + size * (size - 1) / 2
    assert float(value[0]) == float(value[-1]) == expected, (number, float(value[0]), expected)


def swap_in_ring(me: Rank) -> None:
    """A batch of a send and a receive, as a pipeline does."""
    out, came = torch.full((1024,), float(me.rank), device=me.device), torch.zeros(1024, device=me.device)
    after, before = (me.rank + 1) % me.num_ranks, (me.rank - 1) % me.num_ranks
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, came, before)]):
        work.wait()
    assert float(came[0]) == before


def bus_gb_s(me: Rank, group: Any = None, num_bytes: int = 256 * MIB) -> float:
    """Bus bandwidth of an all-reduce."""
    num_bytes = num_bytes if me.is_cuda else MIB
    value = torch.ones(num_bytes // 4, device=me.device)
    for _ in range(3):
        dist.all_reduce(value, group=group)
    me.free()
    started = time.perf_counter()
    for _ in range(8):
        dist.all_reduce(value, group=group)
        value.fill_(1.0)
    if me.is_cuda:
        torch.cuda.synchronize()
    size = dist.get_world_size(group)
    return 8 * num_bytes * 2 * (size - 1) / size / (time.perf_counter() - started) / 1e9


# -- stages ------------------------------------------------------------------------------------------------------------


def sizes(me: Rank) -> None:
    """Bytes of 1 .. n communicators, by what is free before and after the first use of each; of a lonely one."""
    me.join(me.native)
    everyone = list(range(me.num_ranks))
    groups = [None, *(dist.new_group(everyone) for _ in range(int(me.number("groups", 12)) - 1))]
    lonely = make_groups(me, [[rank] for rank in everyone])[0]
    taken: list[int] = []
    seconds: list[float] = []
    for group in groups:
        me.reach("next")
        before = me.free()
        started = time.perf_counter()
        use(me, group, 1.0)
        if me.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        taken.append(before - me.free())
        me.keep(taken=taken, seconds=seconds)
    before = me.free()
    use(me, lonely, 1.0)
    me.keep(lonely=before - me.free(), bus_gb_s=bus_gb_s(me))
    me.reach("ended")


def reload(me: Rank) -> None:
    """Release and restore of all groups by the proxy, many times."""
    comms = ReloadComms(first_op_timeout_s=TIMEOUT_S)
    comms.register()
    bare = me.free()
    me.step("join")
    me.join(f"myxa_{me.native}")
    use(me, None, 1.0)
    comms.release(1, CHANGE_S)
    at_start = me.free()
    me.keep(loaded_once=bare - at_start)
    comms.restore(2, CHANGE_S)
    me.step("groups")
    groups = [None, *make_groups(me, group_set(me.num_ranks))]
    for group in groups:
        use(me, group, 1.0)
    swap_in_ring(me)
    me.keep(num_groups=len(groups), held=at_start - me.free(), bus_before=bus_gb_s(me))
    names = [group.group_name for group in groups[1:]]
    cycles: dict[str, list[float]] = {"release": [], "restore": [], "first": []}
    seen: list[tuple[int, int, int]] = []
    freed: list[int] = []
    until = time.monotonic() + me.number("seconds", 60.0)
    for cycle in range(int(me.number("cycles", 50))):
        me.step(f"cycle {cycle}: the others")
        if not me.goes_on(cycle, until):
            break
        me.step(f"cycle {cycle}: release")
        before = me.free()
        started = time.perf_counter()
        comms.release(2 * cycle + 3, CHANGE_S)
        released = time.perf_counter()
        freed.append(me.free() - before)
        if cycle == 0:
            me.reach("measured away")
            me.store.wait(["parent measured"], timedelta(seconds=TIMEOUT_S))
        me.step(f"cycle {cycle}: restore")
        resumed = time.perf_counter()
        comms.restore(2 * cycle + 4, CHANGE_S)
        me.step(f"cycle {cycle}: use")
        restored = time.perf_counter()
        for group in groups:
            use(me, group, float(cycle))
        swap_in_ring(me)
        if me.is_cuda:
            torch.cuda.synchronize()
        cycles["first"].append(time.perf_counter() - restored)
        cycles["release"].append(released - started)
        cycles["restore"].append(restored - resumed)
        seen.append((*counts(), me.free()))
        assert [group.group_name for group in groups[1:]] == names
        me.keep(cycles=cycles, counts=seen, freed=freed)
    me.step("the rate after it all")
    me.keep(bus_after=bus_gb_s(me))
    me.reach("ended")
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def kill(me: Rank) -> None:
    """The last rank dies; the others have an all-reduce on the device that waits for it, and are told to release."""
    comms = ReloadComms(first_op_timeout_s=TIMEOUT_S)
    comms.register()
    at_start = me.free()
    me.step("join, and use of all groups")
    me.join(f"myxa_{me.native}")
    groups = [None, *make_groups(me, group_set(me.num_ranks))]
    for group in groups:
        use(me, group, 1.0)
    held = at_start - me.free()
    me.reach("used")
    if me.rank == me.num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    me.step("release without the dead")
    value = torch.ones(MIB, device=me.device)
    work = dist.all_reduce(value, async_op=True)
    limit_s = me.number("limit", 5.0)
    started = time.perf_counter()
    try:
        comms.release(1, limit_s)
        said = "nothing"
    except MemoryFault as error:
        said = str(error)
    told_s = time.perf_counter() - started
    me.keep(said=said, told_s=told_s, limit_s=limit_s, held=held)
    comms.abort()
    me.keep(aborted_s=time.perf_counter() - started - told_s)
    del work
    me.keep(left=at_start - me.free())
    faulthandler.cancel_dump_traceback_later()


STAGES = {"sizes": sizes, "reload": reload, "kill": kill}


def main() -> None:
    stage, out, rank, num_ranks, port, device = sys.argv[1:7]
    options = dict(word.split("=", 1) for word in sys.argv[7:])
    name = options.pop("name", stage)
    me = Rank(name, Path(out), int(rank), int(num_ranks), int(port), device, **options)
    status = 0
    try:
        STAGES[stage](me)
    except Exception:  # noqa: BLE001 -- told, and by the status
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # destructors of communicators whose peers ended already may wait


if __name__ == "__main__":
    main()
