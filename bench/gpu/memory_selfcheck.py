"""Does an arena work on this GPU at all: the driver's calls, torch's allocations in it, graphs on it, its speed.

python memory_selfcheck.py [--device cpu] [--gib 8]

What the other parts of the memory benchmark stand on, in half a minute. Every check is told; the exit status is 1 when
one that must hold does not. `--device cpu`: the same checks over the stand-in of a driver's library that the tests use.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import MISSING, Report, number, parser
from memory_checks import GIB, MIB, Bench, Checks, need, refused
from memory_device import device_bytes, fill, hashes
from memory_driver_checks import identity, mapping, plain

from myxa.core.errors import MemoryFault, OutOfDeviceMemory
from myxa.memory.arenas.cuda_memory import open_cuda

# -- the arena ---------------------------------------------------------------------------------------------------------


def opened(bench: Bench, report: Report) -> str:
    pool_bytes = bench.num_bytes + bench.num_bytes // 4
    started = time.perf_counter()
    bench.memory = open_cuda(0, pool_bytes, num_threads=min(16, os.cpu_count() or 1), **bench.options)
    seconds = time.perf_counter() - started
    report.keep("pinned", {"num_bytes": pool_bytes, "seconds": seconds})
    return f"{seconds:.2f} s in all; {pool_bytes / GIB:.2f} GiB pinned"


def two_tags(bench: Bench) -> str:
    half = bench.num_bytes // 2
    bench.tensors = {
        "optimizer": bench.tensor("optimizer", "backup", bench.num_bytes),
        "grads": bench.tensor("grads", "discard", half),
        "params": bench.tensor("params", "backup", 64 * MIB if bench.is_gpu else 2 * MIB),
    }
    for seed, view in enumerate(bench.tensors.values()):
        fill(view, seed)
    for tag, view in bench.tensors.items():
        told = next(report for report in bench.memory.report() if report.tag == tag)
        need(told.num_bytes >= view.numel() * 8, f"{tag} holds {told.num_bytes} bytes")
        address = view.data_ptr()
        home = [s for s in bench.memory.segments() if s.address <= address < s.address + s.num_bytes]
        need(len(home) == 1 and bool(home[0].is_taken), f"{tag}: {address:#x} is in {home}")
    return ", ".join(f"{report.tag} {report.num_bytes / GIB:.2f} GiB" for report in bench.memory.report())


def away_and_back(bench: Bench, report: Report) -> str:
    """Bits, addresses, free memory, speed; the first cycle and the better of two later ones."""
    tags: Any = ("optimizer", "grads", "params")
    before = {tag: hashes(view) for tag, view in bench.tensors.items()}
    addresses = {tag: view.data_ptr() for tag, view in bench.tensors.items()}
    held = sum(told.num_bytes for told in bench.memory.report())
    cycles: list[dict[str, float]] = []
    said: list[str] = []
    for cycle in range(3):
        bench.memory.arena.mark_dirty("optimizer")
        used = bench.used()
        free = bench.memory.driver.free_bytes()
        out_s, out = timed(lambda: bench.memory.release(tags))
        gained = bench.memory.driver.free_bytes() - free
        need(gained >= 0.98 * held, f"{gained:,} of {held:,} bytes became free")
        seen = used - bench.used()
        need(seen >= 0.98 * held, f"outsiders see {seen:,} of {held:,} bytes become free")
        back_s, back = timed(lambda: bench.memory.begin_restore(tags, awaited=tags).wait_all())
        need({tag: view.data_ptr() for tag, view in bench.tensors.items()} == addresses, "an address changed")
        for tag in ("optimizer", "params"):
            need(hashes(bench.tensors[tag]) == before[tag], f"{tag} differs after cycle {cycle}")
        need(int(bench.tensors["grads"].count_nonzero()) == 0, "grads are not zero")
        if cycle == 0:
            said.append(f"{gained / GIB:.2f} GiB gained")
        cycles.append(
            {"out_s": out_s, "in_s": back_s, "out_gb_s": out / out_s / 1e9,
             "in_gb_s": back / back_s / 1e9}
        )  # fmt: skip
    report.keep("cycles", cycles)
    names = sorted({name for cycle in cycles for name in cycle})
    rows = [(name, *(number(cycle.get(name)) for cycle in cycles)) for name in names]
    report.table(f"{bench.num_bytes / GIB:.2f} GiB dirty and half as much discarded, three cycles",
                 ("", "first", "second", "third"), rows)  # fmt: skip
    for way in ("out", "in"):
        best = max(cycle[f"{way}_gb_s"] for cycle in cycles[1:])
        said.append(f"{way} {best:.1f} GB/s, {best / bench.plain[way]:.0%} of plain")
        report.goal(f"{way}: whole move's rate / plain pinned rate", best / bench.plain[way], at_least=0.90)
    return ", ".join(said)


def clean_tags_move_nothing(bench: Bench) -> str:
    out_s, out = timed(lambda: bench.memory.release(("optimizer",)))
    need(out == 0, f"{out:,} bytes were copied")
    back_s, _ = timed(lambda: bench.memory.begin_restore(("optimizer",), awaited=("optimizer",)).wait_all())
    return f"released in {1000 * out_s:.0f} ms without a copy, back in {1000 * back_s:.0f} ms"


def timed(move: Callable[[], int]) -> tuple[float, int]:
    started = time.perf_counter()
    moved = move()
    return time.perf_counter() - started, moved


def streamed(bench: Bench) -> str:
    before = hashes(bench.tensors["optimizer"])
    bench.memory.release(("optimizer",))
    begun = time.perf_counter()
    restoring = bench.memory.arena.begin_restore(("optimizer",))
    mapped_s = time.perf_counter() - begun
    restoring.wait("optimizer")
    need(hashes(bench.tensors["optimizer"]) == before, "contents differ")
    return f"mapped after {1000 * mapped_s:.0f} ms, there after {time.perf_counter() - begun:.2f} s"


def refusals(bench: Bench) -> str:
    with refused(OutOfDeviceMemory, "answered 2"):
        bench.tensor("grads", "discard", bench.memory.driver.capacity_bytes() + GIB)
    bench.memory.release(("grads",))
    with refused(MemoryFault, "discarded"), bench.memory.region("grads", "discard"):
        pass
    bench.memory.begin_restore(("grads",)).wait_all()
    small = bench.tensor("grads", "discard", 32 * MIB)
    fill(small, 5)
    return "no memory, and a region of a tag that is away, are refused; the tag goes on"


def graph_on_tags(bench: Bench) -> str:
    weights = torch.empty(0)
    with bench.memory.region("params", "backup"):
        weights = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    bench.memory.arena.mark_dirty("params")
    inputs = torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.relu(inputs @ weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = torch.relu(inputs @ weights) + 1
    graph.replay()
    torch.cuda.synchronize()
    before = outputs.clone()
    for _ in range(3):
        bench.memory.release(("params", "optimizer"))
        bench.memory.begin_restore(("params", "optimizer")).wait_all()
        outputs.zero_()
        graph.replay()
        torch.cuda.synchronize()
        need(torch.equal(outputs, before), "the graph gives something else after a cycle")
    return "captured once, replayed after three cycles of its weights, equal to the bit"


def dead_tensors(bench: Bench) -> str:
    held = sum(segment.num_bytes for segment in bench.memory.segments())
    bench.tensors.clear()
    bench.memory.shrink(("grads",))
    given = held - sum(segment.num_bytes for segment in bench.memory.segments())
    if bench.is_gpu:
        need(given > 0, "no segment of dead tensors came back")
    failure = bench.memory.table.last_failure()
    need(failure.num_unknown == 0, f"{failure.num_unknown} frees of unknown addresses")
    return f"{given / GIB:.2f} GiB given back when their pool was dropped"


def residue(bench: Bench, report: Report) -> str:
    gc.collect()
    bench.memory.release([told.tag for told in bench.memory.report()])
    used = bench.memory.driver.capacity_bytes() - bench.memory.driver.free_bytes()
    report.keep("residue", {"used_bytes": used})
    if bench.is_gpu:
        report.goal("used with every tag away, whole device, GiB", used / GIB, at_most=1.0)
    return f"used {used / MIB:,.0f} MiB"


def closed(bench: Bench, before: int) -> str:
    bench.memory.close()
    if bench.is_gpu:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    else:
        need(bench.gpu.broken_rule() == "", bench.gpu.broken_rule())
    left = bench.used() - before
    need(left <= 700 * MIB, f"{left:,} bytes are still used")
    return f"{left / MIB:.0f} MiB more used than at the start: kernels and libraries that were loaded meanwhile"


def again(bench: Bench) -> str:
    """Opened, filled, moved and closed once more: the device has no less than before."""
    before = bench.used()
    for _ in range(3):
        bench.memory = open_cuda(0, bench.num_bytes // 8, **bench.options)
        view = bench.tensor("optimizer", "backup", bench.num_bytes // 16)
        fill(view, 3)
        bench.memory.release(("optimizer",))
        bench.memory.begin_restore(("optimizer",), awaited=("optimizer",)).wait_all()
        del view
        bench.memory.close()
    left = bench.used() - before
    need(left <= 16 * MIB, f"{left:,} bytes more are used than before")
    return f"three more rounds: {left / MIB:.0f} MiB more used"


def run_checks(bench: Bench, report: Report) -> Checks:
    checks = Checks()
    before = bench.used()
    checks.run("identity", lambda: identity(bench))
    checks.run("mapping", lambda: mapping(bench, report))
    checks.run("plain copies", lambda: plain(bench, report))
    checks.run("opened", lambda: opened(bench, report))
    if not checks.failed:
        checks.run("torch allocates in two tags", lambda: two_tags(bench))
    if not checks.failed:
        checks.run("away and back", lambda: away_and_back(bench, report))
        checks.run("clean tags move nothing", lambda: clean_tags_move_nothing(bench))
        checks.run("streamed", lambda: streamed(bench))
        checks.run("refusals", lambda: refusals(bench))
        if bench.is_gpu:
            checks.run("graph on tags", lambda: graph_on_tags(bench))
        checks.run("dead tensors", lambda: dead_tensors(bench))
        checks.run("residue", lambda: residue(bench, report))
    if bench.memory is not None:
        checks.run("closed", lambda: closed(bench, before))
        checks.run("again", lambda: again(bench))
    return checks


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--gib", type=float, default=8.0, help="dirty bytes that move, in GiB")
    chosen = options.parse_args()
    is_dry = chosen.device == "cpu"
    report = Report("memory_selfcheck", is_dry=is_dry)
    if not is_dry and not torch.cuda.is_available():
        report.say("NOT RUN: torch sees no GPU")
        sys.exit(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        if not is_dry:
            torch.cuda.init()
            torch.zeros(1, device="cuda")  # the context, before anything is measured
            report.say(
                f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {device_bytes()[0] / MIB:.0f} MiB used"
            )
        bench = Bench(
            chosen.device, 32 * MIB if is_dry else int(chosen.gib * GIB) // (2 * MIB) * (2 * MIB), Path(folder)
        )
        checks = run_checks(bench, report)
    report.table("Checks", ("check", "", "", "seconds"), checks.rows)
    report.keep("checks", checks.rows)
    if checks.failed:
        report.failed(f"{', '.join(checks.failed)}: see above")
    report.end()


if __name__ == "__main__":
    main()
