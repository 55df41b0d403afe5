"""Gangs whose groups come and go; a program for the tests.

    python comm_rank.py FOLDER WORLD SEED SCENARIO,... [SCENARIO,...]

One gang per argument, all at once; a gang goes through its scenarios one after the other. Ranks are forked, so that torch
is imported once. Each writes to FOLDER/<gang>/<rank>.json, by scenario: {"ok": ..., "error": ...} and the scenario's own
facts; one that failed is the last. FOLDER/ends.json has every rank's exit status, negative for a signal.
"""

from __future__ import annotations

import ctypes
import functools
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.memory.comm_gang import PATIENCE_S
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from myxa.core.errors import MemoryFault
from myxa.memory.communicators.reload import ReloadComms, proxied_name

torch_dist: Any = dist
"""What its stubs do not export."""
TIMEOUT_S = 30.0
PR_SET_PDEATHSIG = 1
MEGATRON_LIKE = [
    *([0, 1], [2, 3]),  # tensor
    *([0, 2], [1, 3]),  # data
    *([0, 1, 2, 3],),  # data with context, of experts
    *([0], [1], [2], [3]),  # context
    *([0, 2], [1, 3]),  # pipeline
    *([0, 2], [1, 3]),  # embedding
    *([0], [1]),  # position embedding
    *([0, 1, 2, 3],),  # tensor with data
    *([0], [1], [2], [3]),  # expert tensor
    *([0, 1], [2, 3]),  # expert
    *([0, 3], [1, 2]),  # crosswise
]


class Rank:
    """What every scenario starts from."""

    def __init__(self, folder: Path, rank: int, world_size: int, seed: int, **options: Any) -> None:
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self.facts: dict[str, Any] = {}
        self.random = torch.Generator().manual_seed(seed)
        self.store = torch_dist.FileStore(str(folder / "store"), world_size)
        self.comms = ReloadComms(**{"first_op_timeout_s": TIMEOUT_S, **options})
        self.comms.register()

    def join(self, backend: str = "myxa_gloo") -> None:
        store, wait = PrefixStore("torch", self.store), timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=wait)

    def reach(self, point: str, ranks: list[int] | None = None) -> None:
        """A barrier of the test's own."""
        ranks = list(range(self.world_size)) if ranks is None else ranks
        self.store.set(f"{point}/{self.rank}", "1")
        self.store.wait([f"{point}/{rank}" for rank in ranks], timedelta(seconds=TIMEOUT_S))

    def cycle(self, epoch: int) -> None:
        self.comms.release(epoch, TIMEOUT_S)
        self.comms.restore(epoch + 1, TIMEOUT_S)


def descriptors() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


# -- operations ----------------------------------------------------------------------------------------------------


def use(group: Any, number: float) -> list[float]:
    """Some collectives of one group; what they gave."""
    size, mine = dist.get_world_size(group), dist.get_rank(group)
    number = float(number)
    total = torch.full((3,), number * (mine + 1))
    dist.all_reduce(total, group=group)
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), number + mine), group=group)
    root = torch.full((2,), number + mine)
    dist.broadcast(root, group_src=size - 1, group=group)
    return [*total.tolist(), *torch.cat(parts).tolist(), *root.tolist()]


def expected(size: int, number: float) -> list[float]:
    total = number * size * (size + 1) / 2
    return [*[total] * 3, *(number + index for index in range(size) for _ in range(2)), *[number + size - 1] * 2]


def ring(group: Any, batched: bool) -> list[float]:
    size, mine = dist.get_world_size(group), dist.get_rank(group)
    out, came = torch.full((2,), float(mine)), torch.zeros(2)
    after, before = (mine + 1) % size, (mine - 1) % size
    if batched:
        ops = [dist.P2POp(dist.isend, out, group=group, group_peer=after)]
        ops.append(dist.P2POp(dist.irecv, came, group=group, group_peer=before))
        works = dist.batch_isend_irecv(ops)
    else:
        works = [dist.isend(out, group=group, group_dst=after), dist.irecv(came, group=group, group_src=before)]
    for work in works:
        assert work is not None
        work.wait()
    return came.tolist()


