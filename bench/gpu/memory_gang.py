"""Two or four GPUs that switch together: their copies at once, the skew of a gang, a soak, processes killed on the way.

    python memory_gang.py [--stages switches,kills,together] [--num-devices 2] [--device cpu]

together   every GPU's arena moves the same tag, first alone and then all at once; then a soak of all policies on all
switches   the gang of trainers and the gang of engines of memory_lab.py take turns on all GPUs
kills      one process is killed with SIGKILL at four points; how long until nothing is held for it any more
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from figures import Report, median, number, parser, some_of, work_folder
from memory_device import device_bytes
from memory_figures import GIB, MIB, quantile, size, tell_when_ended
from memory_lab import (
    ENGINE_TAGS,
    MANAGER,
    Cycle,
    Lab,
    LabError,
    add_lab_options,
    column,
    phase_rows,
    shrink,
)
from memory_orders import StandInContract
from memory_rates import DRY_ARENA, tell_exact
from memory_stages import READY, Stage, StageFailedError

from myxa.core.errors import CallError

SCRIPT = str(Path(__file__).with_name("memory_arena.py"))
STAGES = ("switches", "kills", "together")
ROUND_S = 60.0
CONSISTENT_S = 5.0
GIVE_UP_S = 20.0
LEFT_BYTES = 17 * GIB // 4
"""Of a GPU, beside the engine: both processes' residues, and some of the trainer."""


# -- copies of all at once ---------------------------------------------------------------------------------------------


def together(report: Report, options: argparse.Namespace, work: Path) -> None:
    is_dry = options.device == "cpu"
    shape = DRY_ARENA if is_dry else (
        "--num-bytes", str(options.gib * GIB), "--plain-bytes", str(4 * GIB), "--cycles", "5", "--limit", "8",
        "--exact-bytes", str(GIB),
        "--discard-bytes", "0",
    )  # fmt: skip
    stages = [
        Stage(
            f"arena {index}", SCRIPT, ["--together", "--device", options.device, "--ordinal", str(index), *shape],
            log=work / f"arena{index}.log",
        )
        for index in range(options.num_devices)
    ]  # fmt: skip
    try:
        found = _rounds(stages)
    finally:
        for stage in stages:
            stage.stop()
    report.keep("together", found)
    rows: list[tuple[str, ...]] = []
    for way in ("out", "in"):
        sums: dict[str, float] = {}
        for index, one in enumerate(found):
            rates = {when: one["num_bytes"] / (median(one[when][way][1:]) or 1.0) / 1e9 for when in ("alone", "all")}
            plain = one["all"]["plain"][way]
            rows.append((f"{way}, GPU {index}", *(number(rate) for rate in rates.values()), number(plain)))
            for when, rate in rates.items():
                sums[when] = sums.get(when, 0.0) + rate
        rows.append((f"{way}, sum", *(number(sums[when]) for when in ("alone", "all")), "-"))
        share = sums["all"] / sums["alone"]
        report.goal(f"arenas {way}, all at once / sum of each alone", share, at_least=0.90)
    head = ("GB/s", "alone", "all at once", "plain copies, all at once")
    report.table(f"{size(found[0]['num_bytes'])} a GPU, medians", head, rows)
    for index, one in enumerate(found):
        if not one["is_equal"]:
            report.goal(f"GPU {index}: contents equal (1 = yes)", 0.0, at_least=1.0)
        tell_exact(report, one["exact"], where=f"GPU {index}: ")


def _rounds(stages: list[Stage]) -> list[dict[str, Any]]:
    """Everybody alone, then all, then the soak."""
    for stage in stages:
        stage.expect(READY, 2 * ROUND_S)
    for stage in stages:
        stage.go("alone")
        stage.expect(READY, ROUND_S)
    for text in ("all", "end"):
        for stage in stages:
            stage.go(text)
        if text == "all":
            for stage in stages:
                stage.expect(READY, ROUND_S)
    return [stage.expect("result", 2 * ROUND_S) for stage in stages]


# -- switches --------------------------------------------------------------------------------------------------------


