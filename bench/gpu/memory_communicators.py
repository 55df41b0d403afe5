"""Communicators of a gang: what they hold, how fast they leave and come back, what happens when a member dies.

    python memory_communicators.py [--ranks 2|4] [--stages reload,kill,sizes] [--device cpu]

reload    eleven groups and WORLD behind proxies: release, restore (rebuilt at once), first use of all; up to 50 times
kill      the last rank dies, the others have an all-reduce in flight that waits for it, and are told to release
sizes     bytes and first-use time of 1 .. 12 communicators, of a lonely one, with fewer channels and smaller buffers

Every stage is a gang of its own, one process a GPU. What a gang that failed had found is told; the other stages go on,
as far as there is time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from figures import Report, median, number, parser, part_seconds, some_of, work_folder
from memory_device import settled_used
from memory_figures import GIB, MIB, quantile, tell_when_ended
from train_speed import how_it_ended, wait_for

from myxa.core.errors import MemoryFault
from myxa.memory.communicators.reload import load

RANK = Path(__file__).with_name("memory_comm_rank.py")
STAGES = ("reload", "kill", "sizes")
VARIANTS = {
    "as it comes": {},
    "NCCL_MAX_CTAS=8": {"NCCL_MAX_CTAS": "8"},
    "NCCL_BUFFSIZE=1MiB": {"NCCL_BUFFSIZE": str(MIB)},
}
RELOAD_S = 4.0
RESIDUE_GIB = 1.5
FREED_SHARE = 0.95
LEAVES_S = 2.0
"""After its limit, until a survivor has left."""


LOG_END = 3000
"""Characters of a log: the stacks of a rank that stood still are in it."""
LEAST_S, TELLING_S = 20.0, 5.0
"""A stage is not begun with less time; kept for telling what a stage found."""
LOOK_S = 2.0
"""How often somebody looks after ranks that he waits for."""
AwaitKeys = Callable[[Sequence[str], float], bool]
"""Until the ranks have set these in their store; False: one of them has ended, or so many seconds are over."""


class GangFailedError(Exception):
    """A rank ended badly, or none in time."""


class GangOf:
    """Runs a stage in processes of its own."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.num_ranks: int = options.ranks
        self.name = ""
        """Of the gang that was begun last."""

    def run(
        self,
        stage: str,
        *words: str,
        name: str = "",
        environment: dict[str, str] | None = None,
        limit_s: float = 120.0,
        dying: Sequence[int] = (),
        meanwhile: Callable[[Any, AwaitKeys], None] | None = None,
    ) -> list[dict[str, Any]]:
        """What each rank found; of a rank in `dying`, nothing. `meanwhile` is called with the ranks' store, which
        is this process's: a rank may end before the others have. Raises GangFailedError."""
        name = self.name = name or stage
        limit_s = min(limit_s, max(self.options.ends_at - TELLING_S - time.monotonic(), LEAST_S / 2))
        for old in self.work.glob(f"{name}.*.json"):
            old.unlink()
        store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]  # documented
        told = {"OMP_NUM_THREADS": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", **(environment or {})}
        logs = [self.work / f"{name}.{rank}.log" for rank in range(self.num_ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                command = [
                    sys.executable, "-W", "ignore", str(RANK), stage, str(self.work), str(rank), str(self.num_ranks),
                    str(store.port), self.options.device, f"name={name}", *words,
                ]  # fmt: skip
                with log.open("wb") as file:
                    processes.append(
                        subprocess.Popen(command, env={**os.environ, **told}, stdout=file, stderr=subprocess.STDOUT)
                    )
            if meanwhile is not None:
                meanwhile(store, lambda keys, seconds: await_keys(store, keys, seconds, processes))
            living = [process for rank, process in enumerate(processes) if rank not in dying]
            statuses = wait_for(living, limit_s)
        finally:
            for process in processes:
                with contextlib.suppress(OSError):
                    process.kill()
                process.wait()
        bad = [index for index, status in enumerate(statuses) if status != 0]
        if bad:
            raise GangFailedError("\n".join(self.end_of(name, rank, statuses[rank]) for rank in bad))
        return self.kept(name)

    def end_of(self, name: str, rank: int, status: int | None) -> str:
        """How a rank ended, and what it said last."""
        log = self.work / f"{name}.{rank}.log"
        said = log.read_text(encoding="utf-8", errors="replace")[-LOG_END:] if log.exists() else ""
        return f"{name}: rank {rank} {how_it_ended(status)}; its log ends with\n{said}"

    def kept(self, name: str) -> list[dict[str, Any]]:
        """What the ranks found so far, of those that found something."""
        return [json.loads(file.read_text()) for file in sorted(self.work.glob(f"{name}.*.json"))]


def await_keys(store: Any, keys: Sequence[str], seconds: float, processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    """See `AwaitKeys`."""
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at and not any(process.poll() for process in processes):
        with contextlib.suppress(RuntimeError):  # not all of them yet
            store.wait(list(keys), timedelta(seconds=LOOK_S))
            return True
    return False


# -- stages ------------------------------------------------------------------------------------------------------------


def tell_sizes(report: Report, gang: GangOf) -> None:
    rows: list[tuple[str, ...]] = []
    for word, environment in VARIANTS.items():
        num_groups = 12 if word == "as it comes" else 3
        found = gang.run("sizes", f"groups={num_groups}", name=f"sizes{len(rows)}", environment=environment)
        taken = [max(rank["taken"][index] for rank in found) for index in range(num_groups)]
        seconds = [max(rank["seconds"][index] for rank in found) for index in range(num_groups)]
        rows.append(
            (word, str(num_groups), mib(taken[0]), mib(median(taken[1:])), mib(sum(taken)), number(seconds[0]),
             number(median(seconds[1:])), mib(max(rank["lonely"] for rank in found)),
             number(min(rank["bus_gb_s"] for rank in found)))
        )  # fmt: skip
        report.keep(f"sizes {word}", found)
        if gang.options.device == "cpu":
            break
    head = ("NCCL", "groups", "first, MiB", "each further, MiB", "all, MiB", "first, s", "each further, s",
            "lonely one, MiB", "all-reduce, GB/s")  # fmt: skip
    report.table(
        f"Communicators of {gang.num_ranks} ranks, by what is free before and after their first use", head, rows
    )


def tell_cycles(report: Report, found: list[dict[str, Any]], word: str, limit_s: float) -> None:
    """Times of the slowest rank in each cycle."""
    num_cycles = min(len(rank["cycles"]["release"]) for rank in found)
    slowest = {
        part: [max(rank["cycles"][part][index] for rank in found) for index in range(num_cycles)]
        for part in ("release", "restore", "first")
    }
    both = [sum(pair) for pair in zip(slowest["release"], slowest["restore"], strict=True)]
    rows = [
        (part, number(values[0]), number(median(values[1:])), number(quantile(values[1:], 0.95)))
        for part, values in (*slowest.items(), ("release + restore", both))
    ]
    most = max(rank["num_groups"] for rank in found)
    report.table(f"{word}: {most} groups on the fullest of {len(found)} ranks, {num_cycles} cycles, the slowest rank",
                 ("", "first cycle, s", "median of the rest, s", "95 %, s"), rows)  # fmt: skip
    report.keep(f"{word} rows", rows)
    report.goal(f"{word}: release + restore of all groups, s, median", median(both[1:]), at_most=limit_s)
    # the least of five counts: a thread that was joined may be seen for a moment still
    few = max(1, min(5, num_cycles // 2))
    drift = [max(least(rank, what, slice(-few, None)) - least(rank, what, slice(0, few)) for rank in found)
             for what in (0, 1)]  # fmt: skip
    lost = max(rank["counts"][1][2] - rank["counts"][-1][2] for rank in found)
    report.say(f"- {word}: after {num_cycles} cycles {drift[0]} files, {drift[1]} threads, {mib(lost)} MiB drift; "
               f"all-reduce {number(min(r['bus_before'] for r in found))} -> "
               f"{number(min(r['bus_after'] for r in found))} GB/s")  # fmt: skip
    report.goal(f"{word}: files and threads more after all cycles", float(sum(drift)), at_most=0.0)
    slower = max(rank["bus_before"] / rank["bus_after"] - 1 for rank in found)
    report.keep(f"{word} all-reduce slower by", slower)


def least(rank: dict[str, Any], what: int, part: slice) -> int:
    return min(count[what] for count in rank["counts"][part])


def tell_reload(report: Report, gang: GangOf) -> None:
    is_cpu = gang.options.device == "cpu"
    before = [] if is_cpu else [settled_used(rank) for rank in range(gang.num_ranks)]
    residue: list[int] = []

    def go_on(store: Any, come: AwaitKeys) -> None:
        """All ranks have released for the first time and wait for this."""
        keys = [f"measured away.2/{rank}" for rank in range(gang.num_ranks)]
        if not come(keys, 90.0):
            return
        if not is_cpu:
            residue.extend(settled_used(rank) - before[rank] for rank in range(gang.num_ranks))
        store.set("parent measured", "1")

    cycles = f"cycles={gang.options.cycles}"
    found = gang.run("reload", cycles, f"seconds={gang.options.seconds}", limit_s=gang.options.seconds + 100,
                     meanwhile=go_on)  # fmt: skip
    report.keep("reload", found)
    tell_cycles(report, found, "reload", RELOAD_S)
    if is_cpu:
        return
    shares = [quantile([freed / rank["held"] for freed in rank["freed"][1:]], 0.05) or 0.0 for rank in found]
    per_group = [median(rank["cycles"]["restore"][1:]) / rank["num_groups"] for rank in found]
    rows = [
        (str(index), str(rank["num_groups"]), mib(rank["held"]), mib(median(rank["freed"][1:])), number(shares[index]),
         number(per_group[index]), mib(rank["loaded_once"]), mib(residue[index]))
        for index, rank in enumerate(found)
    ]  # fmt: skip
    head = ("rank", "groups", "held, MiB", "freed by a release, MiB", "share, 5 %", "restore, s a group",
            "NCCL's code, kept, MiB", "process on the GPU, MiB")  # fmt: skip
    report.table("What a drop gives back", head, rows)
    report.goal("reload: share of the communicators' bytes that a release frees", min(shares), at_least=FREED_SHARE)
    report.goal("residue of a released rank with its context, GiB (NVML)", max(residue) / GIB, at_most=RESIDUE_GIB)


def tell_unfinished(report: Report, name: str, found: list[dict[str, Any]]) -> None:
    """Of a gang that did not come to its end: what its ranks found, and the cycles that they did."""
    report.keep(f"{name}, unfinished", found)
    if not any("cycles" in rank for rank in found):
        return
    rows = [
        (str(index), str(len(rank.get("freed", ()))),
         *(number(median(rank.get("cycles", {}).get(part, ())[1:])) for part in ("release", "restore", "first")),
         mib(median(rank.get("freed", ())[1:])), " -> ".join(str(at[0]) for at in ends(rank)),
         " -> ".join(str(at[1]) for at in ends(rank)),
         mib(ends(rank)[0][2] - ends(rank)[-1][2] if ends(rank) else None))
        for index, rank in enumerate(found)
    ]  # fmt: skip
    head = ("rank", "cycles done", "release, s", "restore, s", "first use, s", "freed, MiB", "files", "threads",
            "drift, MiB")  # fmt: skip
    report.table(f"{name}, as far as it went (medians without the first cycle)", head, rows)


def ends(rank: dict[str, Any]) -> list[list[int]]:
    """What was counted after the second cycle and after the last."""
    seen = rank.get("counts", [])
    return [seen[1], seen[-1]] if len(seen) > 1 else []


def tell_kill(report: Report, gang: GangOf) -> None:
    last = gang.num_ranks - 1
    # else torch's watchdog takes the process down as soon as NCCL tells of the dead peer
    found = gang.run("kill", dying=[last], limit_s=80.0, environment={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    report.keep("kill", found)
    rows = [
        (str(index), number(rank["limit_s"]), number(rank["told_s"]), number(rank["aborted_s"]), mib(rank["held"]),
         mib(rank["left"]), rank["said"][:120])
        for index, rank in enumerate(found)
    ]  # fmt: skip
    head = ("survivor", "limit, s", "told after, s", "abort took, s", "held, MiB", "left, MiB", "said")
    report.table(f"Rank {last} killed while the others wait for it on the device", head, rows)
    latest = max(rank["told_s"] + rank["aborted_s"] - rank["limit_s"] for rank in found)
    report.goal("survivor has left after its limit, s", latest, at_most=LEAVES_S)
    num_named = sum(f"rank {last}" in rank["said"] for rank in found)
    report.goal("survivors that name the dead rank", float(num_named), at_least=float(len(found)))


def mib(num_bytes: float | None) -> str:
    return number(None if num_bytes is None else num_bytes / MIB)


TELL: dict[str, Callable[[Report, GangOf], None]] = {
    "sizes": tell_sizes, "reload": tell_reload, "kill": tell_kill,
}  # fmt: skip


def compile_proxy(report: Report) -> None:
    started_s = time.monotonic()
    try:
        load()
    except MemoryFault as error:
        report.missing(str(error))
    report.say(f"- proxy backend compiled and loaded in {time.monotonic() - started_s:.0f} s")


def measure(options: argparse.Namespace) -> None:
    is_cpu = options.device == "cpu"
    report = Report(f"memory_communicators{options.ranks}", is_dry=is_cpu)
    if {"reload", "kill"} & set(options.stages.split(",")):
        compile_proxy(report)
    work = work_folder() / f"communicators{options.ranks}"
    work.mkdir(parents=True, exist_ok=True)
    gang = GangOf(options, work)
    tell_when_ended(report, lambda: tell_cut_off(report, gang))
    trouble: list[str] = []
    for stage in options.stages.split(","):
        began_s = time.monotonic()
        if options.ends_at - began_s < LEAST_S:
            trouble.append(f"{stage}: no time was left for it")
            report.say(f"- {trouble[-1]}")
            continue
        gang.name = ""
        try:
            TELL[stage](report, gang)
        except GangFailedError as error:
            trouble.append(str(error))
            report.say(f"- {stage} FAILED: {error}")
            if gang.name:
                tell_unfinished(report, gang.name, gang.kept(gang.name))
        report.say(f"- {stage}: {time.monotonic() - began_s:.0f} s")
    if trouble:
        report.tell_goals()
        report.failed("\n".join(text.splitlines()[0] for text in trouble))
    report.end()


def tell_cut_off(report: Report, gang: GangOf) -> None:
    """The part is ended from outside: the gang at work as far as it came."""
    if gang.name:
        for rank in range(gang.num_ranks):
            report.say(gang.end_of(gang.name, rank, None))
        tell_unfinished(report, gang.name, gang.kept(gang.name))


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    args.add_argument("--stages", type=some_of(STAGES), default=",".join(STAGES))
    args.add_argument("--cycles", type=int, default=50)
    args.add_argument("--seconds", type=float, default=45.0, help="for the cycles of reload")
    options = args.parse_args()
    options.ends_at = time.monotonic() + part_seconds(3600.0)
    if options.device == "cpu":
        options.cycles = min(options.cycles, 4)
    measure(options)


if __name__ == "__main__":
    main()
