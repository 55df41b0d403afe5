"""Time to quality on one GPU: a warmed-up model learns to reverse words, by verl and by myxa, until the same reward.

    python verl_learn.py [--cases myxa_sync,verl_polled,myxa_async,verl_tuned] [--shape 20m] [--device cpu]

The model comes from the supervised run of `learn` and is kept in the part's folder (GPU_WORK): a second call with the
same folder goes on from it. Same for all: model folder, words, reward (right or wrong), 64 prompts a step with 8
answers each at temperature 1, at most 16 tokens, one update a step (GRPO, clip 0.2 and 0.28, mean over tokens, no
filter, no KL), AdamW at 1e-4, and an evaluation of the same 256 words, sampled once each, at the start and every 5
steps. Each case is one program from its start (`myxa up`, `verl.trainer.main_ppo`), which brings its own SGLang;
myxa_sync and verl's take turns between generating and training, myxa_async has data at most two steps old. verl's cases
are those of verl_step.py. Where time is over the rest is left out. A dry run learns nothing: its myxa takes two steps,
its verl reads settings, words and reward.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import verl_step
from figures import Report, median, number, parser, part_seconds, peak_memory, some_of, work_folder
from make_model import make_learner
from reverse_task import write_data
from run_figures import lines, read_run
from servers import ServerDiedError, running
from trial_runs import Choice, RunFailedError, Stopwatch, add_learner, imitated, overrides, server_for, stage, up
from verl_step import ACTOR, MODEL, ROLLOUT

PROMPTS_A_STEP, LONGEST_PROMPT, LONGEST, CONTEXT = 64, 32, 16, 128
RATE = 1e-4
EVERY, NUM_HELDOUT = 5, 256
MOST_STEPS = 100
CASE_S = 300.0
"""For one case at most, from its start."""
NEEDED_S = (80.0, 170.0)
"""What a case of myxa, of verl takes to start; with less left it is not begun."""
STALENESS = {"myxa_sync": 0, "myxa_async": 2}
VERL = {"verl_polled": "polled", "verl_tuned": "tuned"}
CASES = ("myxa_sync", "verl_polled", "myxa_async", "verl_tuned")
HEAD = (
    "case", "seconds from the program's start", "from the first step's begin", "steps", "step, s (median)",
    "held-out reward before, after", "peak of the GPU, GiB",
)  # fmt: skip

UNFAIR = (
    "verl is made for models of billions: with this one most of its step is its own work between processes",
    "verl starts Ray and some twenty processes that import torch and transformers: little in a long run",
    "its trainer's attention is torch's over padded rows (SDPA): flash-attn's compiled part is not in the bundle",
    "it trains float32 weights in bfloat16, myxa bfloat16 weights with float32 masters; myxa's layers are compiled",
    "it stops training while it evaluates; myxa evaluates beside its training (both do it once before the first step)",
    "verl_tuned looks every 2 s for finished answers, as it comes; verl_polled every 0.05 s, by a sampler of ours",
    "none finds what torch.compile made for an earlier one, but verl_tuned the Triton kernels of verl_polled",
    "the order of the words is drawn by each itself",
    "SGLang 0.5.17 and transformers 5.12 are later than those that verl names (0.5.12, 5.9)",
)
"""Told with the figures."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    return float(" ".join(solution_str.split()) == ground_truth)  # one that is cut off is longer than any word


@dataclass
class Learnt:
    """How a case went; seconds count from the start of its program."""

    evals: list[tuple[int, float, float]] = field(default_factory=list)
    """Step, held-out reward, when it was told."""
    first_s: float | None = None
    """When its first step began."""
    step_s: float | None = None
    peak_mib: float = 0.0
    ended: str = ""

    def reached(self, reward: float) -> tuple[int, float, float] | None:
        """The first evaluation that good: what comes after it (myxa evaluates once more at its end) does not count."""
        return next((one for one in self.evals if one[1] >= reward), None)