def everything(rank: int, world_size: int, group: Any, mesh: DeviceMesh) -> dict[str, Any]:
    """Every family of operations, over WORLD or `group`; values that can be compared."""
    base = torch.arange(4.0) + 10 * rank
    found: dict[str, Any] = {"use": use(None, 3.0), "ring": ring(None, False), "batch": ring(None, True)}

    found["functional all_reduce"] = funcol.wait_tensor(funcol.all_reduce(base, "sum", group)).tolist()
    found["functional all_gather"] = funcol.wait_tensor(funcol.all_gather_tensor(base, 0, group)).tolist()
    found["functional reduce_scatter"] = funcol.wait_tensor(
        funcol.reduce_scatter_tensor(base, "sum", 0, group)
    ).tolist()
    found["functional all_to_all"] = funcol.wait_tensor(
        funcol.all_to_all_single(base, [1] * world_size, [1] * world_size, group)
    ).tolist()

    scattered, gathered = torch.zeros(1), torch.zeros(4 * world_size)
    dist.reduce_scatter_tensor(scattered, base.clone(), group=group)
    dist.all_gather_into_tensor(gathered, base, group=group)
    swapped = torch.zeros(4)
    dist.all_to_all_single(swapped, base, group=group)
    found["into tensor"] = [scattered.tolist(), gathered.tolist(), swapped.tolist()]
    mine = torch.zeros(2)
    dist.scatter(mine, [torch.full((2,), float(r)) for r in range(world_size)] if rank == 0 else None, src=0)
    pile = [torch.zeros(2) for _ in range(world_size)] if rank == 0 else None
    dist.gather(mine, pile, dst=0)
    dist.reduce(mine, dst=0)
    found["roots"] = [mine.tolist(), [each.tolist() for each in pile or ()]]

    pair = [base.clone(), base.clone() * 2]
    with torch_dist._coalescing_manager(group, async_ops=True) as manager:
        for each in pair:
            dist.all_reduce(each, group=group)
    manager.wait()
    found["coalescing"] = [each.tolist() for each in pair]

    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, {"rank": rank})
    news = [{"from": rank} if rank == 1 else None]
    dist.broadcast_object_list(news, src=1)
    found["objects"] = [told, news]

    sharded = distribute_tensor(torch.arange(16.0).reshape(8, 2), mesh, [Shard(0), Replicate()])
    moved = sharded.redistribute(mesh, [Replicate(), Shard(1)])
    found["dtensor"] = [
        moved.to_local().tolist(),
        moved.full_tensor().sum().item(),
        cast(Any, sharded.sum()).full_tensor().item(),
    ]
    found["mesh"] = [use(mesh.get_group("dp"), 2.0), use(mesh.get_group("tp"), 5.0)]
    dist.barrier()
    work = dist.all_reduce(base, group=group, async_op=True)
    assert work is not None
    work.wait()
    found["async"] = base.tolist()
    return found


# -- C1 ------------------------------------------------------------------------------------------------------------


def identity(groups: list[Any]) -> list[Any]:
    """What of a group others may have kept."""
    return [
        (id(g), hash(g), g.group_name, g.group_desc, dist.get_process_group_ranks(g), dist.get_rank(g), dist.get_backend(g))
        for g in groups
    ]  # fmt: skip


def topology(me: Rank, specs: list[list[int]]) -> None:
    me.join()
    made = [dist.new_group(ranks, group_desc=f"{ranks}") for ranks in specs]
    mine = {number: g for number, (g, ranks) in enumerate(zip(made, specs, strict=True), 1) if me.rank in ranks}
    handles: list[Any] = [dist.group.WORLD, *mine.values()]
    at_start = identity(handles)
    counts: list[tuple[int, int]] = []
    for cycle in range(6):
        for place, group in {0: None, **mine}.items():
            size, number = dist.get_world_size(group), 100 * cycle + place
            assert use(group, number) == expected(size, number), (cycle, number)
        counts.append(descriptors())
        assert len(me.comms._groups) == len(me.comms.live()) == len(handles)
        me.comms.release(2 * cycle + 1, TIMEOUT_S)
        assert not me.comms.live()
        if cycle == 0:
            me.facts["dropped"] = descriptors()
        me.comms.restore(2 * cycle + 2, TIMEOUT_S)
        assert identity(handles) == at_start
    me.facts |= {"num_groups": len(handles), "counts": counts, "backend": dist.get_backend()}
    me.facts["inner"] = str(handles[0]._get_backend(torch.device("cpu")).name())
    me.reach("ended")
    dist.destroy_process_group()
    assert not me.comms._groups


