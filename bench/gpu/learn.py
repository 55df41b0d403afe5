"""From random weights to a model that reverses words, by the actors of a real run on one or two GPUs.

    python learn.py [--placement colocated|two] [--engine launched|attach|embedded] [--backend torch|megatron]
                    [--shape 20m] [--device cpu]

Two ordinary runs one after the other: `learn_sft.toml`, then `learn_colocated.toml` or `learn_two.toml`, which change
hands by nothing but a model folder. With `--engine attach` the server is started beside the first run.
"""

from __future__ import annotations

from figures import Report, parser, work_folder
from make_model import make_learner
from reverse_task import write_data
from run_figures import read_run, tell_run
from servers import ServerDiedError
from trial_runs import (
    RunFailedError,
    Stopwatch,
    add_choices,
    add_learner,
    chosen,
    ends_of_logs,
    engine_for,
    facts_of,
    imitated,
    newest_run,
    overrides,
    stage,
    up,
)

from myxa.actors.models.hf_folder import read_config

REWARD = 0.9


def main() -> None:
    args = parser(__doc__)
    add_choices(args)
    add_learner(args)
    args.add_argument("--sft-limit", type=float, default=300.0, help="seconds that the first run may take")
    args.add_argument("--limit", type=float, default=270.0, help="seconds that the second run may take")
    options = args.parse_args()
    choice = chosen(options)
    report = Report(f"learn_{options.placement}", is_dry=choice.is_cpu)
    work = work_folder() / f"learn_{options.placement}"
    run_file = f"learn_{options.placement}.toml"
    stage(work, "learn_sft.toml", run_file, launches=choice.launches)
    watch = Stopwatch(report)
    config = make_learner(work / "model", options.shape, seed=options.seed)
    write_data(work / "data", options.seed, num_demonstrations=39_000, num_prompts=40_000, num_heldout=256)
    report.say(f"- model of {config.num_parameters:,} parameters, engine {choice.engine}, backend {choice.backend}")
    watch.lap("model and data")
    seed = f"run.seed={options.seed}"
    try:
        with engine_for(choice, work / "model", work / "server.log", mem_fraction=0.2) as server:
            warm = imitated(choice, work, [seed, f"run.num_steps={options.sft_steps}"], limit_s=options.sft_limit)
            watch.lap("supervised run")
            report.say(f"- its trainer: {facts_of(warm)}")
            tell_run(report, "supervised run", read_run(warm), config)
            url = server.wait() if server is not None else ""
            watch.lap("waiting for the server")
            run_dir = up(work / run_file, [seed, *overrides(choice, url)], limit_s=options.limit)
            watch.lap("reinforcement run")
    except (RunFailedError, ServerDiedError) as error:
        begun = newest_run(work / "runs" / run_file.removesuffix(".toml")) or newest_run(work / "runs" / "learn_sft")
        if begun is not None and (begun / "metrics.jsonl").exists():
            report.say(f"- trainer: {facts_of(begun)}")
            tell_run(report, "as far as it came", read_run(begun), config)
        report.failed(str(error))
    report.say(f"- trainer: {facts_of(run_dir)}")
    run = read_run(run_dir)
    tell_run(report, "run", run, read_config(work / "model"))
    if not run.evals:
        report.failed(f"nothing was evaluated\n{ends_of_logs(work / run_file, run_dir)}")
    report.goal("held-out reward at the end", run.evals[-1][1], at_least=REWARD)
    report.goal("seconds from the first dispatch", run.wall_s, at_most=240)
    report.end()


if __name__ == "__main__":
    main()
