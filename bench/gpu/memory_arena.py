"""Our arena on one device: how fast tags leave and return, whether every bit of them does, and what stays behind.

A stage of memory_rates.py (and of memory_gang.py, which runs one on every GPU at once). The rate of a plain pinned copy
is taken in the same process just before. Contents are compared by a hash that is taken on the device.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from memory_device import (
    Opened,
    bytes_at,
    device_bytes,
    fill,
    hashes,
    open_arena,
    settled_used,
    within,
)
from memory_figures import GIB, MIB
from memory_raw import PlainCopies, synchronise
from memory_stages import await_go, leave

from myxa.core.device_memory import Tag

SETTLED = 3
"""Cycles before leaks are looked for."""


class Block:
    """One allocation of a tag."""

    def __init__(self, opened: Opened, tag: Tag, num_bytes: int, seed: int) -> None:
        self.tag = tag
        self.address = opened.arena.empty(tag, num_bytes)
        self.view = bytes_at(self.address, num_bytes, opened.device)
        self.write(seed)

    def write(self, seed: int) -> None:
        fill(self.view, seed)

    def hashes(self) -> list[int]:
        return hashes(self.view)


# -- how fast ----------------------------------------------------------------------------------------------------------


def moves(opened: Opened, tag: Tag, *, most: int, limit_s: float, dirty: bool) -> dict[str, Any]:
    """Seconds of release and restore, cycle by cycle, the first one first, and of the mapping at the beginning of a
    restore; bytes that were copied."""
    found: dict[str, Any] = {"out": [], "in": [], "map": [], "copied": []}
    driver: Any = opened.driver
    spent: list[float] = []

    def timed(call: Any) -> Any:
        def run(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments)
            spent.append(time.perf_counter() - started)
            return result

        return run

    driver.create, driver.map = timed(driver.create), timed(driver.map)
    for _ in within(limit_s, most, least=3):
        if dirty:
            opened.arena.mark_dirty(tag)
        synchronise(opened.device)
        started = time.perf_counter()
        moved = opened.arena.release({tag})
        found["out"].append(time.perf_counter() - started)
        found["copied"].append(moved)
        spent.clear()
        started = time.perf_counter()
        opened.arena.restore({tag})
        found["in"].append(time.perf_counter() - started)
        found["map"].append(sum(spent))
    del driver.create, driver.map
    return found


def rates(opened: Opened, options: argparse.Namespace) -> dict[str, Any]:
    """A dirty tag, the same while it is clean, and one that is discarded."""
    plain = PlainCopies(options.device, options.plain_bytes)
    opened.arena.tag("optimizer", "backup")
    block = Block(opened, "optimizer", options.num_bytes, seed=1)
    before = block.hashes()
    found: dict[str, Any] = {
        "num_bytes": options.num_bytes,
        "plain": {name: plain.rate(options.plain_bytes, is_out=name == "out") for name in ("out", "in")},
    }
    found["dirty"] = moves(opened, "optimizer", most=options.cycles, limit_s=options.limit, dirty=True)
    found["clean"] = moves(opened, "optimizer", most=5, limit_s=5.0, dirty=False)
    found["is_equal"] = block.hashes() == before
    opened.arena.free(block.address)
    del block, plain
    opened.arena.tag("kv_cache", "discard")
    address = opened.arena.empty("kv_cache", options.discard_bytes)
    found["discard"] = moves(opened, "kv_cache", most=5, limit_s=10.0, dirty=False)
    found["discard_bytes"] = options.discard_bytes
    opened.arena.free(address)
    return found


# -- whether every bit -------------------------------------------------------------------------------------------------


def holdings(options: argparse.Namespace) -> dict[str, int]:
    """What could leak; the device as its driver tells everybody."""
    gc.collect()
    own = psutil.Process()
    found = {"host_bytes": own.memory_info().rss, "fds": own.num_fds(), "threads": own.num_threads()}
    return found | ({"device_bytes": settled_used(options.ordinal)} if options.device == "cuda" else {})


def exactness(opened: Opened, options: argparse.Namespace) -> dict[str, Any]:
    """Cycles over tags of all policies with odd sizes; contents change in every other cycle, so that old copies would
    show."""
    arena, whole = opened.arena, options.exact_bytes
    odd = whole // 3 // 8 * 8 + 8
    arena.tag("frozen", "backup")
    arena.tag("grads", "discard")
    blocks = [Block(opened, "optimizer", size, seed) for seed, size in enumerate((whole // 2, odd, 8 * 1001))]
    blocks.append(Block(opened, "frozen", odd, seed=99))
    grads = Block(opened, "grads", odd, seed=7)
    addresses = [block.address for block in blocks]
    tags: tuple[Tag, ...] = ("optimizer", "frozen", "grads")
    num_wrong = num_unzeroed = num_cycles = 0
    started = time.monotonic()
    held: dict[str, int] = {}
    for cycle in within(options.exact_limit, options.exact_cycles, least=SETTLED + 2):
        if cycle == SETTLED:
            held = holdings(options)
        if cycle % 2 == 0:
            blocks[cycle // 2 % 3].write(1000 + cycle)
            arena.mark_dirty("optimizer")
        before = [block.hashes() for block in blocks]
        arena.release(tags)
        arena.restore(tags)
        num_wrong += before != [block.hashes() for block in blocks]
        num_unzeroed += bool(grads.view.any())
        grads.write(cycle)
        num_cycles += 1
    found = {
        "cycles": num_cycles, "wrong": num_wrong, "unzeroed": num_unzeroed, "seconds": time.monotonic() - started,
        "drift": {name: now - held[name] for name, now in holdings(options).items()},
        "moved_pointers": sum(block.address != address for block, address in zip(blocks, addresses, strict=True)),
    }  # fmt: skip
    for block in (*blocks, grads):
        arena.free(block.address)
    return found


def graph(opened: Opened, options: argparse.Namespace) -> dict[str, Any]:
    """A CUDA graph over tensors of the arena, replayed before and after they left; on a CPU the same products plainly.
    The products' results are compared bit by bit with those before."""
    arena, size = opened.arena, options.matrix
    item = torch.bfloat16
    num_bytes = size * size * item.itemsize
    places = {name: arena.empty("optimizer", num_bytes) for name in ("a", "b", "c")}
    a, b, c = (bytes_at(places[name], num_bytes, opened.device).view(item).view(size, size) for name in places)
    generator = torch.Generator(device=a.device)
    generator.manual_seed(5)
    for matrix in (a, b):
        matrix.copy_(torch.randn(size, size, generator=generator, device=a.device, dtype=torch.float32))

    def work() -> None:
        torch.mm(a, b, out=c)
        c.add_(a)

    replay: Callable[[], object] = work
    if opened.device == "cuda":
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        replay = captured.replay
    replay()
    synchronise(opened.device)
    before = hashes(c.view(-1).view(torch.int64))
    num_wrong = 0
    for _ in range(options.graph_cycles):
        c.zero_()
        arena.mark_dirty("optimizer")
        synchronise(opened.device)
        arena.release({"optimizer"})
        arena.restore({"optimizer"})
        replay()
        synchronise(opened.device)
        num_wrong += hashes(c.view(-1).view(torch.int64)) != before
    for address in places.values():
        arena.free(address)
    return {"cycles": options.graph_cycles, "wrong": num_wrong, "captured": opened.device == "cuda"}