# -- C2 ------------------------------------------------------------------------------------------------------------


def families(me: Rank) -> None:
    """Equal to plain gloo, before and after each reload."""
    found: list[dict[str, Any]] = []
    for backend in ("gloo", "myxa_gloo"):
        me.store = torch_dist.FileStore(str(me.folder / backend), me.world_size)
        me.join(backend)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        group = dist.new_group(list(range(me.world_size)))
        for epoch in (1, 3) if backend == "myxa_gloo" else (0,):
            found.append(everything(me.rank, me.world_size, group, mesh))
            differing = {name: (was, found[-1][name]) for name, was in found[0].items() if found[-1][name] != was}
            assert not differing, differing
            if epoch:
                me.cycle(epoch)
        me.reach(f"ended {backend}")
        dist.destroy_process_group()
    me.facts["num_families"] = len(found[0])


def with_autograd(me: Rank) -> None:
    """DDP's reducer calls from a thread that never held the GIL. The first operation builds, here a batch of sends
    between neighbours."""
    me.join()
    pair: Any = dist.new_group([0, 1] if me.rank < 2 else [2, 3], use_local_synchronization=True)
    assert not me.comms.live()
    me.cycle(1)
    assert not me.comms.live()
    assert ring(pair, True) == [float(1 - dist.get_rank(pair))] * 2
    model = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    grads: list[Any] = []
    for epoch in (3, 5):
        model.zero_grad()
        wrapped(torch.full((1, 3), float(me.rank + 1))).sum().backward()
        assert model.weight.grad is not None
        grads.append(model.weight.grad.tolist())
        me.cycle(epoch)
    assert grads[0] == grads[1] == [[2.5] * 3] * 2, grads
    me.reach("ended")
    dist.destroy_process_group()


def said(work: Callable[[], object]) -> str:
    try:
        work()
    except (MemoryFault, AttributeError) as error:
        return str(error)
    raise AssertionError("no error")


def borders(me: Rank) -> None:
    """Orders and uses that are refused."""
    me.join()
    use(None, 1.0)
    me.comms.release(1, TIMEOUT_S)
    said(lambda: use(None, 1.0))
    me.comms.restore(3, TIMEOUT_S)
    assert use(None, 5.0) == expected(me.world_size, 5.0)
    single: Any = dist.new_group([me.rank], backend="myxa_gloo", use_local_synchronization=True)
    said(lambda: single._get_backend(torch.device("cpu"))._comm_ptr())
    wait = timedelta(seconds=5)
    single._get_backend(torch.device("cpu"))._set_default_timeout(wait)
    assert use(single, 2.0) == expected(1, 2.0)
    assert single._get_backend(torch.device("cpu")).options._timeout == wait, "kept for the backend made later"
    said(lambda: dist.new_group(list(range(me.world_size)), backend="cpu:myxa_gloo,cuda:myxa_nccl"))
    if not dist.is_nccl_available():
        said(lambda: dist.new_group(list(range(me.world_size)), backend="myxa_nccl"))
    said(lambda: proxied_name("mpi"))
    assert proxied_name("nccl") == "myxa_nccl"
    me.reach("ended")
    dist.destroy_process_group()


# -- groups of one -------------------------------------------------------------------------------------------------


