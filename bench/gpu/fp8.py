"""FP8 rollout with bfloat16 training: does it learn, and how far are the log-probs?

    python fp8.py [--backend torch|megatron] [--shape 20m] [--device cpu]

The runs of `learn.py`, attached to a server that holds its projections as FP8 in blocks (`myxa convert --dtype fp8`):
every version is quantised on its way, truncated importance sampling corrects for the difference. `fp8_speed.py`
measures such servers.
"""

from __future__ import annotations

from typing import Any

from make_model import make_learner
from run_figures import read_run, tell_run
from servers import FP8_SERVER, ServerDiedError, running
from trial_runs import (
    RunFailedError,
    attach_override,
    begun,
    imitated,
    learner_parser,
    overrides,
    server_for,
    up,
)

from myxa.actors.backends.convert import quantise_folder

REWARD = 0.85


def main() -> None:
    args = learner_parser(__doc__)
    args.add_argument("--limit", type=float, default=200.0, help="seconds that the second run may take")
    options, choice, report, work, watch = begun("fp8", args)
    config = make_learner(work / "model", options.shape, seed=options.seed)
    done = quantise_folder(work / "model", work / "served")
    report.say(f"- model of {config.num_parameters:,} parameters, {done['num_tensors']} tensors with its scales")
    served = work / ("model" if choice.is_cpu else "served")
    server = server_for(choice, served, work / "server.log", mem_fraction=0.2, extra=FP8_SERVER)
    seed = f"run.seed={options.seed}"
    try:
        with running(server):
            imitated(choice, work, [seed, f"run.num_steps={options.sft_steps}"], limit_s=300)
            watch.lap("supervised run")
            url = server.wait()
            watch.lap("waiting for the server")
            sets = [seed, 'algo.correction="tis"', attach_override(url), *overrides(choice, "")]
            if not choice.is_cpu:
                sets += [f'weights.served_folder="{served}"', 'weights.channel="cuda_ipc"']
            run_dir = up(work / "learn_colocated.toml", sets, limit_s=options.limit)
            watch.lap("reinforcement run")
    except (RunFailedError, ServerDiedError) as error:
        report.failed(str(error))
    run = read_run(run_dir)
    tell_run(report, "FP8 rollout, bfloat16 training", run, config)
    facts: dict[str, Any] = {
        name: run.column(f"train/{name}") for name in ("logprob_diff_abs_mean", "logprob_diff_abs_max")
    }
    for name, values in facts.items():
        if values:
            report.say(f"- {name}, mean of the steps: {sum(values) / len(values):.4f}")
    report.goal("held-out reward at the end", run.evals[-1][1] if run.evals else None, at_least=REWARD)
    report.end()


if __name__ == "__main__":
    main()
