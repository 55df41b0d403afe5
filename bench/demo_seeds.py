"""The demo with several seeds in a row: does each reach the reward, in time, within the staleness bound?

    python bench/demo_seeds.py [--seeds 5] [--first 0]

Prints one row per seed from the metrics of its two runs; exits 1 if any seed misses the promise
(held-out reward below 0.35 at the start, at least 0.85 at the end, under 90 s, largest lag at most 2).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

START_BELOW = 0.35
END_AT_LEAST = 0.85
WALL_BELOW_S = 90.0
LAG_AT_MOST = 2


def demo(seed: int, folder: Path) -> dict[str, float]:
    """One demo; its summary."""
    command = [sys.executable, "-m", "myxa.launch", "demo", "--seed", str(seed), "--dir", str(folder)]
    began_s = time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise SystemExit(f"seed {seed}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    ended_s = time.time()
    (run_dir,) = (path for path in folder.glob("grpo-*") if path.is_dir())
    rl_s = ended_s - datetime.strptime(run_dir.name.removeprefix("grpo-")[:15], "%Y%m%d-%H%M%S").timestamp()
    steps = [json.loads(line)["values"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [values["eval/reward"] for values in steps if "eval/reward" in values]
    lags = [values["lag/max"] for values in steps if "lag/max" in values]
    wall_s = ended_s - began_s
    return {
        "eval_start": rewards[0], "eval_end": rewards[-1], "max_lag": max(lags), "steps": len(lags),
        "sft_s": wall_s - rl_s, "rl_s": rl_s, "wall_s": wall_s,
    }  # fmt: skip


def main() -> None:
    """Run and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    print("| seed | held-out before | after | wall s | of it sft | of it rl | steps | largest lag | kept |")
    print("|---|---|---|---|---|---|---|---|---|")
    all_kept = True
    with tempfile.TemporaryDirectory() as parent:
        for seed in range(args.first, args.first + args.seeds):
            s = demo(seed, Path(parent) / f"seed{seed}")
            kept = (
                s["eval_start"] < START_BELOW
                and s["eval_end"] >= END_AT_LEAST
                and s["wall_s"] < WALL_BELOW_S
                and s["max_lag"] <= LAG_AT_MOST
            )
            all_kept &= kept
            print(
                f"| {seed} | {s['eval_start']:.3f} | {s['eval_end']:.3f} | {s['wall_s']:.1f} | {s['sft_s']:.1f} "
                f"| {s['rl_s']:.1f} | {s['steps']:.0f} | {s['max_lag']:.0f} | {'yes' if kept else 'NO'} |",
                flush=True,
            )
    sys.exit(0 if all_kept else 1)


if __name__ == "__main__":
    main()
