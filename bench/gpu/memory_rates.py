"""What memory costs on this machine, and how near to that our arena comes: copies, pinning, mapping, what others have
just freed; then our arena and torch-memory-saver beside plain pinned copies, each in the process of its own figures.

    python memory_rates.py [--stages raw,scrub,arena,saver] [--num-gib 32] [--device cpu]

Every rate of the arena is bytes that were copied, divided by the whole time of `release` or `restore` (unmapping and
mapping in it), divided by the rate of plain pinned copies just before. The first cycle is told apart. Bytes that are
dropped are never counted into a rate.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

from figures import Report, median, number, parser, percent, some_of, work_folder
from memory_figures import GIB, MIB, quantile, size, tell_when_ended
from memory_stages import StageFailedError, run_stage

HERE = Path(__file__).resolve().parent
STAGES = ("raw", "scrub", "arena", "saver")
LIMITS = {"raw": 110.0, "scrub": 60.0, "arena": 150.0, "saver": 90.0}
"""Seconds; the first process that imports torch on a bare machine takes ten of them."""
DRY = ("--plain-bytes", str(4 * MIB))
DRY_SCRUB = ("--held-bytes", str(64 * MIB), "--num-bytes", str(16 * MIB), "--chunk-bytes", str(2 * MIB))
DRY_ARENA = (
    *DRY, "--num-bytes", str(24 * MIB), "--discard-bytes", str(8 * MIB), "--chunk-bytes", str(4 * MIB), "--cycles",
    "3", "--exact-bytes", str(6 * MIB), "--exact-cycles", "6", "--matrix", "128", "--graph-cycles", "2",
)  # fmt: skip


def arguments_of(stage: str, options: argparse.Namespace) -> tuple[str, list[str]]:
    """(script, its arguments)."""
    is_dry = options.device == "cpu"
    if stage == "saver":
        return "memory_saver.py", ["--num-bytes", str(options.saver_gib * GIB), "--limit", str(options.saver_limit)]
    if stage == "scrub":
        shape = DRY_SCRUB if is_dry else ()
        return "memory_scrub.py", [
            "--device",
            options.device,
            "--log",
            str(work_folder() / "memory_holder.log"),
            *shape,
        ]
    if stage == "arena":
        shape = DRY_ARENA if is_dry else ("--num-bytes", str(options.num_gib * GIB), "--cycles", str(options.cycles))
        return "memory_arena.py", ["--device", options.device, *shape]
    dry = (*DRY, "--pin-bytes", str(8 * MIB), "--vmm-bytes", str(64 * MIB), "--shrink", "64") if is_dry else ()
    return "memory_raw.py", ["--device", options.device, *dry]


# -- tables ------------------------------------------------------------------------------------------------------------


def tell_copies(report: Report, found: dict[str, Any]) -> None:
    rows = [
        (size(row["size"]), *(number(rate) for rate in (*row["out"], *row["in"], row["both"]))) for row in found["rows"]
    ]
    head = ("bytes", "out, 1 stream", "out, 2", "in, 1 stream", "in, 2", "both ways at once, sum")
    report.table("Plain pinned copies, GB/s, median of 5", head, rows)
    best = max(min(max(row["out"]), max(row["in"])) for row in found["rows"])
    report.goal("plain pinned copies, the slower way, GB/s", best, at_least=45.0)


def tell_pin(report: Report, found: dict[str, Any]) -> None:
    gib = found["num_bytes"] / GIB
    rows = [
        (
            row["way"],
            "in the next" if row["touch"] is None else number(row["touch"] / gib),
            number(row["register"] / gib),
        )
        for row in found["rows"]
    ]
    report.table(f"Getting pinned memory, s a GiB, {size(found['num_bytes'])} each", ("way", "touch", "pin"), rows)


def tell_vmm(report: Report, found: dict[str, Any]) -> None:
    rows, best = [], math.inf
    for row in found["rows"]:
        gib = row["total"] / GIB
        for index, cycle in enumerate(row["cycles"]):
            parts = [1e3 * cycle[name] / gib for name in ("create", "map and access", "unmap", "release")]
            name = f"{size(row['chunk'])} x {row['total'] // row['chunk']}{', first' if index == 0 else ''}"
            rows.append((name, *(number(part) for part in parts), number(sum(parts))))
            best = min(best, sum(parts)) if row["total"] >= 16 * GIB else best
    head = ("chunks", "create", "map and access", "unmap", "release", "all")
    report.table("Mapping, ms a GiB", head, rows)
    report.goal("mapping and unmapping, best chunk, ms a GiB", best if math.isfinite(best) else None, at_most=5.0)


def cycle_row(
    name: str, found: dict[str, Any], num_bytes: int, plain: dict[str, float]
) -> tuple[list[str], list[float]]:
    """Cells of one way to move a tag; share of the plain rate out and in (medians, the first cycle left out)."""
    shares: list[float] = []
    cells = [name, str(len(found["out"]))]
    for way in ("out", "in"):
        first, *later = found[way]
        later = later or [first]
        middle, worst = statistics.median(later), quantile(later, 0.95)
        rate = num_bytes / middle / 1e9
        shares.append(rate / plain[way])
        cells += [f"{first:.3f}", f"{middle:.3f} ({worst:.3f})", number(rate), percent(shares[-1])]
    return cells, shares


CYCLE_HEAD = (
    "what", "cycles", "out: first, s", "p50 (p95), s", "GB/s", "of plain", "in: first, s", "p50 (p95), s", "GB/s",
    "of plain",
)  # fmt: skip


def tell_arena(report: Report, found: dict[str, Any]) -> None:
    rates = found["rates"]
    plain = rates["plain"]
    row, shares = cycle_row(f"arena, {size(rates['num_bytes'])} dirty", rates["dirty"], rates["num_bytes"], plain)
    title = f"Our arena; plain pinned copies in the same process: out {plain['out']:.1f}, in {plain['in']:.1f} GB/s"
    report.table(title, CYCLE_HEAD, [row])
    clean, discard = rates["clean"], rates["discard"]
    skipped = "nothing copied"
    report.say(
        f"- clean tag: out {median(clean['out'][1:]) or 0:.3f} s ({skipped}), in {median(clean['in'][1:]) or 0:.3f} s\n"
        f"- discarded tag of {size(rates['discard_bytes'])}: out {median(discard['out'][1:]) or 0:.3f} s, "
        f"in (mapped and zeroed) {median(discard['in'][1:]) or 0:.3f} s\n"
        f"- host pool of {size(found['pool_bytes'])} made and pinned once in {found['pool_s']:.1f} s\n"
    )
    dirty, num_bytes = rates["dirty"], rates["num_bytes"]
    report.say(
        f"- of a restore mapping, before the first byte: {median(dirty['map'][1:]) or 0:.3f} s; of a release "
        f"unmapping, beside the copies: {median(dirty['unmap'][1:]) or 0:.3f} s\n"
    )
    coming = [whole - mapping for whole, mapping in zip(dirty["in"][1:], dirty["map"][1:], strict=True)]
    share_in = num_bytes / (median(coming) or math.inf) / 1e9 / plain["in"]
    report.goal("arena, rate out / plain pinned, unmapping included (goal 0.95)", shares[0], at_least=0.90)
    report.goal("arena, rate in / plain pinned, mapping apart (goal 0.95)", share_in, at_least=0.90)
    for way in ("out", "in"):
        told = f"{size(num_bytes)} {way}, all of it, s: 1.15 x bytes / bandwidth + 0.15"
        report.goal(told, median(dirty[way][1:]), at_most=1.15 * num_bytes / plain[way] / 1e9 + 0.15)
    exact, graph, residue = found["exact"], found["graph"], found["residue"]
    tell_exact(report, exact)
    report.say(
        f"- {'CUDA graph' if graph['captured'] else 'products'} replayed after {graph['cycles']} cycles: "
        f"different {graph['wrong']} times\n"
    )
    is_right = rates["is_equal"] and not (
        exact["wrong"] or exact["unzeroed"] or exact["moved_pointers"] or graph["wrong"]
    )
    report.goal("contents, pointers and graph right in every cycle (1 = yes)", float(is_right), at_least=1.0)
    left = residue.get("residue")
    report.goal("residue of a process without its tags, GiB", None if left is None else left / GIB, at_most=1.0)
    unaccounted = residue.get("unaccounted")
    told = None if unaccounted is None else unaccounted / MIB
    report.goal("unaccounted bytes, NVML against the arena, MiB", told, at_most=256.0)


def tell_exact(report: Report, exact: dict[str, Any], where: str = "") -> None:
    """Cycles over all policies: contents, and what leaked."""
    drift = exact["drift"]
    report.say(
        f"- {where}{exact['cycles']} cycles over four tags in {exact['seconds']:.1f} s: contents wrong in "
        f"{exact['wrong']}, discarded tag not zero in {exact['unzeroed']}, pointers moved {exact['moved_pointers']}; "
        f"meanwhile host {drift['host_bytes'] / MIB:+.1f} MiB, device {drift.get('device_bytes', 0) / MIB:+.1f} MiB, "
        f"descriptors {drift['fds']:+d}, threads {drift['threads']:+d}\n"
    )
    report.goal(f"{where}cycles with all contents equal", float(exact["cycles"] - exact["wrong"]), at_least=100.0)
    report.goal(f"{where}host memory gained, MiB", drift["host_bytes"] / MIB, at_most=64.0)
    report.goal(f"{where}device memory gained, MiB", drift.get("device_bytes", 0) / MIB, at_most=16.0)
    report.goal(f"{where}descriptors and threads gained", float(drift["fds"] + drift["threads"]), at_most=0.0)


def tell_saver(report: Report, found: dict[str, Any]) -> None:
    plain = found["plain"]
    rows = [
        cycle_row(f"torch-memory-saver, {name}", found[name], found["num_bytes"], plain)[0]
        for name in ("default", "retained")
    ]
    report.table(
        f"torch-memory-saver 0.0.10, {size(found['num_bytes'])}; plain pinned copies in the same process: "
        f"out {plain['out']:.1f}, in {plain['in']:.1f} GB/s; contents {'equal' if found['is_equal'] else 'DIFFERENT'}",
        CYCLE_HEAD,
        rows,
    )


def tell_raw(report: Report, found: dict[str, Any]) -> None:
    tell_pin(report, found["pin"])
    tell_copies(report, found["copies"])
    tell_vmm(report, found["vmm"])


def tell_scrub(report: Report, found: dict[str, Any]) -> None:
    held = size(found["held_bytes"])
    beside = {"nobody": found["alone"]}
    beside |= {f"another process gave {held} back, {float(w):g} s before": ways for w, ways in found["after"].items()}
    rows = [
        (name, *(f"{statistics.median(ways[way]):.3f}" for way in ("engines", "kernel")))
        for name, ways in beside.items()
    ]
    told = f"Mapping and copying in {size(found['num_bytes'])}, s, median of {len(found['alone']['kernel'])}"
    report.table(told, ("beside", "by copy engines", "by our kernel"), rows)


TELL = {"raw": tell_raw, "scrub": tell_scrub, "arena": tell_arena, "saver": tell_saver}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--stages", type=some_of(STAGES), default=",".join(STAGES))
    args.add_argument("--num-gib", type=int, default=32, help="of the arena's large tag, and of its pool")
    args.add_argument("--cycles", type=int, default=21)
    args.add_argument("--saver-gib", type=int, default=8)
    args.add_argument("--saver-limit", type=float, default=50.0, help="seconds for its cycles")
    options = args.parse_args()
    is_dry = options.device == "cpu"
    report = Report("memory_rates", is_dry=is_dry)
    tell_when_ended(report)
    failed: list[str] = []
    for stage in options.stages.split(","):
        if stage == "saver" and is_dry:
            report.say("- saver: torch-memory-saver needs a GPU\n")
            continue
        script, arguments = arguments_of(stage, options)
        log = work_folder() / f"memory_{stage}.log"
        try:
            found = run_stage(stage, str(HERE / script), arguments, log=log, limit_s=LIMITS[stage])
        except StageFailedError as error:
            report.say(f"- {error}\n")
            failed.append(stage)
            continue
        report.keep(stage, found)
        TELL[stage](report, found)
    if failed:
        report.failed(", ".join(failed))
    report.end()


if __name__ == "__main__":
    main()
