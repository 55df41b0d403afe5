"""Agents from outside with the real engine: programs with the OpenAI SDK learn through the gateway, on one GPU.

    python agents.py [--backend torch|megatron] [--shape 20m] [--device cpu]

Two SGLang servers on the first GPU, with one rollout actor and one gateway each; the trainer beside them. The agent's
second turn continues its first: the share of prompt tokens that a server had in its cache says whether sessions stay
with their engine, since only the server of the first turn can have it. Afterwards `bench/gateway.py` measures a server
alone against the same server through a gateway.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from figures import Report, parser, work_folder
from make_model import make_learner
from reverse_task import write_data
from run_figures import lines, read_run, tell_run
from servers import Server, ServerDiedError, running
from trial_runs import (
    AS_LAUNCHED,
    RunFailedError,
    Stopwatch,
    add_choices,
    add_learner,
    chosen,
    facts_of,
    imitated,
    newest_run,
    overrides,
    stage,
    up,
)

from myxa.actors.models.hf_folder import read_config

REWARD = 0.8
HIT_RATE = 0.3
"""Of all prompt tokens: with sessions that change their engine at each turn it is near 0."""


def metric(run_dir: Path, name: str) -> list[float]:
    """What all actors told of it."""
    return [point["values"][name] for point in lines(run_dir / "metrics.jsonl") if name in point["values"]]


def gateway_figures(report: Report, url: str, model: Path, *, is_dry: bool) -> None:
    """`bench/gateway.py` on a server that runs, with short and with long turns."""
    program = Path(__file__).parents[1] / "gateway.py"
    sizes = ["--sessions", "16" if is_dry else "512", "--rounds", "3"]
    for tokens in ("8",) if is_dry else ("32", "256"):
        command = [sys.executable, str(program), "--attach", url, "--model", str(model), *sizes, "--tokens", tokens]
        found = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
        report.say(f"Gateway before one server, turns of {tokens} tokens\n\n{found.stdout}")
        if found.returncode:
            report.failed(f"bench/gateway.py ended with {found.returncode}:\n{found.stderr[-2500:]}")


def main() -> None:
    args = parser(__doc__)
    add_choices(args)
    add_learner(args)
    args.add_argument("--sft-limit", type=float, default=150.0, help="seconds that the first run may take")
    args.add_argument("--limit", type=float, default=230.0, help="seconds that the second run may take")
    options = args.parse_args()
    choice = chosen(options)
    report = Report("agents", is_dry=choice.is_cpu)
    work = work_folder() / "agents"
    stage(work, "learn_sft.toml", "agents.toml", "reverse_agent.py")
    watch = Stopwatch(report)
    config = make_learner(work / "model", options.shape, seed=options.seed, context_length=2048)
    write_data(work / "data", options.seed, num_demonstrations=39_000, num_prompts=40_000, num_heldout=256)
    report.say(f"- model of {config.num_parameters:,} parameters, two servers, backend {choice.backend}")
    seed = f"run.seed={options.seed}"
    first, second = (
        Server(
            folder=work / "model", log=work / f"server{index}.log", is_sglang=not choice.is_cpu, mem_fraction=0.15,
            extra=AS_LAUNCHED,
        )
        for index in range(2)
    )  # fmt: skip
    try:
        with running(first), running(second):
            imitated(choice, work, [seed, f"run.num_steps={options.sft_steps}"], limit_s=options.sft_limit)
            watch.lap("supervised run")
            urls = [first.wait(), second.wait()]
            watch.lap("waiting for the servers")
            joined = ", ".join(f'"{url}"' for url in urls)
            sets = [seed, f"engine.attach=[{joined}]", *overrides(choice, "")]
            run_dir = up(work / "agents.toml", sets, limit_s=options.limit)
            watch.lap("reinforcement run")
            gateway_figures(report, urls[0], work / "model", is_dry=choice.is_cpu)
            watch.lap("gateway before one server")
    except (RunFailedError, ServerDiedError) as error:
        begun = newest_run(work / "runs/agents") or newest_run(work / "runs/learn_sft")
        if begun is not None and (begun / "metrics.jsonl").exists():
            report.say(f"- trainer: {facts_of(begun)}")
            tell_run(report, "as far as it came", read_run(begun), config)
        report.failed(str(error))
    report.say(f"- trainer: {facts_of(run_dir)}")
    run = read_run(run_dir)
    tell_run(report, "run", run, read_config(work / "model"))
    hits = metric(run_dir, "rollout/prefix_cache_hit_rate")
    report.keep("prefix_cache_hit_rate", hits)
    differences = run.column("train/logprob_diff_abs_mean")
    report.say(
        f"- log-prob difference of engine and trainer, mean of the steps: {sum(differences) / len(differences):.4f}"
    )
    report.goal("held-out reward at the end", run.evals[-1][1] if run.evals else None, at_least=REWARD)
    report.goal("prefix cache hit rate, mean", sum(hits) / len(hits) if hits else None, at_least=HIT_RATE)
    report.end()


if __name__ == "__main__":
    main()
