"""verl (FSDP, SGLang, Ray) at the work of `async20`: shape, prompts, reward, group, batch, lengths, rate.

    python verl_step.py [--cases polled,tuned,shipped,async,separate] [--shape 0.6b] [--steps 8]
                         [--set KEY=VALUE ...] [--device cpu]

Each case is a run of verl's own program, with the kernels that our server has here (Triton attention, our sizes of
graphs): `shipped`: synchronous, trainer and server in turns, its defaults but for sizes, dynamic batches and gradient
checkpoints (none); `tuned`: what it offers to be faster where memory abounds (log-probs of the engine instead of a
second pass, as myxa does; the server keeps its memory; Liger's kernels; fused AdamW); `polled`: tuned, and its trainer
looks every 0.05 s for finished answers, not every 2 s (no setting says that: its key for a sampler of one's own does);
`async`: polled, with generation that is interrupted for training and goes on after it (`colocate_async`: all that it
has for one GPU); `separate`: polled, trainer and server on a GPU each, answers at most two versions old. The first
three steps are left out. Where time is over the rest is left out.
A dry run reads settings, prompts and reward with verl's own code and stops there: its trainer needs a GPU.
Needs verl, Ray and SGLang (peers/bundle_verl.py); TRL must not be importable beside them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from async20 import write_prompts
from figures import Report, median, number, parser, part_seconds, percent, some_of, used_mib, work_folder
from make_model import make_apart
from servers import end

from myxa.actors.engines.sglang.launch import hide_megatron

PROMPTS_A_STEP, GROUP, LONGEST = 16, 8, 256
LONGEST_PROMPT = 128
"""120 letters, each a token, and the three of the chat's template: five fewer."""
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Those of async20.toml."""
SKIPPED_STEPS = 3
LEAVING_S = 20.0
"""For a run whose steps are done; after it, it is ended."""
PARTS = ("gen", "old_log_prob", "adv", "update_actor", "update_weights")
BEGINS = "training begins"
MARKS = (
    (r"Started a local Ray instance", "Ray is there"),
    (r"dataset len", "prompts are read"),
    (r"actor and ref model engine initialized", "trainer's model is there"),
    (r"SGLang http server", "server begins"),
    (r"Load weight end", "server's weights are there"),
    (r"Capture .*graph.* end|[Cc]apture.*graph.*elapsed", "graphs are captured"),
    (r"all initialize finished", "all is there"),
    (r"Training Progress:", BEGINS),
)
"""In what it prints, and what has passed then."""

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
TUNED = (
    "algorithm.rollout_correction.bypass_mode=True",
    f"{ROLLOUT}.free_cache_engine=False",
    f"{MODEL}.use_liger=True",
    f"{ACTOR}.optim.override_optimizer_config={{fused:true}}",
)
POLLED = (
    *TUNED,
    "trainer.v1.sampler.custom_sampler.path=WORK/sampler.py",
    "trainer.v1.sampler.custom_sampler.name=Prompt",
)
ASYNC = (*POLLED[:-1], "trainer.v1.sampler.custom_sampler.name=PromptAsync")
CASES = {
    "shipped": (), "tuned": TUNED, "polled": POLLED,
    "async": (*ASYNC, "trainer.v1.trainer_mode=colocate_async"),
    "separate": (*ASYNC, "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=1",
                 "trainer.v1.separate_async.num_warmup_batches=2", "trainer.v1.sampler.max_off_policy_threshold=3",
                 "actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1",
                 f"{ROLLOUT}.checkpoint_engine.backend=nccl"),
}  # fmt: skip
"""Settings besides all the others; WORK stands for the folder of the part."""
SAMPLER = """from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


class Prompt(ReplayBuffer):
    def __init__(self, **given):
        super().__init__(poll_interval=0.05, **given)


class PromptAsync(ReplayBufferAsync):
    def __init__(self, **given):
        super().__init__(poll_interval=0.05, **given)
