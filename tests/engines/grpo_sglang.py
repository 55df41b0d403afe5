#!/usr/bin/env python3
"""A short GRPO run whose tokens come from a real SGLang server: `make sglang-cpu` runs it after the contract.

The demo's task and its run file, with another engine: `engine.attach` points to a server that this script starts on the
warm model, and the held-out reward must rise clearly. Ends with 0 when it does, and also, with a loud line, when SGLang
cannot be imported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.engines.real_server import real_server
from tests.engines.run_sglang import why_not

from myxa.launch.demo.run import DemoOptions, warm_up

RISE = 0.2
"""By how much the held-out reward must have grown at the end."""
CONTEXT = 128
MAX_RUNNING = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that can import sglang")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("runs/sglang-grpo"), help="what was there is removed")
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    reason = why_not(options.python, options.device)
    if reason:
        print(f"\n{'!' * 100}\nSKIPPED: no run on the real SGLang: {options.python} cannot import it:\n{reason}\n{'!' * 100}")  # fmt: skip
        return 0
    shutil.rmtree(options.folder, ignore_errors=True)
    warm = warm_up(DemoOptions(options.folder))
    return warm.exit_code or asyncio.run(learn(options))


async def learn(options: argparse.Namespace) -> int:
    begun = time.monotonic()
    flags = ("--context-length", str(CONTEXT), "--max-running-requests", str(MAX_RUNNING))
    async with real_server(
        options.python, (options.folder / "sft/export").absolute(), options.folder / "server.log",
        device=options.device, extra=flags,
    ) as server:  # fmt: skip
        print(f"SGLang answers after {time.monotonic() - begun:.0f} s at {server.url}", flush=True)
        command = [
            sys.executable, "-m", "myxa.launch", "up", str(options.folder / "rl.toml"),
            "--set", f'run.dir="{options.folder.absolute()}"', "--set", f"run.num_steps={options.steps}",
            "--set", 'roles.rollout.kind="sglang"', "--set", f'engine.attach=["{server.url}"]',
        ]  # fmt: skip
        begun = time.monotonic()
        run = await asyncio.to_thread(subprocess.run, command, timeout=900)
        wall_s = time.monotonic() - begun
    if run.returncode:
        return run.returncode
    run_dir = max(options.folder.glob("grpo-*"), key=lambda path: path.stat().st_mtime)
    values = [json.loads(line)["values"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [one["eval/reward"] for one in values if "eval/reward" in one]
    lags = [one["lag/max"] for one in values if "lag/max" in one]
    print(f"held-out reward {rewards[0]:.2f} -> {rewards[-1]:.2f} in {len(lags)} steps and {wall_s:.0f} s, oldest token {max(lags):g} steps")  # fmt: skip
    return 0 if rewards[-1] >= rewards[0] + RISE else 1


if __name__ == "__main__":
    sys.exit(main())
