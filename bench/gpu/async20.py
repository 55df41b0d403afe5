"""20 asynchronous steps of a model of 0.6B's shape (random weights, a reward with spread and no meaning): how fast.

python async20.py [--placement colocated|two] [--engine launched|attach] [--backend torch|megatron] [--device cpu]
                  [--traffic]

`--traffic`: also what a step sends in messages, counted as by bench/step_traffic.py.
"""

from __future__ import annotations

import json
import os
import random
import string
import sys
from pathlib import Path

from figures import Report, parser, work_folder
from make_model import make_apart
from run_figures import read_run, tell_run
from servers import ServerDiedError
from trial_runs import (
    Choice,
    RunFailedError,
    Stopwatch,
    add_choices,
    chosen,
    engine_for,
    facts_of,
    overrides,
    stage,
    up,
)

BENCH = Path(__file__).resolve().parent.parent
NUM_STEPS = 20
PROMPT_LETTERS = 120


def write_prompts(path: Path, num: int, seed: int) -> None:
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": "".join(rng.choices(string.ascii_letters, k=PROMPT_LETTERS)), "label": ""} for _ in range(num))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_sets(choice: Choice, url: str) -> list[str]:
    """What the run file is told besides."""
    sets = ['roles.rollout.devices="1"'] if choice.two_gpus else []
    if choice.is_cpu:
        sets = ["rollout.max_new_tokens=8", "algo.batch_size=2", "rollout.num_samples=4"]
    return [*sets, *overrides(choice, url)]


def main() -> None:
    args = parser(__doc__)
    add_choices(args)
    args.add_argument("--shape", default="0.6b")
    args.add_argument("--limit", type=float, default=280.0)
    args.add_argument("--traffic", action="store_true")
    options = args.parse_args()
    choice = chosen(options)
    report = Report(f"async20_{options.placement}", is_dry=choice.is_cpu)
    work = work_folder() / f"async20_{options.placement}"
    stage(work, "async20.toml", "spread_reward.py", launches=choice.launches)
    watch = Stopwatch(report)
    config = make_apart(work / "model", "dry" if choice.is_cpu else options.shape, options.device)
    write_prompts(work / "data" / "prompts.jsonl", 4000, seed=1)
    watch.lap(f"model of {config.num_parameters:,} parameters, and data")
    program: tuple[str, ...] = ()
    if options.traffic:
        os.environ["PYTHONPATH"] = f"{BENCH}:{os.environ.get('PYTHONPATH', '')}"
        program = ("--program", "step_traffic:build")
    try:
        with engine_for(choice, work / "model", work / "server.log", mem_fraction=0.25) as server:
            url = server.wait() if server is not None else ""
            watch.lap("server")
            run_dir = up(work / "async20.toml", run_sets(choice, url), limit_s=options.limit, more=program)
            watch.lap("run")
    except (RunFailedError, ServerDiedError) as error:
        report.failed(str(error))
    report.say(f"- trainer: {facts_of(run_dir)}")
    run = read_run(run_dir)
    tell_run(report, "run", run, config)
    if options.traffic:
        sys.path.insert(0, str(BENCH))
        from step_traffic import per_step, table

        report.say(table({f"async20, {options.shape}": per_step(run_dir)}))
    report.goal("steps", float(len(run.steps)), at_least=NUM_STEPS)
    report.end()


if __name__ == "__main__":
    main()