"""

UNFAIR = (
    "SGLang 0.5.17 and transformers 5.12 are later than those that verl names (0.5.12, 5.9)",
    "attention of its trainer is torch's (SDPA), not flash-attn's: no loss where all sequences are equally long",
    "it trains float32 weights in bfloat16, myxa bfloat16 weights with float32 masters; myxa's layers are compiled",
    "all answers are of one length: what asynchrony and removed padding gain with unequal ones is not seen",
    "myxa as async20 has data up to two steps old: beside `shipped` and `tuned` belongs async.max_staleness=0 too",
    "servers of both use Triton attention; FlashAttention 3 and FlashInfer are not in the bundle",
    "`shipped` and `tuned` wait in `gen` for full 2 s or 4 s: verl looks that often whether its answers are there",
)
"""Told with the figures."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    return zlib.crc32(solution_str.encode()) / 2**32


def settings(work: Path, num_steps: int) -> list[str]:
    """For verl's command line; all but these are its defaults."""
    engine = f"+{ROLLOUT}.engine_kwargs.sglang"
    return [
        *("algorithm.adv_estimator=grpo", "data.dataloader_num_workers=0", f"data.train_batch_size={PROMPTS_A_STEP}"),
        *(f"data.{kind}_files={work / 'prompts.parquet'}" for kind in ("train", "val")),
        *(f"data.max_prompt_length={LONGEST_PROMPT}", f"data.max_response_length={LONGEST}"),
        *(f"{MODEL}.path={work / 'model'}", f"+{MODEL}.override_config.attn_implementation=sdpa"),
        # to remove padding needs flash-attn's compiled part; the work of `async20` has none
        *(f"{MODEL}.use_remove_padding=False", f"{MODEL}.enable_gradient_checkpointing=False"),
        *(f"{ACTOR}.ppo_mini_batch_size={PROMPTS_A_STEP}", f"{ACTOR}.use_dynamic_bsz=True"),
        *(f"{ACTOR}.ppo_max_token_len_per_gpu=16384", f"{ACTOR}.clip_ratio_high=0.28"),
        *(f"{ACTOR}.optim.lr=1e-6", f"{ACTOR}.optim.weight_decay=0.0"),
        *(f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.n={GROUP}", f"{ROLLOUT}.tensor_model_parallel_size=1"),
        *(f"{ROLLOUT}.gpu_memory_utilization=0.3", f"{ROLLOUT}.max_model_len=1024", f"{ROLLOUT}.agent.num_workers=4"),
        *(f"{engine}.attention_backend=triton", f"{engine}.sampling_backend=pytorch", f"{engine}.grammar_backend=none"),
        *(f"{engine}.cuda_graph_bs_decode=[{','.join(map(str, GRAPH_SIZES))}]", f"{engine}.log_level=info"),
        f"{engine}.cuda_graph_backend_prefill=disabled",
        *(f"reward.custom_reward_function.path={work / 'reward.py'}", "reward.num_workers=2"),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
        *("trainer.logger=[console]", "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.resume_mode=disable"),
        *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1"),
        *(f"trainer.total_training_steps={num_steps}", "trainer.total_epochs=1"),
        *("ray_kwargs.ray_init.num_cpus=16", "+ray_kwargs.ray_init.include_dashboard=False"),
        *("+ray_kwargs.ray_init.object_store_memory=2000000000", "hydra.run.dir=.", "hydra.output_subdir=null"),
    ]


@dataclass
class Watched:
    """What a run of verl told."""

    steps: list[dict[str, float]] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    """When each step had been told, in seconds from the start."""
    passed_s: dict[str, float] = field(default_factory=dict)
    """What of MARKS has passed, and when."""
    evals: list[tuple[int, float, float]] = field(default_factory=list)
    """Step, mean reward of held-out prompts, when it was told."""
    peak_mib: float = 0.0
    """The most that the GPU had in use, all processes together."""
    ended: str = ""


def read_step(line: str) -> dict[str, float] | None:
    """The figures of a step as verl's console logger prints them, or None."""
    found = re.search(r"\bstep:\d+ - (.*)", line)
    if found is None:
        return None
    pairs = re.findall(r"([\w/.@-]+):(?:np\.\w+\()?(-?\d[\d.]*(?:e[+-]?\d+)?)", found[1])
    return {name: float(value) for name, value in pairs}


def read_eval(step: dict[str, float]) -> float | None:
    """The mean reward of held-out prompts among such figures: verl tells the one that counts as `val-core`."""
    return next((value for name, value in step.items() if re.fullmatch(r"val-core/.*/mean@\d+", name)), None)


def name_turn_end(path: Path) -> None:
    """Give the last token of a tokenizer the name of a Qwen turn's end, which verl demands and never uses here."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    words: dict[str, int] = whole["model"]["vocab"]
    added: dict[str, Any] = max(whole["added_tokens"], key=lambda token: token["id"])
    last = max(words, key=lambda word: words[word])
    if words[last] > added["id"]:
        words["<|im_end|>"] = words.pop(last)
    else:
        added["content"] = "<|im_end|>"
    path.write_text(json.dumps(whole), encoding="utf-8")


def run(
    folder: Path, sets: list[str], environment: dict[str, str], num_steps: int, limit_s: float, report: Report,
    *, enough: float = math.inf,
) -> Watched:  # fmt: skip
    """One run of verl, with the seconds at which its stages pass, until its held-out reward is `enough`; nothing of it
    is left. What it prints goes through a file: a process that it leaves behind could hold a pipe open for ever."""
    began, found, case, waiting = time.monotonic(), Watched(), folder.name, dict(MARKS)
    folder.mkdir(parents=True, exist_ok=True)
    printed, log = folder / "printed.txt", folder / "verl.log"
    with printed.open("wb") as to:
        process = subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *sets],
            cwd=folder, env=environment, stdout=to, stderr=subprocess.STDOUT,
        )  # fmt: skip
    seen: dict[int, psutil.Process] = {process.pid: psutil.Process(process.pid)}

    def watch() -> None:
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                seen.update({one.pid: one for one in seen[process.pid].children(recursive=True)})
            found.peak_mib = max(found.peak_mib, used_mib())
            time.sleep(0.5)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with printed.open("r", encoding="utf-8", errors="replace") as lines, log.open("w", encoding="utf-8") as stamped:
        rest = ""
        while True:
            is_over = process.poll() is not None
            rest += lines.read()
            passed_s = time.monotonic() - began
            *whole, rest = rest.split("\n")
            for line in whole:
                stamped.write(f"{passed_s:7.1f} {line}\n")
                for pattern in [pattern for pattern in waiting if re.search(pattern, line)]:
                    found.passed_s[waiting[pattern]] = passed_s
                    report.say(f"- {case}, {passed_s:.1f} s: {waiting.pop(pattern)}")
                step = read_step(line) or {}
                if "timing_s/step" in step:
                    found.steps.append(step)
                    found.at_s.append(passed_s)
                    parts = ", ".join(f"{name} {number(step.get(f'timing_s/{name}'))}" for name in PARTS)
                    report.say(f"- {case}, {passed_s:.1f} s: step {len(found.steps)}, {parts}")
                reward = read_eval(step)
                if reward is not None:
                    found.evals.append((len(found.steps), reward, passed_s))
                    report.say(f"- {case}, {passed_s:.1f} s: held-out reward {reward:.3f}")
            is_enough = bool(found.evals) and found.evals[-1][1] >= enough
            if is_over or is_enough:
                break
            is_done = len(found.steps) >= num_steps
            if passed_s > limit_s or (is_done and passed_s > found.at_s[-1] + LEAVING_S):
                found.ended = "" if is_done else f"it was ended after {limit_s:.0f} s"
                break
            time.sleep(0.02)
    end([one for one in list(seen.values()) if one.is_running()])
    status = process.wait()
    watcher.join(15.0)
    if status and not is_enough and not found.ended and len(found.steps) < num_steps:
        found.ended = f"it ended with {status}: {errors_of(log)}"
    return found


def errors_of(log: Path) -> str:
    """The first lines of a log that name an error, and its end: Ray tells a worker's own far before."""
    text = log.read_text(encoding="utf-8")
    named = [line[:400] for line in text.splitlines() if re.search(r"Error\b", line) and "not available" not in line]
    return "\n".join([*named[:8], "...", text[-2000:]])


def tell(report: Report, case: str, found: Watched) -> None:
    kept = found.steps[SKIPPED_STEPS:]
    told_s = found.at_s[SKIPPED_STEPS - 1 :]
    walls = [after - before for before, after in itertools.pairwise(told_s)]

    def of(name: str) -> float | None:
        return median([step[name] for step in kept if name in step])

    whole, wall = of("timing_s/step"), median(walls)
    tokens = (of("response_length/mean") or 0.0) * PROMPTS_A_STEP * GROUP
    rows = [
        ("step, s (median): by verl; from step to step", f"{number(whole)}; {number(wall)}"),
        *((name, _share(of(f"timing_s/{name}"), whole)) for name in PARTS),
        ("tokens of a prompt", number(of("prompt_length/mean"))),
        ("tokens of an answer", number(of("response_length/mean"))),
        ("answer tokens a second", number(tokens / wall if wall else None)),
        ("peak of the trainer's process: allocated, reserved, GiB", "; ".join(
            number(of(f"actor/perf/max_memory_{kind}_gb")) for kind in ("allocated", "reserved"))),
        ("peak of the GPU, GiB", number(found.peak_mib / 1024)),
        ("first step told after, s", number(found.at_s[0] if found.at_s else None)),
    ]  # fmt: skip
    report.table(f"{case}: {len(kept)} steps after the first {SKIPPED_STEPS}", ("figure", "value"), rows)
    report.keep(case, {"steps": found.steps, "at_s": found.at_s, "peak_mib": found.peak_mib, "ended": found.ended})


def _share(part: float | None, whole: float | None) -> str:
    return f"{number(part)} ({percent(part / whole)})" if part is not None and whole else number(part)


def rehearse(report: Report, work: Path, sets: dict[str, list[str]], environment: dict[str, str]) -> None:
    """What can be seen without a GPU: verl takes the settings, reads the prompts, calls the reward."""
    for case, values in sets.items():
        command = [sys.executable, "-m", "verl.trainer.main_ppo", "--cfg", "job", "--resolve", *values]
        done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, timeout=200)
        if done.returncode:
            report.failed(f"{case}: verl refuses the settings: {done.stderr[-2000:]}")
        (work / f"{case}.yaml").write_text(done.stdout, encoding="utf-8")
        program = (
            "import sys; from omegaconf import OmegaConf; from verl.utils import hf_tokenizer\n"
            "from verl.trainer.ppo.reward import get_custom_reward_fn; from verl.utils.config import validate_config\n"
            "from verl.utils.dataset.rl_dataset import RLHFDataset\n"
            "config = OmegaConf.load(sys.argv[1]); validate_config(config, False, False)\n"
            "tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)\n"
            "rows = RLHFDataset(data_files=config.data.train_files, tokenizer=tokenizer, config=config.data)\n"
            "chat = list(rows[0]['raw_prompt'])\n"
            "text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)\n"
            "score = get_custom_reward_fn(config)(data_source='', solution_str='x', ground_truth='', extra_info={})\n"
            "print('seen:', len(rows), 'prompts of', len(tokenizer(text)['input_ids']), 'tokens, reward', score)\n"
        )
        command = [sys.executable, "-c", program, str(work / f"{case}.yaml")]
        done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, timeout=200)
        if done.returncode:
            report.failed(f"{case}: {done.stderr[-2000:]}")
        report.say(f"- {case}: " + next(line for line in done.stdout.splitlines() if line.startswith("seen:")))


