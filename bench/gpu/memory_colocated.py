"""A run whose trainer and engine share one GPU by turns; one rank has no communicators to give back. With `--gpus 2`
the trainer is a gang of a rank on each, whose communicators leave if all else does not suffice, and there is a server
on each GPU, or one over all of them.

    python memory_colocated.py [--shape 1.7b] [--mem-fraction 0.9,0.85] [--steps 7] [--device cpu]
                               [--gpus 1] [--servers each|one] [--set megatron.tp=2] [--fp8]

`--fp8`: servers hold their projections as FP8 in blocks, and the ranks quantise each version on its way.

An ordinary run of `memory_colocated.toml`, with SGLang launched by the rollout actor and Megatron as the trainer.
Exposed switch of a step, as the leader tells it: nobody computes, from asking for the trainer's turn to having it, and
from the end of the step over the hand-off of the weights to the engine's turn. What the manager tells of its leases is
in the second table. A run in which a process dies, that stands still, or that is not through in time is ended, and told
as far as it came. On a CPU: our engine and the torch trainer over the host's stand-in device.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async20 import write_prompts
from figures import Report, median, number, parser, part_seconds, percent, some_of, work_folder
from make_model import make_apart
from memory_device import device_bytes, used_by_process
from memory_figures import GIB, MIB, quantile, size, tell_when_ended
from run_figures import SKIPPED_STEPS, Run, lines, newest_run, read_run, tell_run
from run_looks import ends_of_logs
from trial_runs import RunFailedError, Stopwatch, cpu_overrides, facts_of, stage, up

WAYS = ("ours",)
RUN_FILE = "memory_colocated.toml"
WORKSPACE_MIB = 3072
"""Of the device for every 1024 tokens of a micro-batch: activations and logits of 1.7B, without recomputation (39 GiB
were seen for 16,384)."""
GROUPS = 48
"""In flight on all servers: if one had room for all, the first to adopt a version would take all."""
RESIDUE_MIB, GANG_RESIDUE_MIB = 1024.0, 1536.0
WEIGHTS_S = 7.0
"""What slime needs for 30B with 3B active on eight GPUs."""
SAMPLE_S = 0.2
OF_MEMORY = re.compile(r"out of memory|not enough memory|outofmemory|refused: .* short", re.IGNORECASE)
"""In what a run says that might go with less memory for the engine."""
TRAINER_STARTED = re.compile(r"trainer/\d+: attempt \d+ is process (\d+)")
LEAST_S = 100.0
"""A run with less time than this is not begun a second time."""
ENDING_S = 30.0
"""To ask a run that is not through what it does, and to end it."""
STILL_S = 90.0
"""A run past its start that tells nothing for so long stands still: longer than one change of hands may take."""


class Sampler(threading.Thread):
    """Looks at the GPUs from outside while a run goes on: the most that was used of one, the least that each process
    held on it once it had held more than a GiB there."""

    def __init__(self, num_gpus: int) -> None:
        super().__init__(daemon=True)
        self._num_gpus = num_gpus
        self.most = 0
        self.largest: dict[tuple[int, int], int] = {}
        self.least_after: dict[tuple[int, int], int] = {}
        """By GPU and process."""
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            for gpu in range(self._num_gpus):
                self.most = max(self.most, device_bytes(gpu)[0])
                for pid, used in used_by_process(gpu).items():
                    key = (gpu, pid)
                    self.largest[key] = max(self.largest.get(key, 0), used)
                    if self.largest[key] > GIB:
                        self.least_after[key] = min(self.least_after.get(key, used), used)

    def end(self) -> None:
        self._is_over.set()
        self.join(5)


@dataclass
class Way:
    """What one run gave; the first steps are left out."""

    name: str
    run: Run
    step_s: list[float]
    mem_fraction: float = 0.0
    told: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Of the leader's metrics under memory/, step by step."""
    leases: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Of the manager's, lease by lease."""
    residue: int | None = None
    most_used: int = 0
    is_whole: bool = True
    """Whether the run came to its end."""

    @classmethod
    def of(cls, name: str, run_dir: Path, mem_fraction: float, sampler: Sampler | None) -> Way:
        run = read_run(run_dir)
        way = cls(name, run, run.step_walls, mem_fraction)
        steps = sorted(run.steps)
        first = steps[SKIPPED_STEPS] if len(steps) > SKIPPED_STEPS else 0
        since_s = run.steps[first][0] if first in run.steps else run.started_s
        for point in memory_points(run_dir):
            is_leader = point["source"].startswith("trainer/")
            if point["step"] < first if is_leader else point["wall_s"] < since_s:
                continue
            into = way.told if is_leader else way.leases
            for key, value in point["values"].items():
                if key.startswith("memory/"):
                    into.setdefault(key, []).append(value)
        if sampler is not None:
            trainers = trainer_pids(run_dir)
            held = [used for (_, pid), used in sampler.least_after.items() if pid in trainers]
            way.residue, way.most_used = max(held, default=None), sampler.most
        return way

    @property
    def exposed_s(self) -> list[float]:
        return self.told.get("memory/exposed_s", [])

    @property
    def share(self) -> float | None:
        """Of the time of a step that nobody computed."""
        step, exposed = median(self.step_s), median(self.exposed_s)
        return exposed / step if step and exposed is not None else None