# -- what stays --------------------------------------------------------------------------------------------------------


def residue(opened: Opened, options: argparse.Namespace, used_at_start: int) -> dict[str, Any]:
    """Bytes of the device that stay with this process when every tag has left: context, modules, workspaces of cuBLAS.
    Then a tag returns: what the device lost against what the arena says it holds is unaccounted."""
    arena = opened.arena
    place = arena.empty("optimizer", options.exact_bytes)
    arena.mark_dirty("optimizer")
    arena.release({"optimizer"})
    gc.collect()
    if options.device == "cpu":
        arena.restore({"optimizer"})
        arena.free(place)
        return {}
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    without = settled_used()
    arena.restore({"optimizer"})
    torch.cuda.synchronize()
    told = sum(report.num_bytes for report in arena.report() if report.backing in ("mapped_dirty", "mapped_clean"))
    with_it = settled_used()
    arena.free(place)
    return {
        "residue": without - used_at_start,
        "torch_reserved": torch.cuda.memory_reserved(),
        "unaccounted": abs(with_it - without - told),
        "driver_free_agrees_to": abs(opened.driver.free_bytes() - (device_bytes()[1] - device_bytes()[0])),
    }


# -- the stage ---------------------------------------------------------------------------------------------------------


def together(opened: Opened, options: argparse.Namespace) -> dict[str, Any]:
    """For a gang: the same tag out and in, alone and then at the same time as the others."""
    plain = PlainCopies(options.device, options.plain_bytes)
    opened.arena.tag("optimizer", "backup")
    block = Block(opened, "optimizer", options.num_bytes, seed=1)
    before = block.hashes()
    found: dict[str, Any] = {"num_bytes": options.num_bytes}
    while (told := await_go()) != "end":
        rate = {name: plain.rate(options.plain_bytes, is_out=name == "out") for name in ("out", "in")}
        found[told] = {
            "plain": rate,
            **moves(opened, "optimizer", most=options.cycles, limit_s=options.limit, dirty=True),
        }
    found["is_equal"] = block.hashes() == before
    opened.arena.free(block.address)
    found["exact"] = exactness(opened, options)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    is_cuda = options.device == "cuda"
    used_at_start = device_bytes(options.ordinal)[0] if is_cuda else 0
    if is_cuda:
        torch.cuda.set_device(options.ordinal)
        torch.zeros(1, device="cuda")
    opened = open_arena(
        options.device, capacity_bytes=4 * (options.num_bytes + options.discard_bytes), ordinal=options.ordinal,
        pool_bytes=max(options.num_bytes, 2 * options.exact_bytes) + 64 * MIB, chunk_bytes=options.chunk_bytes,
    )  # fmt: skip
    found: dict[str, Any] = {"pool_s": opened.pool_s, "pool_bytes": opened.pool.limit_bytes}
    if options.together:
        found |= together(opened, options)
    else:
        found["rates"] = rates(opened, options)
        found["exact"] = exactness(opened, options)
        found["graph"] = graph(opened, options)
        found["residue"] = residue(opened, options, used_at_start)
    opened.close()
    return found


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--device", default="cuda")
    args.add_argument("--ordinal", type=int, default=0)
    args.add_argument("--num-bytes", type=int, default=32 * GIB, help="the tag whose rate is taken")
    args.add_argument("--plain-bytes", type=int, default=4 * GIB)
    args.add_argument("--discard-bytes", type=int, default=64 * GIB)
    args.add_argument("--chunk-bytes", type=int, default=256 * MIB)
    args.add_argument("--cycles", type=int, default=21)
    args.add_argument("--limit", type=float, default=40.0, help="seconds for the cycles of the large tag")
    args.add_argument("--exact-bytes", type=int, default=2 * GIB)
    args.add_argument("--exact-cycles", type=int, default=100)
    args.add_argument("--exact-limit", type=float, default=40.0)
    args.add_argument("--matrix", type=int, default=4096)
    args.add_argument("--graph-cycles", type=int, default=5)
    args.add_argument("--together", action="store_true", help="wait for the parent before every round")
    leave(**measure(args.parse_args()))


if __name__ == "__main__":
    main()