def require_verl(report: Report) -> None:
    """Ends the part where verl cannot run."""
    needed = ("verl", "ray", "sglang", "pandas", "pyarrow")
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        report.missing(f"cannot be imported: {', '.join(lacking)}")
    if importlib.util.find_spec("trl") is not None:
        report.missing("TRL can be imported: verl takes from it a name that later releases moved")


def beside(work: Path, reward: Callable[..., float]) -> dict[str, str]:
    """Write the code that verl loads into the part's folder; the environment that it needs."""
    (work / "reward.py").write_text(f"import zlib\nfrom typing import Any\n\n\n{inspect.getsource(reward)}")
    (work / "sampler.py").write_text(SAMPLER)
    environment = hide_megatron(os.environ, work)
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}
    return environment | {"HYDRA_FULL_ERROR": "1", "VERL_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1"}


def case_settings(case: str, work: Path) -> list[str]:
    return [item.replace("WORK", str(work)) for item in CASES[case]]


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--cases", default="polled,tuned", type=some_of(CASES))
    args.add_argument("--shape", default="0.6b")
    args.add_argument("--steps", type=int, default=SKIPPED_STEPS + 5)
    args.add_argument(
        "--set", action="append", default=[], dest="sets", metavar="KEY=VALUE", help="for verl, in all cases"
    )
    options = args.parse_args()
    began, is_cpu = time.monotonic(), options.device == "cpu"
    report = Report("peer_verl", is_dry=is_cpu)
    require_verl(report)
    limit_s = part_seconds(560.0)
    work = work_folder() / "peer_verl"
    make_apart(work / "model", "dry" if is_cpu else options.shape, options.device)
    name_turn_end(work / "model" / "tokenizer.json")
    write_prompts(work / "prompts.jsonl", (options.steps + 4) * PROMPTS_A_STEP, seed=1)
    write_parquet(work / "prompts.jsonl", work / "prompts.parquet")
    environment = beside(work, compute_score)
    sets = {
        case: [*settings(work, options.steps), *case_settings(case, work), *options.sets]
        for case in options.cases.split(",")
    }
    report.say(f"- model and prompts: {time.monotonic() - began:.1f} s")
    if is_cpu:
        rehearse(report, work, sets, environment)
        report.end()
    report.say("".join(f"- unfair: {one}\n" for one in UNFAIR))
    needed_s = 60.0
    for case, values in sets.items():
        left_s = limit_s - (time.monotonic() - began)
        if left_s < needed_s:
            report.say(f"- {case}: not begun, {left_s:.0f} s are left and the one before it took {needed_s:.0f}")
            continue
        started = time.monotonic()
        found = run(work / case, values, environment, options.steps, left_s, report)
        tell(report, case, found)
        if found.ended:
            report.say(f"- {case}: {found.ended}")
        needed_s = 0.7 * (time.monotonic() - started)  # what it compiled is kept
        report.goal(f"steps of {case}", float(len(found.steps)), at_least=options.steps)
    report.end()


def write_parquet(prompts: Path, to: Path) -> None:
    import pandas as pd  # pyright: ignore[reportMissingImports]  # of the peers

    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    pd.DataFrame(
        [
            {
                "data_source": "rows", "prompt": [{"role": "user", "content": row["prompt"]}], "ability": "none",
                "reward_model": {"style": "rule", "ground_truth": row["label"]}, "extra_info": {"index": index},
            }
            for index, row in enumerate(rows)
        ]
    ).to_parquet(to)  # fmt: skip


if __name__ == "__main__":
    main()
