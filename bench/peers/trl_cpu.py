"""The demo's second stage by myxa and by TRL, one after the other on the same cores, from the same warm model.

    python bench/peers/trl_cpu.py [--steps 120] [--rounds 2] [--seed 0]

Same model, prompts, reward, group, batch, rate and number of cores. Four rows: myxa as in the demo (groups without
spread left out, weights at most two steps old); with the filter alone; with neither; TRL, which has neither. TRL's
generation is that of transformers: its server needs vLLM, which needs a GPU. Its evaluation answers each held-out
prompt once, as ours. Seconds count from the start of the command; CPU seconds are those of all processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from environment import python_with

from myxa.launch.demo.run import DemoOptions, warm_up

HERE = Path(__file__).resolve().parent
STOP = 0.9
ROWS: dict[str, list[str] | None] = {
    "myxa, as in the demo": [],
    "myxa, synchronous": ["async.max_staleness=0"],
    "myxa, synchronous, no filter": ["async.max_staleness=0", 'algo.group_filter="none"'],
    "TRL": None,
}
"""What the run file is told besides; None: not ours."""


@dataclass
class Found:
    """One run."""

    start_s: float
    """From the command to the first step's end."""
    step_s: float
    """Median."""
    num_steps: int
    cpu_s: float
    reward: float
    """Held out, at the end."""
    reached_s: float
    """From the command to the evaluation that reached STOP; infinite: none did."""
    rewards: list[float] = field(default_factory=list)


def cpu_of_children() -> float:
    """Seconds of all that ended and was waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def judged(began_s: float, cpu_s: float, steps: list[float], evals: list[tuple[float, float]]) -> Found:
    """`steps`: wall time of each; `evals`: wall time and reward."""
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    reached = [wall_s - began_s for wall_s, reward in evals if reward >= STOP]
    return Found(
        start_s=steps[0] - began_s,
        step_s=statistics.median(gaps),
        num_steps=len(steps),
        cpu_s=cpu_s,
        reward=evals[-1][1],
        reached_s=min(reached, default=float("inf")),
        rewards=[reward for _, reward in evals],
    )


def ours(demo: Path, sets: list[str], seed: int, num_steps: int) -> Found:
    """One run of `myxa up`."""
    runs = Path(tempfile.mkdtemp(dir=demo, prefix="runs-"))
    command = [sys.executable, "-m", "myxa.launch", "up", str(demo / "rl.toml"), "--quiet"]
    for one in (f'run.dir="{runs}"', f"run.seed={seed}", f"run.num_steps={num_steps}", *sets):
        command += ["--set", one]
    began_s, cpu_s = time.time(), cpu_of_children()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1200)
    cpu_s = cpu_of_children() - cpu_s
    (run_dir,) = (path for path in runs.glob("grpo-*") if path.is_dir())
    points = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [point["wall_s"] for point in points if "train/step_s" in point["values"]]
    evals = [(point["wall_s"], point["values"]["eval/reward"]) for point in points if "eval/reward" in point["values"]]
    return judged(began_s, cpu_s, steps, evals)


def theirs(demo: Path, python: str, seed: int, num_steps: int) -> Found:
    """One run of TRL."""
    events = Path(tempfile.mkdtemp(dir=demo, prefix="trl-")) / "events.jsonl"
    command = [python, str(HERE / "trl_demo.py"), str(demo), str(events), "--steps", str(num_steps)]
    command += ["--seed", str(seed), "--stop", str(STOP), "--threads", str(len(os.sched_getaffinity(0)))]
    began_s, cpu_s = time.time(), cpu_of_children()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=2400)
    cpu_s = cpu_of_children() - cpu_s
    told = [json.loads(line) for line in events.read_text().splitlines()]
    steps = [one["wall_s"] for one in told if one["what"] == "step"]
    evals = [(one["wall_s"], one["reward"]) for one in told if one["what"] == "eval" and one["reward"] is not None]
    return judged(began_s, cpu_s, steps, evals)


def row(name: str, found: list[Found]) -> str:
    """Medians over the rounds."""

    def middle(values: list[float]) -> float:
        return statistics.median(values)

    reached = [one.reached_s for one in found]
    told = "not reached" if middle(reached) == float("inf") else f"{middle(reached):.0f}"
    cpu_s = middle([one.cpu_s / one.num_steps for one in found])
    return (
        f"| {name} | {middle([one.start_s for one in found]):.1f} | {middle([one.step_s for one in found]):.2f} "
        f"| {cpu_s:.2f} | {middle([float(one.num_steps) for one in found]):.0f} "
        f"| {middle([one.rewards[0] for one in found]):.2f}, {middle([one.reward for one in found]):.2f} | {told} |"
    )


def main() -> None:
    """All rows, round by round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    python = python_with(["trl"])
    found: dict[str, list[Found]] = {name: [] for name in ROWS}
    with tempfile.TemporaryDirectory() as parent:
        demo = Path(parent) / "demo"
        warm_up(DemoOptions(folder=demo, seed=options.seed, is_quiet=True))
        for number in range(options.rounds):
            for name, sets in ROWS.items():
                seed = options.seed + number
                one = (
                    theirs(demo, python, seed, options.steps) if sets is None else ours(demo, sets, seed, options.steps)
                )
                found[name].append(one)
                print(name, one, file=sys.stderr, flush=True)
    print("| | first step after s | step s | CPU s a step | steps | held-out, start and end | 0.9 after s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, runs in found.items():
        print(row(name, runs))


if __name__ == "__main__":
    main()