def row(case: str, learnt: Learnt, reward: float) -> tuple[str, ...]:
    """Under HEAD; what was not reached is "-"."""
    reached = learnt.reached(reward)
    step, at_s = (str(reached[0]), reached[2]) if reached is not None else ("-", None)
    learning_s = at_s - learnt.first_s if at_s is not None and learnt.first_s is not None else None
    last = reached or (learnt.evals[-1] if learnt.evals else None)
    ends = f"{number(learnt.evals[0][1])}, {number(last[1])}" if last is not None else "-"
    return case, number(at_s), number(learning_s), step, number(learnt.step_s), ends, number(learnt.peak_mib / 1024)


def myxa_sets(case: str, options: Any, choice: Choice) -> list[str]:
    """For `learn_colocated.toml`."""
    sets = [
        *overrides(choice, ""), f"run.seed={options.seed}", f"run.num_steps={options.steps}",
        f"run.stop_reward={options.reward}", f"async.max_staleness={STALENESS[case]}", 'algo.group_filter="none"',
        f"optimizer.lr={RATE}", "optimizer.warmup_steps=0", f"eval.every={EVERY}", f"eval.num_prompts={NUM_HELDOUT}",
    ]  # fmt: skip
    return [*sets, "algo.batch_size=4", "eval.num_prompts=8", "eval.every=1"] if choice.is_cpu else sets


def by_myxa(work: Path, sets: list[str], limit_s: float) -> Learnt:
    learnt, began_s = Learnt(), time.time()
    with peak_memory() as seen:
        try:
            run_dir = up(work / "learn_colocated.toml", [*sets, f"run.max_wall_s={limit_s:.0f}"], limit_s=limit_s + 20)
        except RunFailedError as error:
            learnt.ended, run_dir = str(error), error.run_dir
    learnt.peak_mib = max(seen)
    if run_dir is not None and (run_dir / "metrics.jsonl").exists():
        run = read_run(run_dir)
        learnt.first_s = run.started_s - began_s if run.started_s else None
        learnt.step_s = median(run.step_walls)
        learnt.evals = [
            (point["step"], point["values"]["eval/reward"], point["wall_s"] - began_s)
            for point in lines(run_dir / "metrics.jsonl")
            if "eval/reward" in point["values"]
        ]
    return learnt


def verl_sets(case: str, options: Any, work: Path) -> list[str]:
    """For verl's command line; those of `verl_step`, and what differs."""
    return [
        *verl_step.settings(work, options.steps), *verl_step.case_settings(VERL[case], work),
        f"{MODEL}.path={work / 'sft' / 'export'}",
        f"data.train_files={work / 'prompts.parquet'}", f"data.val_files={work / 'heldout.parquet'}",
        f"data.train_batch_size={PROMPTS_A_STEP}", f"{ACTOR}.ppo_mini_batch_size={PROMPTS_A_STEP}",
        f"data.max_prompt_length={LONGEST_PROMPT}", f"data.max_response_length={LONGEST}",
        f"{ROLLOUT}.max_model_len={CONTEXT}", f"{ROLLOUT}.gpu_memory_utilization=0.2",
        f"{ROLLOUT}.agent.num_workers=8", "reward.num_workers=4",
        f"{ACTOR}.optim.lr={RATE}", f"{ACTOR}.optim.betas=[0.9,0.95]",
        "trainer.val_before_train=True", f"trainer.test_freq={EVERY}",
        f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=1.0", f"{ROLLOUT}.val_kwargs.n=1",
        *options.sets,
    ]  # fmt: skip


def by_verl(
    folder: Path, sets: list[str], environment: dict[str, str], options: Any, limit_s: float, report: Report
) -> Learnt:
    found = verl_step.run(folder, sets, environment, options.steps, limit_s, report, enough=options.reward)
    walls = [after - before for before, after in itertools.pairwise(found.at_s[verl_step.SKIPPED_STEPS - 1 :])]
    first_s = found.passed_s.get(verl_step.BEGINS)
    report.keep(f"{folder.name}, steps", found.steps)
    return Learnt(found.evals, first_s, median(walls), found.peak_mib, found.ended)


