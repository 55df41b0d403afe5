"""What asynchrony buys and what it costs: the same job at eta 0, 1, 2, 4, with and without correction.

    python bench/async_gain.py [--steps 40] [--etas 0,1,2,4] [--lr 3e-4] [--out bench_async]

Two loads, same prompts and seeds: slow rewards (lognormal, median 0.15 s) and long-tailed lengths. Each row is one
`myxa up` from the same warm model. Wall clock runs from the first dispatch to the last step, read from the run's own
metrics. The second table drops the correction: learning must be seen to collapse at eta = 4.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
WINDOW = 5


@dataclass(frozen=True)
class Result:
    """One run, read from its metrics."""

    eta: int
    wall_s: float
    """First dispatch to last step."""
    reach_s: float | None
    """First dispatch to a mean training reward (of 3 steps) at the target."""
    end_reward: float
    """Mean training reward of the last steps."""
    eval_reward: float
    """Held-out reward after the last step."""
    max_lag: int


def prepare(out: Path) -> Path:
    """The warm model and data: the demo's own supervised stage."""
    from myxa.launch.demo.run import DemoOptions, warm_up

    folder = out / "warm"
    if not (folder / "sft" / "export" / "config.json").exists():
        warm_up(DemoOptions(folder=folder))
    return folder


def run(folder: Path, out: Path, name: str, overrides: Sequence[str]) -> Path:
    """One `myxa up`; returns the run directory."""
    runs = out / name
    command = [sys.executable, "-m", "myxa.launch", "up", str(folder / "rl.toml")]
    for item in (f'run.name="{name}"', f'run.dir="{runs}"', "run.stop_reward=0.0", "eval.every=0", *overrides):
        command += ["--set", item]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return max((p for p in runs.iterdir() if p.is_dir() and not p.is_symlink()), key=lambda p: p.stat().st_mtime)


def read(run_dir: Path, eta: int, target: float) -> Result:
    """Figures of a finished run."""
    steps: dict[int, tuple[float, float, float]] = {}
    eval_reward = float("nan")
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        point = json.loads(line)
        values = point["values"]
        if "reward/mean" in values:
            steps[point["step"]] = (point["wall_s"], values["reward/mean"], values["lag/max"])
        eval_reward = values.get("eval/reward", eval_reward)
    start = next(
        e["wall_s"]
        for e in map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
        if e["kind"] == "phase" and e["text"].endswith("-> running")
    )
    rows = [steps[s] for s in sorted(steps)]
    reach = None
    for i in range(2, len(rows)):
        if sum(r[1] for r in rows[i - 2 : i + 1]) / 3 >= target:
            reach = rows[i][0] - start
            break
    tail = rows[-WINDOW:]
    return Result(
        eta=eta,
        wall_s=rows[-1][0] - start,
        reach_s=reach,
        end_reward=sum(r[1] for r in tail) / len(tail),
        eval_reward=eval_reward,
        max_lag=int(max(r[2] for r in rows)),
    )


def table(title: str, results: Sequence[Result], target: float) -> None:
    """Print a markdown table; ratios are against the first row."""
    base = results[0]
    print(f"\n### {title}\n")
    print(f"| eta | wall s | x | s to reward {target:g} | x | end reward | held-out | largest lag |")
    print("|---|---|---|---|---|---|---|---|")
    for r in results:
        reach = f"{r.reach_s:.1f}" if r.reach_s is not None else "-"
        gain = f"{base.reach_s / r.reach_s:.2f}" if r.reach_s and base.reach_s else "-"
        print(
            f"| {r.eta} | {r.wall_s:.1f} | {base.wall_s / r.wall_s:.2f} | {reach} | {gain} "
            f"| {r.end_reward:.3f} | {r.eval_reward:.3f} | {r.max_lag} |",
            flush=True,
        )


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--etas", default="0,1,2,4")
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--loads", default="slow,tail,uncorrected")
    parser.add_argument("--lr", type=float, default=3e-4, help="the demo's by default; staler data bears less")
    parser.add_argument("--out", type=Path, default=Path("bench_async"))
    args = parser.parse_args()
    etas = [int(e) for e in args.etas.split(",")]
    common = [f"run.num_steps={args.steps}", f"optimizer.lr={args.lr}"]
    folder = prepare(args.out)
    tasks = HERE / "slow_tasks.py"
    loads = {
        "slow": ("Slow rewards (lognormal, median 0.15 s)", [f'reward.fn="{tasks}:slow_reward"']),
        "tail": (
            "Long-tailed lengths",
            [
                f'reward.fn="{tasks}:plain_reward"',
                f'rollout.workflow="{tasks}:long_tail"',
                "rollout.max_turns=2",
                "engine.context_length=512",
            ],
        ),
        "uncorrected": (
            "Slow rewards without correction",
            [f'reward.fn="{tasks}:slow_reward"', 'algo.correction="none"'],
        ),
    }
    for key in args.loads.split(","):
        title, overrides = loads[key]
        results = []
        for eta in etas:
            extra = [*overrides, *common, f"async.max_staleness={eta}"]
            results.append(read(run(folder, args.out, f"{key}-{eta}", extra), eta, args.target))
        table(title, results, args.target)


if __name__ == "__main__":
    main()
