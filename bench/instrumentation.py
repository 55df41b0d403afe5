"""What it costs to measure: one run whose time accounting and telemetry are on and off by turns.

    python bench/instrumentation.py [--slices 120] [--slice-s 2] [--batch 16] [--tokens 24] [--seed 0] [--out DIR]

All processes switch at the same moments (by the clock that they share), so that both halves are the same run, the
same work and the same neighbours on the machine. Off means: no meter, no metrics, no events, no spans, no arrows; no
bundle leaves any actor, and monitor and sinks stand idle. Counted are the training steps and, by the kernel's clock,
the processor time of all processes of the run; the model hardly learns, so that a step stays the same work. Each
slice with instrumentation is compared with the two slices without that lie around it; printed are the medians of
these ratios, in brackets the middle half of them, and the interval that holds the median in 90 of 100 resamplings.
Prints markdown.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from instrumentation_parts import SLICE_VARIABLE, STEPS_FILE

from myxa.actors.models.tiny import make_tiny_model
from myxa.launch.demo.run import write_rows

HERE = Path(__file__).resolve().parent
WARM_SLICES = 4
GOAL = 1.01
RUN = """
[run]
name = "instrumentation"
dir = "runs"
num_steps = 1000000
seed = {seed}
[model]
path = "model"
[data]
train = "prompts.jsonl"
[rollout]
num_samples = 8
max_new_tokens = {tokens}
[algo]
batch_size = {batch}
group_filter = "none"
[optimizer]
lr = 1e-9
[trainer]
export_at_end = false
"""


@dataclass(frozen=True)
class Slice:
    """A stretch in which nothing was switched."""

    is_on: bool
    steps: float
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Ratio:
    """With instrumentation over without."""

    name: str
    values: Sequence[float]

    def row(self, rng: random.Random) -> str:
        """Of the table."""
        low, _, high = statistics.quantiles(self.values, n=4)
        again = sorted(statistics.median(rng.choices(self.values, k=len(self.values))) for _ in range(4000))
        sure = f"{again[200]:.4f} to {again[3800]:.4f}"
        return f"| {self.name} | {statistics.median(self.values):.4f} | {low:.4f} to {high:.4f} | {sure} |"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=120)
    parser.add_argument("--slice-s", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        slices = measure(prepare(folder, options), options)
    report(slices, options)


def prepare(folder: Path, options: argparse.Namespace) -> Path:
    """A small model and data."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(folder / "model", preset="0p5m", seed=options.seed)
    write_rows(folder / "prompts.jsonl", 2000, seed=options.seed)
    (folder / "run.toml").write_text(RUN.format(seed=options.seed, tokens=options.tokens, batch=options.batch))
    return folder


def measure(folder: Path, options: argparse.Namespace) -> list[Slice]:
    """Start the run, read the clocks at each switch, end the run."""
    command = [sys.executable, "-m", "myxa.launch", "up", str(folder / "run.toml"), "--quiet"]
    command += ["--program", "instrumentation_parts:build"]
    env = {**os.environ, "PYTHONPATH": str(HERE), SLICE_VARIABLE: str(options.slice_s)}
    with (folder / "printed.txt").open("w") as printed:
        run = subprocess.Popen(command, cwd=folder, env=env, stdout=printed, stderr=subprocess.STDOUT)
    try:
        steps_file = wait_for_steps(run, folder)
        edges: list[tuple[float, float]] = []
        for _ in range(WARM_SLICES + options.slices + 1):
            now = time.monotonic()
            time.sleep(options.slice_s - now % options.slice_s)
            if run.poll() is not None:
                raise SystemExit((folder / "printed.txt").read_text())
            edges.append((time.monotonic(), cpu_s(run.pid)))
        stamps = [float(line) for line in steps_file.read_text().split()]
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
        run.wait(120)
    return cut(edges[WARM_SLICES:], stamps, options.slice_s)


def wait_for_steps(run: subprocess.Popen[bytes], folder: Path) -> Path:
    """The file that the trainer writes, once it made some steps."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        found = list(folder.glob(f"runs/*/{STEPS_FILE}"))
        if found and len(found[0].read_text().split()) > 5:
            return found[0]
        if run.poll() is not None:
            break
        time.sleep(0.5)
    raise SystemExit((folder / "printed.txt").read_text())


def cpu_s(launcher_pid: int) -> float:
    """Processor time of all processes of the run so far."""
    launcher = psutil.Process(launcher_pid)
    total = 0.0
    for process in (launcher, *launcher.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def cut(edges: Sequence[tuple[float, float]], stamps: Sequence[float], slice_s: float) -> list[Slice]:
    """Steps, wall and processor time between neighbouring edges; a step across an edge counts by its parts."""
    return [
        Slice(
            is_on=int((start + end) / 2 / slice_s) % 2 == 0,
            steps=_steps_until(stamps, end) - _steps_until(stamps, start),
            wall_s=end - start,
            cpu_s=after - before,
        )
        for (start, before), (end, after) in pairwise(edges)
    ]


def _steps_until(stamps: Sequence[float], moment: float) -> float:
    index = bisect_right(stamps, moment)
    if index in (0, len(stamps)):
        return float(index)
    return index + (moment - stamps[index - 1]) / (stamps[index] - stamps[index - 1])


def report(slices: Sequence[Slice], options: argparse.Namespace) -> None:
    """Print the table."""
    whole = [(a, b, c) for a, b, c in zip(slices, slices[1:], slices[2:], strict=False) if b.is_on and b.steps > 0]
    wall = [2 * (b.wall_s / b.steps) / (a.wall_s / a.steps + c.wall_s / c.steps) for a, b, c in whole]
    cpu = [2 * (b.cpu_s / b.steps) / (a.cpu_s / a.steps + c.cpu_s / c.steps) for a, b, c in whole]
    steps, seconds = sum(s.steps for s in slices), sum(s.wall_s for s in slices)
    print(f"{len(whole)} slices of {options.slice_s:g} s, batch {options.batch}, {steps / seconds:.1f} steps/s\n")
    print("| with instrumentation / without | median | middle half | 90 % of resamplings |")
    print("|---|---|---|---|")
    rng = random.Random(options.seed)
    ratios = (Ratio("wall time a step", wall), Ratio("processor time a step, all processes", cpu))
    for ratio in ratios:
        print(ratio.row(rng))
    worst = max(statistics.median(ratio.values) for ratio in ratios)
    print(f"\ngoal: at most {GOAL:.2f}; {'met' if worst <= GOAL else 'missed'}")


if __name__ == "__main__":
    main()