def memory_points(run_dir: Path) -> Iterator[dict[str, Any]]:
    for point in lines(run_dir / "metrics.jsonl"):
        if any(name.startswith("memory/") for name in point["values"]):
            yield point


def trainer_pids(run_dir: Path) -> set[int]:
    """As the launchers' logs have them."""
    logs = (path.read_text() for path in run_dir.glob("logs/launcher.*.log"))
    return {int(pid) for text in logs for pid in TRAINER_STARTED.findall(text)}


def sets_of(options: argparse.Namespace, way: str, mem_fraction: float, served: Path | None = None) -> list[str]:
    """What differs from the run file."""
    num_servers = options.gpus if options.servers == "each" else 1
    sets = [
        f'run.name="{way}"', f"run.num_steps={options.steps}", f"roles.trainer.count={options.gpus}",
        f"roles.rollout.count={num_servers}", f"rollout.max_groups={GROUPS // num_servers}",
        *(f"roles.{role}.max_restarts=0" for role in ("trainer", "rollout", "memory")),  # whoever dies ends the run
        *options.overrides,
    ]  # fmt: skip
    if options.device == "cpu":
        return [
            *sets, *cpu_overrides(), 'roles.trainer.kind="torch"', 'trainer.dtype="float32"', 'engine.dtype="float32"',
            'roles.rollout.kind="embedded"', 'roles.rollout.devices="cpu"', "roles.rollout.threads=1",
            f"memory.capacity_mb={options.capacity_mib * options.gpus}",
            "memory.workspace_mb=0", "rollout.max_new_tokens=8",
            f"rollout.max_groups={6 // num_servers}",
            "algo.batch_size=2", "rollout.num_samples=4",
        ]  # fmt: skip
    workspace = options.tokens * WORKSPACE_MIB // 1024
    devices = ",".join(str(gpu) for gpu in range(options.gpus))
    return [
        f'roles.trainer.devices="{devices}"', f'roles.rollout.devices="{devices}"',
        f"trainer.max_tokens_per_microbatch={options.tokens}", f"memory.workspace_mb={workspace}",
        f"sglang.mem_fraction_static={mem_fraction:g}",
        # SGLang's own all-reduce is compiled when the server starts, and works by NVLink multicast where there is any
        *(["sglang.disable_custom_all_reduce=true"] if options.gpus > num_servers else []),
        *([f'weights.served_folder="{served}"', 'algo.correction="tis"', 'sglang.fp8_gemm_backend="triton"']
          if served else []),
        *sets,
    ]  # fmt: skip