def warmed_up(report: Report, work: Path, choice: Choice, options: Any) -> None:
    """A model that is right in about a quarter of its answers, at `work/sft/export`, and the words."""
    stage(work, "learn_sft.toml", "learn_colocated.toml", launches=choice.launches)
    write_data(work / "data", options.seed, num_demonstrations=39_000, num_prompts=12_800, num_heldout=NUM_HELDOUT)
    for name in ("prompts", "heldout"):
        verl_step.write_parquet(work / "data" / f"{name}.jsonl", work / f"{name}.parquet")
    if (work / "sft" / "export").is_dir():
        report.say("- the warmed-up model is there from an earlier call")
        return
    watch = Stopwatch(report)
    make_learner(work / "model", options.shape, seed=options.seed)
    verl_step.name_turn_end(work / "model" / "tokenizer.json")
    sets = [f"run.seed={options.seed}", f"run.num_steps={options.sft_steps}"]
    server = server_for(choice, work / "model", work / "server.log", mem_fraction=0.2)
    try:
        with contextlib.nullcontext() if choice.is_cpu else running(server):  # its kernels are there for all cases
            imitated(choice, work, sets, limit_s=200.0)
            watch.lap("warm-up of the model by imitation")
            if not choice.is_cpu:
                server.wait()
                watch.lap("a first server, which compiles kernels")
    except (RunFailedError, ServerDiedError) as error:
        report.failed(str(error))


def main() -> None:
    args = parser(__doc__)
    add_learner(args)
    args.add_argument("--cases", default=",".join(CASES), type=some_of(CASES))
    args.add_argument("--reward", type=float, default=0.9, help="held-out reward that ends a case")
    args.add_argument("--steps", type=int, default=MOST_STEPS, help="at most, in a case")
    args.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE", help="for verl")
    options = args.parse_args()
    began, is_cpu = time.monotonic(), options.device == "cpu"
    report = Report("peer_verl_learn", is_dry=is_cpu)
    verl_step.require_verl(report)
    limit_s, work = part_seconds(545.0), work_folder() / "peer_verl_learn"
    work.mkdir(exist_ok=True)
    environment = verl_step.beside(work, compute_score)
    leave_out_verl()
    own_cache(work / "warm_up", os.environ)
    choice = Choice(is_cpu, "embedded" if is_cpu else "launched", "torch")
    warmed_up(report, work, choice, options)
    report.say("".join(f"- unfair: {one}\n" for one in UNFAIR))
    rows: list[tuple[str, ...]] = []
    for case in options.cases.split(","):
        left_s = min(limit_s - (time.monotonic() - began), CASE_S)
        if left_s < NEEDED_S[case in VERL]:
            report.say(f"- {case}: not begun, {left_s:.0f} s are left")
            continue
        for environs in (os.environ, environment):
            own_cache(work / case, environs)
        if case in STALENESS:
            learnt = by_myxa(work, myxa_sets(case, options, choice), left_s)
        elif is_cpu:
            verl_step.rehearse(report, work, {case: verl_sets(case, options, work)}, environment)
            continue
        else:
            learnt = by_verl(work / case, verl_sets(case, options, work), environment, options, left_s, report)
        report.keep(case, vars(learnt))
        if learnt.ended:
            report.say(f"- {case}: {learnt.ended}")
        rows.append(row(case, learnt, options.reward))
        report.table(f"Until a held-out reward of {options.reward:g}", HEAD, rows)
        best = max((reward for _, reward, _ in learnt.evals), default=None)
        report.goal(f"held-out reward of {case}", best, at_least=options.reward)
    report.end()


def own_cache(folder: Path, environment: MutableMapping[str, str]) -> None:
    """What torch.compile made for an earlier case is not found by a later one."""
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")


def leave_out_verl() -> None:
    """What comes for verl alone is not on the path of myxa's processes."""
    found = find_spec("verl")
    assert found is not None
    assert found.origin is not None
    site = Path(found.origin).parent.parent
    kept = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry and Path(entry) != site]
    os.environ["PYTHONPATH"] = ":".join(kept)


if __name__ == "__main__":
    main()
