"""What a launched SGLang does until it serves, in seconds, and the same once more on the same machine.

    python engine_start.py [--backend torch|megatron] [--starts 2] [--steps 3] [--device cpu]

Each start is a short run of async20. Phases are those that the run tells (`engine-loading` events); the second start
shows what kernel caches save. On a CPU the engine is our own, which has no such phases.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from async20 import write_prompts
from figures import Report, number, parser, work_folder
from make_model import make_apart
from run_figures import lines, read_run
from trial_runs import RunFailedError, Stopwatch, add_choices, chosen, newest_run, overrides, stage, up

CACHES = (".triton", ".cache/flashinfer", ".cache/sglang", ".cache/tvm-ffi", ".cache/deep_gemm", ".cache/myxa")
"""Of kernels, below the home folder."""


def phases(events: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """What the engine did and for how many seconds, from the run's first word until it runs; captures counted."""
    begun = events[0]["wall_s"]
    told = [(begun, "before its first word")]
    for event in events:
        if event["kind"] == "engine-loading":
            told.append((event["wall_s"], event["text"].rpartition(" its server ")[2]))
        elif event["kind"] == "phase" and event["text"].endswith("-> running"):
            told.append((event["wall_s"], ""))
            break
    found: list[tuple[str, float]] = []
    for (at, doing), (after, _) in pairwise(told):
        name, _, count = doing.partition(": ")
        if count and found and found[-1][0].partition(": ")[0] == name:
            found[-1] = doing, found[-1][1] + after - at
        else:
            found.append((doing, after - at))
    return [*found, ("from the first word to running", told[-1][0] - begun)]


def cached() -> str:
    """MiB of each cache of kernels that is there."""
    places = {name: Path.home() / name for name in CACHES}
    places |= {name: Path(value) for name, value in os.environ.items() if name.endswith("_CACHE_DIR")}
    sizes = {
        name: sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) / 2**20
        for name, place in places.items()
        if place.is_dir()
    }
    return ", ".join(f"{name} {size:.1f} MiB" for name, size in sizes.items()) or "none"


def main() -> None:
    args = parser(__doc__)
    add_choices(args)
    args.add_argument("--starts", type=int, default=2)
    args.add_argument("--steps", type=int, default=3)
    args.add_argument("--limit", type=float, default=60.0, help="seconds of a run, from the time its engine serves")
    options = args.parse_args()
    options.engine = "embedded" if options.device == "cpu" else "launched"
    choice = chosen(options)
    report = Report("engine_start", is_dry=choice.is_cpu)
    work, watch = work_folder() / "engine_start", Stopwatch(report)
    stage(work, "async20.toml", "spread_reward.py", launches=choice.launches)
    make_apart(work / "model", "dry" if choice.is_cpu else "0.6b", options.device)
    write_prompts(work / "data" / "prompts.jsonl", 4000, seed=1)
    watch.lap("model and data")
    report.say(f"- caches of kernels before: {cached()}")
    sets = [f"run.num_steps={options.steps}", *(["rollout.max_new_tokens=8"] if choice.is_cpu else [])]
    tables: list[dict[str, float]] = []
    for number_of in range(1, options.starts + 1):
        try:
            run_dir = up(work / "async20.toml", [*sets, *overrides(choice, "")], limit_s=options.limit)
        except RunFailedError as error:
            failed = newest_run(work / "runs" / "async20")
            if failed is not None:
                report.say(f"- as far as it came: {phases(list(lines(failed / 'events.jsonl')))}")
            report.failed(str(error))
        watch.lap(f"start {number_of}, with its run of {len(read_run(run_dir).steps)} steps")
        found = phases(list(lines(run_dir / "events.jsonl")))
        report.say(f"- start {number_of}: " + ", ".join(f"{doing} {seconds:.1f} s" for doing, seconds in found))
        report.keep(f"start {number_of}", found)
        report.say(f"- caches of kernels after: {cached()}")
        tables.append(dict(found))
    names = list(dict.fromkeys(name for table in tables for name in table))
    head = ("phase", *(f"start {k + 1}, s" for k in range(len(tables))))
    report.table("Until a launched engine serves", head,
                 [(name, *(number(table.get(name)) for table in tables)) for name in names])  # fmt: skip
    report.end()


if __name__ == "__main__":
    main()
