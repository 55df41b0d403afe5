"""Learning under fire: the demo's reinforcement learning with a random actor killed every ten seconds, and without.

    python bench/under_fire.py [--seeds 3] [--first 0] [--every 10] [--engines 1] [--ranks 1]

Both ways start from the same warm model, with the same seed and the same run file, and end when the held-out reward
is there. Prints one row per seed; exits 1 if one misses the promise: the same reward, in at most 1.6 times the time.
The kills are drawn by a seed (`tests/harness/nemesis.py`); the result of each prompt is read from the ledger.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.harness.ledger_audit import audit_ledger
from tests.harness.nemesis import RandomKills

from myxa.launch.demo.run import DemoOptions, warm_up

REWARD_AT_LEAST = 0.85
TIMES_AT_MOST = 1.6
LIMIT_S = 1800.0
ROLES = ("coordinator", "buffer", "monitor", "trainer", "rollout")
BOTH = (
    "trainer.checkpoint_every=1", "trainer.export_at_end=false",
    *(f"roles.{role}.max_restarts=1000" for role in ROLES),
    *(f'roles.{role}.when_hung="kill"' for role in ROLES),
)  # fmt: skip
"""Also undisturbed, so that the time of checkpoints is in both."""


@dataclass(frozen=True)
class Result:
    """One run."""

    seconds: float
    reward: float
    steps: int
    struck: Counter[str]
    """Actor -> times."""
    problems: tuple[str, ...]
    """Of the ledger."""


def learn(folder: Path, options: argparse.Namespace, seed: int, *, under_fire: bool) -> Result:
    """The demo's second stage, in a process of its own."""
    name = "fire" if under_fire else "calm"
    sets = [
        *BOTH, f'run.name="{name}"', f'run.dir="{folder}"', f"run.seed={seed}",
        f"roles.rollout.count={options.engines}", f"roles.trainer.count={options.ranks}",
    ]  # fmt: skip
    words = [word for item in sets for word in ("--set", item)]
    began = time.monotonic()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "myxa.launch", "up", str(folder / "rl.toml"), "--quiet", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    nemesis = RandomKills(launcher.pid, options.every, seed + 1)
    if under_fire:
        nemesis.start()
    try:
        said, _ = launcher.communicate(timeout=LIMIT_S)
    finally:
        launcher.kill()
        nemesis.stop()
    seconds = time.monotonic() - began
    if launcher.returncode:
        raise SystemExit(f"seed {seed}, {name}: exit {launcher.returncode}\n{said[-6000:]}")
    (run_dir,) = folder.glob(f"{name}-*")
    return read(run_dir, seconds, nemesis.killed)


def read(run_dir: Path, seconds: float, killed: list[str]) -> Result:
    """What the run's files tell."""
    points = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [point["values"]["eval/reward"] for point in points if "eval/reward" in point["values"]]
    steps = {point["step"] for point in points if "train/loss" in point["values"]}
    audit = audit_ledger(run_dir / "ledger.sqlite")
    return Result(seconds, rewards[-1], max(steps), Counter(killed), audit.problems)


def main() -> None:
    """Run and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--every", type=float, default=10.0, metavar="S", help="seconds between two kills")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    print("| seed | reward calm | under fire | calm s | under fire s | times | killed | steps calm, fire | kept |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    is_kept = True
    with tempfile.TemporaryDirectory() as parent:
        for seed in range(options.first, options.first + options.seeds):
            folder = Path(parent) / f"seed{seed}"
            with contextlib.redirect_stdout(io.StringIO()) as said:
                warm = warm_up(DemoOptions(folder, seed=seed, is_quiet=True))
            if warm.exit_code:
                raise SystemExit(f"seed {seed}: the warm start failed\n{said.getvalue()[-3000:]}")
            calm, fire = (learn(folder, options, seed, under_fire=is_fire) for is_fire in (False, True))
            times = fire.seconds / calm.seconds
            kept = fire.reward >= REWARD_AT_LEAST and times <= TIMES_AT_MOST and not fire.problems
            is_kept &= kept
            killed = ", ".join(f"{name} {count}" for name, count in sorted(fire.struck.items()))
            print(
                f"| {seed} | {calm.reward:.3f} | {fire.reward:.3f} | {calm.seconds:.1f} | {fire.seconds:.1f} "
                f"| {times:.2f} | {killed} | {calm.steps}, {fire.steps} | {'yes' if kept else 'NO'} |",
                flush=True,
            )
            for problem in fire.problems:
                print(f"\n{problem}", flush=True)
    sys.exit(0 if is_kept else 1)


if __name__ == "__main__":
    main()