async def turns(report: Report, options: argparse.Namespace, work: Path, stages: list[str]) -> None:
    """Switches of whole gangs, then kills, in one lab."""
    async with Lab(options, num_devices=options.num_devices, work=work) as lab:
        if "switches" in stages:
            await switches(report, options, lab)
        if "kills" in stages:
            await kills(report, lab)


async def switches(report: Report, options: argparse.Namespace, lab: Lab) -> None:
    cycles: list[Cycle] = []
    give_up_at = time.monotonic() + options.switch_limit
    while len(cycles) < options.cycles and time.monotonic() < give_up_at:
        cycles.append(await lab.cycle(len(cycles), overlap=len(cycles) % 2 == 1))
    report.keep("switches", [vars(cycle) for cycle in cycles])
    skews = [*column(cycles[1:], "skew_in_s"), *column(cycles[1:], "skew_out_s")]
    rows = [
        (name, f"{1e3 * (median(values) or 0):.1f}", f"{1e3 * (quantile(values, 0.95) or 0):.1f}")
        for name in ("lease_in_s", "lease_out_s", "exposed_in_s", "exposed_out_s", "skew_in_s", "skew_out_s")
        if (values := column(cycles[1:], name))
    ]
    copied = size(median(column(cycles, "copied_out")) or 0)
    title = f"{len(cycles)} rounds of {lab.num_devices} GPUs, every other one overlapped, {copied} out in all, ms"
    report.table(title, ("what", "p50", "p95"), rows)
    report.table("Phases of the manager, ms", ("phase", "p50", "largest"), phase_rows(cycles[1:]))
    skew = quantile(skews, 0.95)
    report.goal("skew of a gang, p95, ms", None if skew is None else 1e3 * skew, at_most=50.0)
    report.goal("unaccounted, worst device, MiB", max(column(cycles, "unattributed")) / MIB, at_most=256.0)
    report.goal("trainer's residue, worst GPU, no communicators, GiB", lab.residues["trainer"] / GIB, at_most=1.5)


# -- kills -----------------------------------------------------------------------------------------------------------


async def kills(report: Report, lab: Lab) -> None:
    """One after the other: the dead stay dead, the others go on, except for the manager, which is started again."""
    rows: list[tuple[str, ...]] = []
    for name, point in POINTS.items():
        try:
            took_s, told = await point(lab)
        except (LabError, StageFailedError, CallError) as error:
            took_s, told = None, str(error).splitlines()[0][:160]
        rows.append((name, "-" if took_s is None else f"{took_s:.2f}", told))
        report.goal(f"killed {name}: consistent, s", took_s, at_most=CONSISTENT_S)
        report.keep("kills", rows)
    report.table("Killed with SIGKILL", ("who and when", "consistent after s", "then"), rows)


def kill(lab: Lab, name: str) -> float:
    """When."""
    os.kill(lab.stages[name].pid, signal.SIGKILL)
    for gang in (lab.trainers, lab.engines):
        if name in gang:
            gang.remove(name)
    return time.monotonic()


async def until_gone(lab: Lab, name: str, since: float) -> tuple[float | None, str]:
    """Until the manager holds nothing for `name` and every byte of the devices has an owner; seconds."""
    told = "the manager did not answer"
    while time.monotonic() < since + GIVE_UP_S:
        view = await lab.view()
        states = {tenant.tenant: tenant.state for device in view.devices for tenant in device.tenants}
        astray = max(device.unattributed_bytes for device in view.devices)
        told = f"{name} is {states.get(name, 'gone')}, {astray / MIB:.0f} MiB unaccounted, switching {view.switching!r}"
        if states.get(name, "dead") == "dead" and astray <= 256 * MIB and not view.switching:
            return time.monotonic() - since, told
        await asyncio.sleep(0.05)
    return None, told


async def kill_coming_engine(lab: Lab) -> tuple[float | None, str]:
    """In the middle of its return: the lease must be refused, and the others be where they were."""
    await lab.to_trainers()
    asked = asyncio.ensure_future(lab.lease("rollout", ENGINE_TAGS, quiet=("trainer",), limit_s=GIVE_UP_S))
    return await _after(lab, lab.engines[0], asked, "moving")


