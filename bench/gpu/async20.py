"""20 asynchronous steps of a model of 0.6B's shape (random weights, a reward with spread and no meaning): how fast.

python async20.py [--placement colocated|two|halves] [--engine launched|attach] [--backend torch|megatron]
                  [--traffic] [--balanced] [--device cpu]

`--balanced`: each batch is trained twice, so that training takes about as long as generating: what is left of waiting,
and what of the trainer's time has no name; the run is asked why, on the way. `--traffic`: also what a step sends in
messages, counted as by bench/step_traffic.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import string
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

from figures import Report, number, parser, peak_memory, repeating, work_folder
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
    has_begun,
    newest_run,
    overrides,
    placement_overrides,
    stage,
    up,
)

BENCH = Path(__file__).resolve().parent.parent
NUM_STEPS = 20
BALANCED_STEPS = 50
"""So many that the first batch, for which training waits, is a small part."""
PROMPT_LETTERS = 120
ASK_S = 3.0


def write_prompts(path: Path, num: int, seed: int) -> None:
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": "".join(rng.choices(string.ascii_letters, k=PROMPT_LETTERS)), "label": ""} for _ in range(num))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_sets(choice: Choice, url: str) -> list[str]:
    """What the run file is told besides."""
    sets = placement_overrides(choice)
    if choice.is_cpu:
        sets += ["rollout.max_new_tokens=8", "algo.batch_size=2", "rollout.num_samples=4"]
    return [*sets, *overrides(choice, url)]


@contextlib.contextmanager
def asking(runs: Path) -> Generator[list[str]]:
    """While it is open the newest run is asked every few seconds what holds it back; its answers."""
    said: list[str] = []

    def ask() -> None:
        run_dir = newest_run(runs)
        if run_dir is None or not has_begun(run_dir):
            return
        words = [sys.executable, "-m", "myxa.launch", "why", "--run", str(run_dir)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0:
            said.append(" / ".join(done.stdout.split("\n")[:2]))

    with repeating(ask, ASK_S):
        yield said


def main() -> None:
    args = parser(__doc__)
    add_choices(args, with_halves=True)
    args.add_argument("--shape", default="0.6b")
    args.add_argument("--limit", type=float, default=280.0)
    args.add_argument("--traffic", action="store_true")
    args.add_argument("--balanced", action="store_true")
    options = args.parse_args()
    choice = chosen(options)
    name = f"{'async_balanced' if options.balanced else 'async20'}_{options.placement}"
    report, work = Report(name, is_dry=choice.is_cpu), work_folder() / name
    stage(work, "async20.toml", "spread_reward.py", launches=choice.launches)
    watch = Stopwatch(report)
    config = make_apart(work / "model", "dry" if choice.is_cpu else options.shape, options.device)
    write_prompts(work / "data" / "prompts.jsonl", 4000, seed=1)
    watch.lap(f"model of {config.num_parameters:,} parameters, and data")
    num_steps = BALANCED_STEPS if options.balanced else NUM_STEPS
    program: tuple[str, ...] = ()
    if options.traffic:
        os.environ["PYTHONPATH"] = f"{BENCH}:{os.environ.get('PYTHONPATH', '')}"
        program = ("--program", "step_traffic:build")
    try:
        with engine_for(choice, work / "model", work / "server.log", mem_fraction=0.25) as server:
            url = server.wait() if server is not None else ""
            watch.lap("server")
            sets = run_sets(choice, url)
            if options.balanced:
                sets = ["algo.epochs=2", f"run.num_steps={num_steps}", *sets]
            asked = asking(work / "runs" / "async20") if options.balanced else contextlib.nullcontext([])
            with asked as said, peak_memory() as used:
                run_dir = up(work / "async20.toml", sets, limit_s=options.limit, more=program)
            watch.lap("run")
    except (RunFailedError, ServerDiedError) as error:
        report.failed(str(error))
    report.say(f"- trainer: {facts_of(run_dir)}; peak of the GPU: {number(max(used) / 1024)} GiB")
    run = read_run(run_dir)
    tell_run(report, "run", run, config)
    if options.traffic:
        sys.path.insert(0, str(BENCH))
        from step_traffic import per_step, table

        report.say(table({f"async20, {options.shape}": per_step(run_dir)}))
    if options.balanced:
        for text in said[-3:]:
            report.say(f"- myxa why: {text}")
        is_told = "trainer/0" in run.idle  # not in a run of a second
        idle, named = (sum(run.idle["trainer/0"].values()), 1 - run.nameless["trainer/0"]) if is_told else (None, None)
        report.goal("idle share of the trainer", idle, at_most=0.05)
        report.goal("share of the trainer's time that has a name", named, at_least=0.95)
    report.goal("steps", float(len(run.steps)), at_least=num_steps)
    report.end()


if __name__ == "__main__":
    main()
