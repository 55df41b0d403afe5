"""What asynchrony gains where lengths have a long tail: 0.6B, eta 2 against eta 0.

    python long_tail.py [--placement colocated|two] [--engine launched|attach] [--backend torch|megatron]
                        [--etas 0,2] [--shape 0.6b] [--device cpu]
    python long_tail.py --placement halves --gpus 8 [--part disaggregated]

With `halves` one half of the GPUs trains, each GPU of the other half has an engine, and a batch is larger by as much.

Batches of 8 groups of 8; lengths are lognormal (median 64, sigma 1.5, at most 1024 tokens) and the same in every run,
so nearly each batch has answers of the greatest length. Weights are random, rewards have a spread and no meaning. One
run after the other on the same server; a step's time is the mean of all but the first ones, which compile and fill up.
"""

from __future__ import annotations

import statistics

from async20 import write_prompts
from figures import Report, number, parser, percent, work_folder
from make_model import make_apart
from run_figures import Run, read_run, tell_run
from servers import ServerDiedError
from trial_runs import (
    HERE,
    Choice,
    RunFailedError,
    Stopwatch,
    add_choices,
    chosen,
    engine_for,
    overrides,
    placement_overrides,
    stage,
    up,
)

LEAST_GAIN = {"colocated": 2.5, "two": 2.5, "halves": 2.77}
"""The last: what AReaL reports (arXiv 2505.24298), there at equal quality, which random weights do not show."""
SKIPPED = 5
HEAD = ("eta", "step s", "x", "training s", "rollout tokens/s", "largest age", "idle: trainer, rollout actor")


def run_sets(choice: Choice, url: str, eta: int, num_steps: int) -> list[str]:
    """What the run file is told besides."""
    sets = [
        f"algo.batch_size={8 * choice.num_engines}", "rollout.num_samples=8",
        "rollout.max_new_tokens=1024", "engine.context_length=1536",
        f'rollout.workflow="{HERE / "tail_lengths.py"}:answer"', f"async.max_staleness={eta}",
        f"run.num_steps={num_steps}", f'run.name="eta{eta}"',
    ]  # fmt: skip
    sets += placement_overrides(choice)
    if choice.is_cpu:
        sets += [f"algo.batch_size={2 * choice.num_engines}", "rollout.num_samples=2"]
    return [*sets, *overrides(choice, url)]


def step_s(run: Run, skipped: int) -> float:
    """Mean seconds of a step, the first ones left out."""
    walls = [run.steps[step][0] for step in sorted(run.steps)][skipped:]
    return (walls[-1] - walls[0]) / (len(walls) - 1)


def row(choice: Choice, eta: int, run: Run, skipped: int, first_s: float | None) -> tuple[str, ...]:
    each_s = step_s(run, skipped)
    idle = {name: percent(sum(run.idle.get(name, {}).values())) for name in ("trainer/0", "rollout/0")}
    return (
        str(eta), number(each_s), number(first_s / each_s if first_s else 1.0),
        number(statistics.fmean(run.column("train/step_s"))),
        number(choice.num_engines * statistics.fmean(run.rates) if run.rates else None),
        number(max(run.column("lag/max"), default=None)), ", ".join(idle.values()),
    )  # fmt: skip


def main() -> None:
    args = parser(__doc__)
    add_choices(args, with_halves=True)
    args.add_argument("--shape", default="0.6b")
    args.add_argument("--part", default="", help="its name in the figures")
    args.add_argument("--etas", default="0,2", help="the first one is what the others are compared with")
    args.add_argument("--steps", type=int, default=24)
    args.add_argument("--limit", type=float, default=150.0, help="seconds of a run, from the time its engine serves")
    options = args.parse_args()
    choice = chosen(options)
    name = options.part or f"long_tail_{options.placement}"
    report = Report(name, is_dry=choice.is_cpu)
    work, watch = work_folder() / name, Stopwatch(report)
    stage(work, "async20.toml", "spread_reward.py", launches=choice.launches)
    config = make_apart(work / "model", "dry" if choice.is_cpu else options.shape, options.device)
    write_prompts(work / "data" / "prompts.jsonl", 4000, seed=1)
    watch.lap("model and data")
    rows: list[tuple[str, ...]] = []
    times: dict[int, float] = {}
    skipped = 1 if choice.is_cpu else SKIPPED
    try:
        with engine_for(choice, work / "model", work / "server.log", mem_fraction=0.25) as server:
            url = server.wait() if server is not None else ""
            watch.lap("server")
            for eta in (int(word) for word in options.etas.split(",")):
                sets = run_sets(choice, url, eta, options.steps)
                run = read_run(up(work / "async20.toml", sets, limit_s=options.limit))
                watch.lap(f"run with eta {eta}")
                rows.append(row(choice, eta, run, skipped, next(iter(times.values()), None)))
                times[eta] = step_s(run, skipped)
                report.say(f"- {', '.join(f'{head} {cell}' for head, cell in zip(HEAD, rows[-1], strict=True))}")
                tell_run(report, f"eta {eta}", run, config, choice.num_engines)
    except (RunFailedError, ServerDiedError) as error:
        report.failed(str(error))
    report.table("Lognormal lengths, 64 samples a step", HEAD, rows)
    if {0, 2} <= set(times):
        report.goal("gain of eta 2 over eta 0", times[0] / times[2], at_least=LEAST_GAIN[options.placement])
    report.end()


if __name__ == "__main__":
    main()