async def kill_leaving_trainer(lab: Lab) -> tuple[float | None, str]:
    """In the middle of the copies out: the switch that was asked for must end, granted or refused."""
    await lab.to_trainers()
    await lab.work("trainer", "step", amount=1)
    asked = asyncio.ensure_future(lab.lease("rollout", ENGINE_TAGS, quiet=("trainer",), limit_s=GIVE_UP_S))
    return await _after(lab, lab.trainers[-1], asked, "moving")  # of a GPU whose engine lives


async def kill_active_trainer(lab: Lab) -> tuple[float | None, str]:
    await lab.to_trainers()
    name = lab.trainers[0]
    return await until_gone(lab, name, kill(lab, name))


async def _after(lab: Lab, name: str, asked: asyncio.Future[Any], state: str) -> tuple[float | None, str]:
    seen = ""
    while seen != state and not asked.done():
        report = await lab.node.ref(StandInContract, name).memory_report()
        seen = report.state if report is not None else ""
    since = kill(lab, name)
    try:
        took_s, told = await until_gone(lab, name, since)
        (answer,) = await asyncio.wait_for(asyncio.gather(asked, return_exceptions=True), GIVE_UP_S)
    except TimeoutError:
        return None, f"the lease got no answer within {GIVE_UP_S:g} s"
    finally:
        asked.cancel()
    end = str(answer).splitlines()[0][:100] if isinstance(answer, BaseException) else "granted"
    return took_s, f"killed while {seen}: {told}; the lease: {end}"


async def kill_manager(lab: Lab) -> tuple[float | None, str]:
    """A new one asks the tenants, and then grants again."""
    await lab.to_trainers()
    since = kill(lab, MANAGER)
    lab.stages[MANAGER].stop()
    lab.spawn(MANAGER)
    before = {*lab.trainers, *lab.engines}
    while time.monotonic() < since + GIVE_UP_S:
        try:
            view = await lab.view()
        except CallError:
            await asyncio.sleep(0.05)
            continue
        known = {tenant.tenant for device in view.devices for tenant in device.tenants}
        if known >= before:
            took_s = time.monotonic() - since
            reply = await lab.lease("rollout", ENGINE_TAGS, quiet=("trainer",), limit_s=GIVE_UP_S)
            return took_s, f"all tenants known again (start of its process included), next lease at epoch {reply.epoch}"
        await asyncio.sleep(0.05)
    return None, "the tenants did not come back to it"


POINTS = {
    "the manager": kill_manager,
    "an engine while it comes back": kill_coming_engine,
    "a trainer rank while it leaves": kill_leaving_trainer,
    "a trainer rank that is active": kill_active_trainer,
}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--stages", type=some_of(STAGES), default=",".join(STAGES))
    args.add_argument("--num-devices", type=int, choices=(2, 3, 4), default=4)
    args.add_argument("--gib", type=int, default=16, help="of the tag that all GPUs move at once")
    args.add_argument("--cycles", type=int, default=11)
    args.add_argument("--switch-limit", type=float, default=25.0)
    add_lab_options(args)
    args.set_defaults(scale=0.5, micro_batches=1, mem_fraction=0.0)  # small, and most of its optimizer has to leave
    options = args.parse_args()
    shrink(options)
    if options.device == "cpu":
        options.cycles, options.mem_fraction = 4, 0.97
    elif not options.mem_fraction:
        options.mem_fraction = 1 - LEFT_BYTES / device_bytes(0)[1]
    report = Report("memory_gang", is_dry=options.device == "cpu")
    tell_when_ended(report)
    work = work_folder() / "memory_gang"
    asked = options.stages.split(",")
    failed: list[str] = []
    try:
        if {"switches", "kills"} & set(asked):
            asyncio.run(turns(report, options, work / "turns", asked))
    except (LabError, StageFailedError, CallError) as error:
        report.say(f"- switches: {error}\n")
        failed.append("switches")
    try:
        if "together" in asked:
            together(report, options, work / "together")
    except StageFailedError as error:
        report.say(f"- together: {error}\n")
        failed.append("together")
    if failed:
        report.failed(", ".join(failed))
    report.end()


if __name__ == "__main__":
    main()
