"""A run on two GPUs, or on one, that is tuned while it goes, through its control socket, as an operator would.

    python live.py [--placement two|colocated] [--shape 0.6b] [--backend torch] [--window 12] [--device cpu]

1. concurrency from 32 requests to 256 and back: tokens a second of the engine in a window before and after, and what
   `why` says in each, beside how busy both GPUs were in the same window (nvidia-smi).
2. max_staleness from 8 to 1: ages of the groups of each step before and after the boundary that the change was made at.
Nothing is restarted in between. On a CPU: our engine and the torch trainer, smaller numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async20 import write_prompts
from figures import Report, median, number, parser, percent, work_folder
from kill_in_broadcast import Trial, TrialFailedError
from make_model import make_apart
from run_figures import newest_run
from trial_runs import Stopwatch, cpu_overrides, ends_of_logs, stage

from myxa.core.errors import MyxaError
from myxa.launch.control.client import ControlClient

RUN_FILE = "live.toml"
TRAINER, ROLLOUT = "trainer/0", "rollout/0"
SETTLE_S = 4.0
"""After a change, before the next window: requests of before run on."""
SAMPLE_S = 0.25
LAG_STEPS = 6


class Busy(threading.Thread):
    """How busy each GPU was, by nvidia-smi, which tells the share of time in which a kernel ran."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, list[float]]] = []
        self._is_over = threading.Event()

    def run(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        while not self._is_over.wait(SAMPLE_S):
            told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.split()
            self.seen.append((time.monotonic(), [float(word) / 100 for word in told]))

    def share(self, gpu: int, since_s: float) -> float | None:
        values = [busy[gpu] for at, busy in self.seen if at >= since_s and len(busy) > gpu]
        return sum(values) / len(values) if values else None

    def end(self) -> None:
        self._is_over.set()
        if self.is_alive():
            self.join(5)


@dataclass
class Window:
    """What was seen in a stretch of the run."""

    name: str
    tokens_per_s: float
    why: str
    bound: str
    shares: dict[str, float]
    """Of computing, by actor, as the run accounts for it."""
    busy: dict[str, float | None] = field(default_factory=dict[str, "float | None"])


@dataclass
class Operator:
    """The run, and a hand on it."""

    trial: Trial
    client: ControlClient
    busy: Busy | None
    window_s: float
    rollout_gpu: int = 1

    def set(self, **values: Any) -> tuple[dict[str, Any], float]:
        """The change, and how long it took until the answer."""
        started = time.monotonic()
        reply = self.client.ask("set", values=values, reason="benchmark")
        if reply["refused"]:
            raise TrialFailedError(f"{values} was refused: {reply['refused']}")
        return reply, time.monotonic() - started

    def look(self, name: str) -> Window:
        """Watch for the length of the window."""
        since, since_wall = time.monotonic(), time.time()
        time.sleep(self.window_s)
        tokens_per_s = rate(self.trial.run_dir, since_wall)
        told = self.client.ask("why", window_s=self.window_s)
        shares = self.client.ask("status")["snapshot"]
        computes = {actor: shares.get(f"time/{actor}", {}).get("compute", 0.0) for actor in (TRAINER, ROLLOUT)}
        gpus = {} if self.busy is None else {TRAINER: 0, ROLLOUT: self.rollout_gpu}
        busy = {actor: self.busy.share(gpu, since) for actor, gpu in gpus.items() if self.busy is not None}
        return Window(name, tokens_per_s, told["sentence"], told["bound"], computes, busy)

    def version(self) -> int:
        return int(self.client.ask("status")["status"]["version"])


def up(options: argparse.Namespace, work: Path) -> subprocess.Popen[bytes]:
    sets = [f'roles.trainer.kind="{options.backend}"', f'run.dir="{work / "runs"}"']
    if options.placement == "colocated":
        sets += ['roles.rollout.devices="0"', 'weights.channel="cuda_ipc"', "sglang.mem_fraction_static=0.3"]
    sets += options.overrides
    if options.device == "cpu":
        sets += [
            *cpu_overrides(), 'roles.trainer.kind="torch"', 'roles.rollout.kind="embedded"',
            'roles.rollout.devices="cpu"', "roles.rollout.threads=1", 'engine.dtype="float32"',
            "rollout.max_new_tokens=16", "rollout.max_groups=1",
        ]  # fmt: skip
    command = [sys.executable, "-m", "myxa.launch", "up", str(work / RUN_FILE), "--quiet"]
    with (work / "live.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *(word for item in sets for word in ("--set", item))], stdout=log, stderr=subprocess.STDOUT
        )


def rate(run_dir: Path, since_s: float) -> float:
    """Mean of what the rollout actor told of its speed since then, tokens a second."""
    rows = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    rates = [
        row["values"]["rollout/tokens_per_s"]
        for row in rows
        if row["source"] == ROLLOUT and row["wall_s"] >= since_s and "rollout/tokens_per_s" in row["values"]
    ]
    return sum(rates) / len(rates) if rates else 0.0


def lags(run_dir: Path) -> list[tuple[int, float]]:
    """(version made, oldest age of its groups)."""
    rows = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(row["step"], row["values"]["lag/max"]) for row in rows if "lag/max" in row["values"]]