def lonely(group: Any) -> dict[str, Any]:
    """Every family in a group of one; new values are copies of old ones or they themselves."""
    base = torch.arange(6.0)
    found: dict[str, Any] = {}
    is_gloo = dist.get_backend(group) == "gloo"

    def note(name: str, work: Any, *outputs: torch.Tensor) -> None:
        if work is not None:
            work.wait()
            assert work.is_completed() or is_gloo  # some of gloo's own never say so
        found[name] = [each.tolist() for each in outputs]

    def blank() -> torch.Tensor:
        return torch.zeros(6)

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        value = base.clone()
        if op != dist.ReduceOp.AVG or not is_gloo:  # gloo knows no average
            note(f"all_reduce {op}", dist.all_reduce(value, op, group=group, async_op=True), value)
    future = torch_dist.all_reduce(value := base.clone(), group=group, async_op=True).get_future()
    future.wait()
    found["future"] = [each.tolist() for each in future.value()]
    leaf = torch.nn.Parameter(base.clone())
    note("broadcast", dist.broadcast(leaf.data, group_src=0, group=group, async_op=True), leaf)
    note("reduce", dist.reduce(value, group_dst=0, group=group, async_op=True), value)
    note("all_gather", dist.all_gather([a := blank()], base, group=group, async_op=True), a)
    note("all_gather_into", torch_dist.all_gather_into_tensor(a := blank(), base, group=group, async_op=True), a)
    note("reduce_scatter", dist.reduce_scatter(a := blank(), [base], group=group, async_op=True), a)
    note("reduce_scatter_tensor", torch_dist.reduce_scatter_tensor(a := blank(), base, group=group, async_op=True), a)
    note("all_to_all_single", dist.all_to_all_single(a := blank(), base, group=group, async_op=True), a)
    note("gather", dist.gather(base, [a := blank()], group_dst=0, group=group, async_op=True), a)
    note("scatter", dist.scatter(a := blank(), [base], group_src=0, group=group, async_op=True), a)
    note("barrier", dist.barrier(group=group, async_op=True))
    kinds: list[Any] = [dist.all_reduce, torch_dist.all_gather_into_tensor, torch_dist.reduce_scatter_tensor]
    for each in kinds:
        pairs = [(blank(), base + number) for number in range(2)]
        with torch_dist._coalescing_manager(group, async_ops=True) as manager:
            for output, value in pairs:
                each(*([value] if each is dist.all_reduce else [output, value]), group=group)
        manager.wait()
        outputs = [value if each is dist.all_reduce else output for output, value in pairs]
        found[f"coalesced {each.__name__}"] = [output.tolist() for output in outputs]
    found["functional"] = [
        funcol.wait_tensor(funcol.all_reduce(base, "sum", group)).tolist(),
        funcol.wait_tensor(funcol.all_gather_tensor(base, 0, group)).tolist(),
        funcol.wait_tensor(funcol.reduce_scatter_tensor(base, "sum", 0, group)).tolist(),
    ]
    dist.all_gather_object(told := [None], {"one": 1}, group=group)
    found["objects"] = told
    model = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    wrapped(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    found["ddp"] = model.weight.grad.tolist()
    return found


def premultiplied(group: Any) -> None:
    """gloo refuses it."""
    dist.all_reduce(torch.ones(2), torch_dist._make_nccl_premul_sum(2.0), group=group)


def alone(me: Rank) -> None:
    """Equal to plain gloo, and nothing was built for it."""
    found: list[dict[str, Any]] = []
    for backend in ("gloo", "myxa_gloo"):
        me.store = torch_dist.FileStore(str(me.folder / backend), me.world_size)
        me.join(backend)
        group: Any = dist.new_group([me.rank], use_local_synchronization=True)
        found.append(lonely(group))
        if backend == "myxa_gloo":
            assert not me.comms.live(), "an operation of one member built a backend"
            me.cycle(1)
            assert lonely(group) == found[-1]
            fault(functools.partial(premultiplied, group))
            assert len(me.comms.live()) == 1, "a premultiplied sum is the library's"
        me.reach(f"ended {backend}")
        dist.destroy_process_group()
    average = found[1].pop(f"all_reduce {dist.ReduceOp.AVG}")
    assert average == [list(map(float, range(6)))]
    assert found[0] == found[1], {k: (v, found[1].get(k)) for k, v in found[0].items() if found[1].get(k) != v}
    me.facts["num_families"] = len(found[0])


# -- C3 ------------------------------------------------------------------------------------------------------------


def fault(work: Callable[[], object]) -> tuple[str, float]:
    """The error's text and how long it took."""
    started = time.monotonic()
    try:
        work()
    except (MemoryFault, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    raise AssertionError("no error")


def keeps_old_epoch(me: Rank) -> None:
    """Rank 3 never hears of the release; the others cannot go on without it, until all meet again."""
    me.join()
    trio = dist.new_group([0, 1, 2])
    use(None, 1.0)
    if me.rank == 3:
        me.reach("given up", [0, 1, 2])
        me.facts["old"], _ = fault(lambda: use(None, 1.0))
        me.comms.abort()
    else:
        use(trio, 1.0)
        me.facts["release"], me.facts["release_s"] = fault(lambda: me.comms.release(1, PATIENCE_S))
        assert len(me.comms.live()) == 2, "a release that failed took something away"
        me.comms.abort()
        me.facts["gate"], _ = fault(lambda: use(trio, 1.0))
        me.facts["restore"], me.facts["restore_s"] = fault(lambda: me.comms.restore(2, PATIENCE_S))
        me.reach("given up", [0, 1, 2])
    me.comms.restore(4, TIMEOUT_S)
    assert use(None, 9.0) == expected(4, 9.0)
    if me.rank < 3:
        assert use(trio, 9.0) == expected(3, 9.0)
    me.reach("ended")
    dist.destroy_process_group()


def dies_within_first_op(me: Rank) -> None:
    """Everybody was restored, then rank 3 is killed while the others wait for it in their first operation."""
    me.join()
    trio = dist.new_group([0, 1, 2])
    me.cycle(1)
    me.reach("restored")
    if me.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    assert use(trio, 4.0) == expected(3, 4.0)
    me.comms._first_op_timeout_s = PATIENCE_S
    me.facts["world"], me.facts["world_s"] = fault(lambda: use(None, 1.0))
    me.facts["again"], _ = fault(lambda: use(None, 1.0))
    me.comms.abort()
    me.reach("ended", [0, 1, 2])


def dies_in_an_operation(me: Rank) -> None:
    """Rank 3 is killed while the others wait for it in an all-reduce; abort gives everything up."""
    me.join()
    use(None, 1.0)
    me.reach("used")
    if me.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    me.facts["use"], me.facts["use_s"] = fault(lambda: use(None, 1.0))
    me.facts["release"], me.facts["release_s"] = fault(lambda: me.comms.release(1, PATIENCE_S))
    started = time.monotonic()
    me.comms.abort()
    me.facts["abort_s"] = time.monotonic() - started
    me.reach("ended", [0, 1, 2])


SCENARIOS: dict[str, tuple[Callable[[Rank], None], dict[str, Any]]] = {
    "megatron_order": (lambda me: topology(me, MEGATRON_LIKE), {}),
    "families": (families, {}),
    "with_autograd": (with_autograd, {}),
    "borders": (borders, {}),
    "alone": (alone, {"local_kinds": ("gloo",)}),
    "keeps_old_epoch": (keeps_old_epoch, {}),
    "dies_within_first_op": (dies_within_first_op, {}),
    "dies_in_an_operation": (dies_in_an_operation, {}),
}


def attempt(name: str, folder: Path, rank: int, world_size: int, seed: int) -> dict[str, Any]:
    work, options = SCENARIOS[name]
    folder.mkdir(exist_ok=True)
    try:
        me = Rank(folder, rank, world_size, seed, **options)
        work(me)
    except BaseException:
        text = io.StringIO()
        traceback.print_exc(file=text)
        return {"ok": False, "error": text.getvalue()}
    return {"ok": True, "error": "", **me.facts}


def run_rank(names: str, folder: Path, rank: int, world_size: int, seed: int) -> None:
    """Of a forked child: never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    results: dict[str, dict[str, Any]] = {}
    is_well = True
    for name in names.split(","):
        results[name] = attempt(name, folder / name, rank, world_size, seed)
        draft = folder / f"{rank}.partial"
        draft.write_text(json.dumps(results))
        draft.rename(folder / f"{rank}.json")
        is_well = results[name]["ok"]
        if not is_well:
            break
    sys.stdout.flush()
    os._exit(0 if is_well else 1)  # whatever still hangs in a collective


def main() -> None:
    folder, world_size, seed, gangs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    torch.set_num_threads(1)
    children: dict[int, tuple[str, int]] = {}
    for names in gangs:
        place = folder / names.split(",")[0]
        place.mkdir()
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                run_rank(names, place, rank, world_size, seed)
            children[pid] = (place.name, rank)
    ends: dict[str, dict[int, int]] = {}
    while children:
        pid, status = os.wait()
        name, rank = children.pop(pid)
        ends.setdefault(name, {})[rank] = os.waitstatus_to_exitcode(status)
    (folder / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