def try_run(report: Report, options: argparse.Namespace, way: str, work: Path) -> Way | None:
    """The run at the highest fraction that goes; where none does, the last one that made steps; None: none did."""
    fractions = [0.0] if options.device == "cpu" else [float(text) for text in options.mem_fraction.split(",")]
    best: Way | None = None
    for attempt, fraction in enumerate(fractions):
        started_s = time.monotonic()
        left_s = options.give_up_at - ENDING_S - started_s
        if attempt and left_s < LEAST_S:
            report.say(f"- {way} at {fraction:g}: no time is left for it\n")
            continue
        sampler = None if options.device == "cpu" else Sampler(options.gpus)
        if sampler is not None:
            sampler.start()
        try:
            sets = sets_of(options, way, fraction, work / "served" if options.fp8 else None)
            run_dir = up(work / RUN_FILE, sets, limit_s=min(options.limit, max(left_s, 5.0)), still_s=STILL_S)
        except RunFailedError as error:
            report.say(f"- {way} at {fraction:g}: FAILED after {time.monotonic() - started_s:.0f} s: {error}\n")
            best = as_far_as(report, way, error.run_dir, fraction, sampler) or best
            if not OF_MEMORY.search(str(error)):  # the same would happen at every other fraction
                break
            continue
        finally:
            if sampler is not None:
                sampler.end()
        report.say(f"- {way} at {fraction:g}: {time.monotonic() - started_s:.0f} s; trainer: {facts_of(run_dir)}\n")
        return Way.of(way, run_dir, fraction, sampler)
    return best


def as_far_as(report: Report, way: str, run_dir: Path | None, fraction: float, sampler: Sampler | None) -> Way | None:
    """What a run gave that did not end well; None if it made no step."""
    if run_dir is None or not (run_dir / "metrics.jsonl").exists():
        return None
    found = Way.of(f"{way}, cut short", run_dir, fraction, sampler)
    found.is_whole = False
    report.say(f"  it had made {len(found.run.steps)} steps; trainer: {facts_of(run_dir)}")
    return found if found.run.steps else None


def tell_ended(report: Report, options: argparse.Namespace, work: Path) -> None:
    """The part is ended from outside: the newest run as far as it came."""
    run_dir = newest_run(work / "runs" / RUN_FILE.removesuffix(".toml"))
    report.say(ends_of_logs((work / RUN_FILE).with_suffix(".log"), run_dir))
    way = as_far_as(report, "the newest run", run_dir, 0.0, None)
    if way is not None:
        tell_ways(report, [way])


def spread(values: list[float], digits: int = 2) -> str:
    middle = median(values)
    return "-" if middle is None else f"{middle:.{digits}f} ({quantile(values, 0.95):.{digits}f})"


def tell_ways(report: Report, ways: list[Way]) -> None:
    """Both beside each other, then everything about memory that the runs told."""
    rows: list[tuple[str, ...]] = []
    for title, cells in (
        ("mem_fraction_static", [f"{way.mem_fraction:g}" for way in ways]),
        ("steps", [str(len(way.run.steps)) for way in ways]),
        ("step, s: p50 (p95)", [spread(way.step_s) for way in ways]),
        ("of it training, s", [spread(way.run.column("train/step_s")) for way in ways]),
        ("exposed switch, s: p50 (p95)", [spread(way.exposed_s) for way in ways]),
        ("share of the step lost to switching", [percent(way.share) for way in ways]),
        ("trained tokens/s of wall time", [number(rate_of(way)) for way in ways]),
        ("trainer's process, least that it held", [held(way.residue) for way in ways]),
        ("most of the GPU that was used", [held(way.most_used) for way in ways]),
    ):
        rows.append((title, *cells))
    heads = [way.name for way in ways]
    report.table("The run", ("figure", *heads), rows)
    for title, columns in (
        ("Told by the leader, p50 (p95) of a step", [way.told for way in ways]),
        ("Told by the manager, p50 (p95) of a lease", [way.leases for way in ways]),
    ):
        names = sorted({name for one in columns for name in one})
        if names:
            report.table(title, ("metric", *heads), [(n, *(told(n, one.get(n, [])) for one in columns)) for n in names])
    report.keep("told", {way.name: {"steps": way.told, "leases": way.leases, "step_s": way.step_s} for way in ways})


def held(num_bytes: int | None) -> str:
    return size(num_bytes) if num_bytes else "-"


