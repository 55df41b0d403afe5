"""A trainer and an engine that do not fit on one GPU together, taking turns on it: how long nobody computes.

    python memory_switch.py [--ways plain,overlap,saver] [--scale 1.0] [--device cpu]

Two stand-ins with the memory of 8.2 thousand million parameters (memory_standins.py), two processes, a real memory
manager in a third, leases over ZeroMQ. The engine's weights and cache take 0.90 of the device.

plain     every byte has moved before the next side begins; one way is judged by bytes / plain pinned bandwidth
overlap   the optimizer streams in under the forward and backward pass
saver     the same stand-ins, a quarter of the size, paused and resumed by torch-memory-saver as a whole, nobody asked

Exposed: from the last product of one side to the first of the other, what the update waited for its bytes, and by how
much the pass beside the copies was slower than alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from figures import Report, median, number, parser, some_of, work_folder
from memory_figures import GIB, MIB, quantile, size, tell_when_ended
from memory_lab import Cycle, Lab, LabError, add_lab_options, column, phase_rows, shrink
from memory_stages import StageFailedError

from myxa.core.errors import CallError

WAYS = ("plain", "overlap", "saver")
WORKED_EXAMPLE = 8.2e9
NVLINK = 300e9
"""Bytes a second of a gather between four GPUs, for what the stand-in copies on its own."""


class Found:
    """What one way gave."""

    def __init__(self, way: str, lab: Lab) -> None:
        self.way, self.rates, self.baseline_s = way, lab.rates, lab.baseline_s
        self.cycles: list[Cycle] = []
        self.residue: dict[str, float] = {}
        self.is_equal = True
        self.refused = ""
        self.num_switches = 0

    @property
    def later(self) -> list[Cycle]:
        """Without the first, which maps and pins for the first time."""
        return self.cycles[1:] or self.cycles

    def slow_down_s(self, cycle: Cycle) -> float:
        """Of the pass, by copies beside it."""
        return max(cycle.compute_s - self.baseline_s, 0.0)


async def rounds(lab: Lab, found: Found, num: int, limit_s: float, check_every: int) -> None:
    """So many rounds, or fewer if the time is over; contents of the optimizer compared in some of them."""
    give_up_at = time.monotonic() + limit_s
    for index in range(num):
        if time.monotonic() > give_up_at and index >= 2:
            return
        try:
            found.cycles.append(await lab.cycle(len(found.cycles) + 1, overlap=found.way == "overlap"))
        except LabError as error:
            found.refused = str(error)
            return
        if found.way != "saver" and index % check_every == 0:
            is_equal, astray = await same_after_a_switch(lab, overlap=found.way == "overlap")
            found.is_equal &= is_equal
            found.cycles[-1].unattributed = max(found.cycles[-1].unattributed, astray)


async def same_after_a_switch(lab: Lab, *, overlap: bool) -> tuple[bool, int]:
    """Whether the optimizer's hash is the same after a step, while it may be on its way out, and after it came back;
    and the bytes that nobody accounts for while trainers have the device."""
    await lab.to_trainers()
    await lab.work("trainer", "step", amount=1, overlap=overlap)
    before = (await lab.work("trainer", "digest"))[0].digest
    astray = await lab.unattributed()
    await lab.to_engines(0)
    await lab.to_trainers()
    after = (await lab.work("trainer", "digest"))[0].digest
    await lab.to_engines(0)
    return before == after, astray


async def measure(report: Report, options: argparse.Namespace, way: str, work: Path) -> list[Found]:
    """`ours` gives two: plain, then overlapped. Each is told when it is over."""
    async with Lab(options, num_devices=1, work=work, way=way) as lab:
        report.say(
            f"- {way}: residue {', '.join(f'{name} {size(value)}' for name, value in lab.residues.items())}; plain "
            f"pinned copies in the trainer: out {lab.rates['out']:.1f}, in {lab.rates['in']:.1f} GB/s; pool made in "
            f"{lab.rates['pool_s']:.1f} s; forward and backward alone {lab.baseline_s:.3f} s\n"
        )
        result: list[Found] = []
        for name in ("saver",) if way == "saver" else ("plain", "overlap"):
            found = Found(name, lab)
            num = {"saver": options.saver_rounds, "plain": options.plain_rounds, "overlap": options.rounds}[name]
            limit_s = {"saver": options.saver_limit, "plain": 0.3 * options.limit, "overlap": 0.7 * options.limit}[name]
            if result:  # the same pass, as warm, with nothing beside it
                found.baseline_s = statistics.median(column(result[0].later, "compute_s"))
            await rounds(lab, found, num, limit_s, check_every=max(num // 2, 1))
            found.residue, found.num_switches = lab.residues, lab.num_switches
            tell_way(report, found)
            if way == "ours":
                judge(report, options, found)
            result.append(found)
            if found.refused or not found.later:
                break
        return result


# -- tables ------------------------------------------------------------------------------------------------------------


def ms(values: Sequence[float]) -> str:
    """`median (p95)`."""
    return f"{1e3 * statistics.median(values):.0f} ({1e3 * (quantile(values, 0.95) or 0):.0f})" if values else "-"


def tell_way(report: Report, found: Found) -> None:
    """Tables of one way."""
    cycles = found.later
    report.keep(
        found.way, {"cycles": [asdict(c) for c in found.cycles], "rates": found.rates, "residue": found.residue}
    )
    if found.refused:
        report.say(f"- {found.way}: REFUSED or failed after {len(found.cycles)} rounds: {found.refused}\n")
    if not cycles:
        return
    first = found.cycles[0]
    rows: list[tuple[str, ...]] = []
    for name, title in (
        ("lease_in_s", "to the trainer: asked to granted"), ("exposed_in_s", "to the trainer: nobody computes"),
        ("rebuild_s", "of it parameters rebuilt"), ("waited_s", "of it the update waited"),
        ("compute_s", f"forward and backward (alone {1e3 * found.baseline_s:.0f})"), ("update_s", "update"),
        ("lease_out_s", "to the engine: asked to granted"), ("exposed_out_s", "to the engine: nobody computes"),
    ):  # fmt: skip
        rows.append((title, f"{1e3 * getattr(first, name):.0f}", ms(column(cycles, name))))
    report.table(f"### {found.way}: {len(found.cycles)} rounds, ms", ("what", "first", "p50 (p95)"), rows)
    moved = [
        (way, *(size(median(column(cycles, f"{kind}_{way}")) or 0) for kind in ("copied",))) for way in ("in", "out")
    ]
    if found.way != "saver":
        report.table("Bytes a switch", ("way", "copied"), moved)
        report.table("Phases as the manager saw them, ms", ("phase", "p50", "largest"), phase_rows(cycles))


def judge(report: Report, options: argparse.Namespace, found: Found) -> None:
    """Goals of our ways."""
    cycles, rates = found.later, found.rates
    report.goal(f"{found.way}: rounds without a refusal or an error", float(not found.refused), at_least=1.0)
    if not cycles:
        return
    report.goal(f"{found.way}: optimizer equal after checked switches (1 = yes)", float(found.is_equal), at_least=1.0)
    if found.way == "plain":
        residue = found.residue["trainer"] / GIB
        report.goal("trainer's residue, GiB", residue, at_most=1.0)
        for way in ("in", "out"):
            num_bytes = median(column(cycles, f"copied_{way}")) or 0.0
            limit_s = 1.15 * num_bytes / rates[way] / 1e9 + 0.15
            took_s = median(column(cycles, f"lease_{way}_s"))
            report.goal(f"plain: one way {way}, {size(num_bytes)} copied, s", took_s, at_most=limit_s)
        return
    exposed_in = [cycle.exposed_in_s + found.slow_down_s(cycle) for cycle in cycles]
    report.goal("exposed switch to the trainer, p50, s (ambition 0.35)", median(exposed_in), at_most=0.5)
    report.goal(
        "exposed switch to the engine, p50, s (ambition 0.35)", median(column(cycles, "exposed_out_s")), at_most=0.5
    )
    slow = median([found.slow_down_s(cycle) / found.baseline_s for cycle in cycles])
    report.goal("pass beside copies, slower by", slow, at_most=0.10)
    done = float(found.num_switches if not found.refused else 0)
    report.goal(f"switches at {options.mem_fraction:.2f} without out-of-memory", done, at_least=50.0)
    report.goal("unaccounted, NVML against the ledger, MiB", max(column(cycles, "unattributed")) / MIB, at_most=256.0)


def tell_all(report: Report, options: argparse.Namespace, found: list[Found]) -> None:
    """All ways in one table."""
    rows: list[tuple[str, ...]] = []
    for one in found:
        cycles = one.later
        if not cycles:
            continue
        scale = options.saver_scale if one.way == "saver" else options.scale
        exposed_in = [cycle.exposed_in_s + one.slow_down_s(cycle) for cycle in cycles]
        both = [a + b for a, b in zip(exposed_in, column(cycles, "exposed_out_s"), strict=True)]
        middle = number((median(both) or 0.0) / scale)
        out = ms(column(cycles, "exposed_out_s"))
        rows.append((one.way, f"{scale:g}", str(len(one.cycles)), ms(exposed_in), out, ms(both), middle))
    head = ("way", "scale", "rounds", "exposed to the trainer, ms", "exposed to the engine, ms", "both, ms")
    report.table(
        f"All ways; engine at {options.mem_fraction:.2f} of the device", (*head, "both / scale, s (computed)"), rows
    )
    gather = 1.5 * options.scale * WORKED_EXAMPLE
    report.say(
        f"- not in the figures: the gather of {size(gather)} of parameters from three other GPUs, about "
        f"{1e3 * gather / NVLINK:.0f} ms over NVLink (computed)\n"
    )


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--ways", type=some_of(WAYS), default=",".join(WAYS))
    args.add_argument("--rounds", type=int, default=20, help="overlapped")
    args.add_argument("--plain-rounds", type=int, default=6)
    args.add_argument("--limit", type=float, default=75.0, help="seconds of rounds of our ways")
    args.add_argument("--saver-scale", type=float, default=0.15)
    args.add_argument("--saver-rounds", type=int, default=4)
    args.add_argument("--saver-limit", type=float, default=25.0)
    add_lab_options(args)
    options = args.parse_args()
    shrink(options)
    is_dry = options.device == "cpu"
    if is_dry:
        options.rounds, options.plain_rounds = 3, 2
    report = Report("memory_switch", is_dry=is_dry)
    work = work_folder() / "memory_switch"
    tell_when_ended(report)
    asked = options.ways.split(",")
    found: list[Found] = []
    failed: list[str] = []
    for way in ("ours", "saver"):
        if (way == "ours" and not {"plain", "overlap"} & set(asked)) or (way == "saver" and "saver" not in asked):
            continue
        if way == "saver" and is_dry:
            report.say("- saver: torch-memory-saver needs a GPU\n")
            continue
        chosen = argparse.Namespace(**{**vars(options), **({"scale": options.saver_scale} if way == "saver" else {})})
        try:
            found += asyncio.run(measure(report, chosen, way, work / way))
        except (LabError, StageFailedError, CallError, OSError) as error:
            report.say(f"- {way}: {error}\n")
            failed.append(way)
    if found:
        tell_all(report, options, found)
    if failed:
        report.failed(", ".join(failed))
    report.end()


if __name__ == "__main__":
    main()