def concurrency(operator: Operator, report: Report, few: int, many: int) -> None:
    windows = [operator.look(f"{few} groups")]
    reply, took = operator.set(concurrency=many)
    report.say(f"- concurrency {few} -> {many}: answered after {took * 1000:.0f} ms, change {reply['epoch']}")
    time.sleep(SETTLE_S)
    windows.append(operator.look(f"{many} groups"))
    operator.set(concurrency=few)
    time.sleep(SETTLE_S)
    windows.append(operator.look(f"{few} again"))
    operator.set(concurrency=many)
    rows = [
        (w.name, number(w.tokens_per_s), percent(w.shares[TRAINER]), percent(w.busy.get(TRAINER)),
         percent(w.shares[ROLLOUT]), percent(w.busy.get(ROLLOUT)), w.bound)
        for w in windows
    ]  # fmt: skip
    heads = (
        "window",
        "generated tokens/s",
        "trainer computes",
        "its GPU busy",
        "rollout computes",
        "its GPU busy",
        "why",
    )
    report.table("Concurrency, changed through the socket", heads, rows)
    for w in windows:
        report.say(f"- {w.name}: {w.why}")
    report.goal("tokens/s at many / at few", windows[1].tokens_per_s / max(windows[0].tokens_per_s, 1.0), at_least=2.0)
    report.goal(
        "tokens/s back at few / at few", windows[2].tokens_per_s / max(windows[0].tokens_per_s, 1.0), at_most=1.5
    )


def staleness(operator: Operator, report: Report, until: Callable[[int], None]) -> None:
    until(operator.version() + 2 * LAG_STEPS)
    reply, took = operator.set(max_staleness=1)
    at = operator.version()
    report.say(f"- max_staleness 8 -> 1 at version {at}: answered after {took * 1000:.0f} ms, change {reply['epoch']}")
    until(at + 3 * LAG_STEPS)
    seen = lags(operator.trial.run_dir)
    before = [lag for version, lag in seen if version <= at][-LAG_STEPS:]
    after = [lag for version, lag in seen if version > at + 2][:LAG_STEPS]
    report.table("Oldest age in each of some steps", ("before", "after"), [(str(before), str(after))])
    report.goal("age before, median", median(before), at_least=2.0)
    report.goal("age after, largest", max(after, default=None), at_most=1.0)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--placement", choices=("two", "colocated"), default="two", help="GPUs: two, or a shared one")
    args.add_argument("--shape", default="0.6b")
    args.add_argument("--backend", choices=("torch", "megatron"), default="torch")
    args.add_argument("--window", type=float, default=12.0, help="seconds")
    args.add_argument("--limit", type=float, default=240.0)
    args.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    options = args.parse_args()
    is_cpu = options.device == "cpu"
    report = Report("live", is_dry=is_cpu)
    work = work_folder() / "live"
    stage(work, RUN_FILE, "spread_reward.py", launches=not is_cpu)
    watch = Stopwatch(report)
    config = make_apart(work / "model", "dry" if is_cpu else options.shape, options.device)
    write_prompts(work / "data" / "prompts.jsonl", 8000, seed=1)
    watch.lap(f"model of {config.num_parameters:,} parameters, and data")
    trial = Trial(work / "runs", up(options, work), time.monotonic() + options.limit)
    busy = None if is_cpu else Busy()
    try:
        drive(trial, busy, options, report, watch)
    except (TrialFailedError, MyxaError) as error:
        report.say(ends_of_logs(work / "live.log", newest_run(work / "runs")))
        report.failed(str(error))
    finally:
        if busy is not None:
            busy.end()
        trial.process.terminate()
        trial.process.wait(60)
    report.end()


def drive(trial: Trial, busy: Busy | None, options: argparse.Namespace, report: Report, watch: Stopwatch) -> None:
    trial.until(lambda: newest_run(trial.runs) is not None and (trial.run_dir / "control.json").exists(), "it began")
    client = ControlClient.of(trial.run_dir)
    window_s = 3.0 if options.device == "cpu" else options.window
    operator = Operator(trial, client, busy, window_s, rollout_gpu=int(options.placement == "two"))

    def until(version: int) -> None:
        trial.until(lambda: operator.version() >= version, f"version {version}", every_s=0.5)

    trial.until(lambda: bool(trial.events("run-started", "phase")), "its first event")
    trial.until(lambda: (client.ask("status")["status"] or {}).get("phase") == "running", "it ran", every_s=0.5)
    until(3)
    watch.lap("start to version 3")
    if busy is not None:
        busy.start()
    few, many = (1, 8) if options.device == "cpu" else (4, 32)
    concurrency(operator, report, few, many)
    staleness(operator, report, until)
    report.keep("history", client.ask("history"))
    watch.lap("tuning")


if __name__ == "__main__":
    main()