def told(name: str, values: list[float]) -> str:
    if not name.endswith("_bytes"):
        return spread(values, 3)
    middle = median(values)
    return "-" if middle is None else size(middle)


def rate_of(way: Way) -> float | None:
    tokens = way.run.column("train/num_tokens")
    return sum(tokens[1:]) / sum(way.step_s) if way.step_s and sum(way.step_s) > 0 else None


def judge(report: Report, options: argparse.Namespace, ways: list[Way]) -> None:
    for way in ways:
        report.goal(f"{way.name}: steps", float(len(way.run.steps)), at_least=float(options.steps))
    ours = next((way for way in ways if way.name == "ours"), None)
    if ours is None:
        return
    report.goal("ours: exposed switch of a step, s", median(ours.exposed_s), at_most=1.0)
    most = RESIDUE_MIB if options.gpus == 1 else GANG_RESIDUE_MIB
    report.goal("ours: residue of the trainer, MiB", ours.residue and ours.residue / MIB, at_most=most)
    least = 0.8 if options.gpus >= 8 else 0.9 if options.gpus == 1 else 0.85
    report.goal("ours: mem_fraction_static", ours.mem_fraction, at_least=least)
    if options.fp8:
        parts = [median(ours.run.others.get(f"weights/{name}_s", [])) for name in ("publish", "adopt")]
        to_engines = None if None in parts else sum(part or 0.0 for part in parts)
        report.goal("ours: seconds from the trainer's weights to the engines", to_engines, at_most=WEIGHTS_S)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--ways", type=some_of(WAYS), default=",".join(WAYS))
    args.add_argument("--shape", default="1.7b")
    args.add_argument("--gpus", type=int, default=1, help="one rank of the trainer on each")
    args.add_argument("--servers", choices=("each", "one"), default="each", help="one a GPU, or one over all")
    args.add_argument("--mem-fraction", default="0.9,0.85", help="tried in this order")
    args.add_argument("--steps", type=int, default=7)
    args.add_argument("--tokens", type=int, default=8192, help="of a micro-batch, at most")
    args.add_argument("--limit", type=float, default=0.0, help="seconds a run may take; 0 = its share of all")
    args.add_argument("--budget", type=float, default=0.0, help="seconds for all of it; 0 = as the script says, or 285")
    args.add_argument("--part", default="memory_colocated", help="its name in the figures")
    args.add_argument("--capacity-mib", type=int, default=0, help="of the stand-in device of a dry run; 0 = chosen")
    args.add_argument("--fp8", action="store_true")
    args.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    options = args.parse_args()
    is_cpu = options.device == "cpu"
    options.budget = options.budget or part_seconds(285.0)
    options.limit = options.limit or options.budget / len(options.ways.split(","))
    options.give_up_at = time.monotonic() + options.budget
    report = Report(options.part, is_dry=is_cpu)
    work = work_folder() / "memory_colocated"
    tell_when_ended(report, lambda: tell_ended(report, options, work))
    stage(work, RUN_FILE, "spread_reward.py", launches=not is_cpu)
    watch = Stopwatch(report)
    config = make_apart(
        work / "model", "dry" if is_cpu else options.shape, options.device, work / "served" if options.fp8 else None
    )
    write_prompts(work / "data" / "prompts.jsonl", 4000, seed=1)
    watch.lap(f"model of {config.num_parameters:,} parameters, and data")
    if is_cpu:
        options.steps = 4
        options.capacity_mib = options.capacity_mib or 16 * config.num_parameters // MIB + 3
    ways: list[Way] = []
    failed: list[str] = []
    for name in options.ways.split(","):
        way = try_run(report, options, name, work)
        if way is None or not way.is_whole:
            failed.append(name)
        if way is not None:
            tell_run(report, way.name, way.run, config, options.gpus)
            ways.append(way)
        watch.lap(name)
    if ways:
        tell_ways(report, ways)
        judge(report, options, [way for way in ways if way.is_whole])
    if failed:
        report.tell_goals()
        report.failed(", ".join(failed))
    report.end()


if __name__ == "__main__":
    main()
