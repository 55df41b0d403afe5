"""The driver's calls, before anything is built on them: whose memory, what mapping costs, what plain copies reach."""

from __future__ import annotations

import torch
from figures import Report, number
from memory_checks import GIB, MIB, Bench, need
from memory_device import seconds_of


def identity(bench: Bench) -> str:
    driver = bench.driver()
    try:
        if bench.is_gpu:
            uuid = str(torch.cuda.get_device_properties(0).uuid)
            need(uuid.removeprefix("GPU-") in driver.device, f"torch calls it {uuid}, we {driver.device}")
            total = torch.cuda.mem_get_info(0)[1]
            need(total == driver.capacity_bytes(), f"torch says {total} bytes, we {driver.capacity_bytes()}")
            need(torch.cuda.current_device() == 0, "torch's current device changed")
        gib = driver.capacity_bytes() / GIB
        return f"{driver.device}, {gib:.1f} GiB, granularity {driver.granularity / MIB:g} MiB"
    finally:
        driver.close()


def map_costs(bench: Bench, chunk_bytes: int, total_bytes: int) -> dict[str, float]:
    """ms/GiB of each step, chunk by chunk."""
    driver = bench.driver()
    number_of = total_bytes // chunk_bytes
    address = driver.reserve(total_bytes)
    starts = [address + index * chunk_bytes for index in range(number_of)]
    handles: list[int] = []
    times: dict[str, float] = {}
    try:
        times["create"] = seconds_of(lambda: handles.extend(driver.create(chunk_bytes) for _ in range(number_of)))
        pairs = list(zip(starts, handles, strict=True))
        times["map"] = seconds_of(lambda: [driver.map(at, chunk_bytes, handle) for at, handle in pairs])
        driver.wait(driver.zero(address, total_bytes))
        driver.synchronise()
        times["unmap"] = seconds_of(lambda: [driver.unmap(at, chunk_bytes) for at in starts])
        times["release"] = seconds_of(lambda: [driver.release(handle, chunk_bytes) for handle in handles])
    finally:
        driver.free_reservation(address, total_bytes)
        driver.close()
    return {name: 1000 * seconds / (total_bytes / GIB) for name, seconds in times.items()}


def mapping(bench: Bench, report: Report) -> str:
    cases = ((2 * MIB, GIB), (64 * MIB, 4 * GIB), (256 * MIB, 8 * GIB)) if bench.is_gpu else ((2 * MIB, 16 * MIB),)
    found = {chunk // MIB: map_costs(bench, chunk, total) for chunk, total in cases}
    head = ("chunk, MiB", "create", "map + access", "unmap", "release", "sum, ms/GiB")
    rows = [(str(c), *(number(t[n]) for n in ("create", "map", "unmap", "release")), number(sum(t.values())))
            for c, t in found.items()]  # fmt: skip
    report.table("Mapping, ms/GiB", head, rows)
    report.keep("map_ms_per_gib", found)
    best = min(sum(times.values()) for times in found.values())
    if bench.is_gpu:
        report.goal("map + unmap, all four steps, ms/GiB", best, at_most=5.0)
    return f"{best:.2f} ms/GiB at best for all four steps"


def plain_rates(bench: Bench, source: torch.Tensor) -> dict[str, float]:
    """GB/s of plain asynchronous copies of ordinary device memory and memory that torch pinned, this process."""
    size = min(2 * GIB, source.numel() * 8)
    host = torch.empty(size // 8, dtype=torch.int64, pin_memory=bench.is_gpu)
    parts = [source[start : start + size // 8] for start in range(0, source.numel(), size // 8)]
    moved = sum(part.numel() * 8 for part in parts)

    def out() -> None:
        for part in parts:
            host[: part.numel()].copy_(part, non_blocking=True)
        bench.synchronise()

    def into() -> None:
        for part in parts:
            part.copy_(host[: part.numel()], non_blocking=True)
        bench.synchronise()

    rates: dict[str, float] = {}
    for name, work in (("out", out), ("in", into)):
        work()
        rates[name] = moved / min(seconds_of(work) for _ in range(2)) / 1e9
    return rates


def plain(bench: Bench, report: Report) -> str:
    source = torch.ones(bench.num_bytes // 8, dtype=torch.int64, device=bench.device)
    bench.plain = plain_rates(bench, source)
    del source
    if bench.is_gpu:
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # the pinned buffer goes back to the host
    report.keep("plain_gb_s", bench.plain)
    return ", ".join(f"{way} {rate:.1f} GB/s" for way, rate in bench.plain.items())
