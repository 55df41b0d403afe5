"""TRL's GRPOTrainer at the work of `async20` on one GPU: shape, prompts, reward, group, batch, longest answer, rate.

    python trl_step.py [--shape 0.6b] [--steps 6] [--micro 64] [--device cpu]

TRL generates with transformers itself, step after step; its server mode needs vLLM, which is not measured. Weights are
bfloat16 as in the run that it is compared with. The first two steps are left out. Needs TRL and datasets.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

from async20 import write_prompts
from figures import Report, median, number, parser, percent, work_folder
from make_model import make_apart

PROMPTS_A_STEP, GROUP, LONGEST = 16, 8, 256
SKIPPED_STEPS = 2


def spread(completions: list[Any], **_: Any) -> list[float]:
    """As spread_reward.py: spread and no meaning."""
    return [zlib.crc32(one[0]["content"].encode()) / 2**32 for one in completions]


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--shape", default="0.6b")
    args.add_argument("--steps", type=int, default=6)
    args.add_argument("--micro", type=int, default=64, help="samples of a micro-batch")
    options = args.parse_args()
    is_cpu = options.device == "cpu"
    report = Report("peer_trl", is_dry=is_cpu)
    try:
        import torch
        import transformers
        import trl  # pyright: ignore[reportMissingImports]  # of the peers
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        report.missing(f"TRL cannot be imported: {error}")
    began = time.monotonic()
    work = work_folder() / "peer_trl"
    make_apart(work / "model", "dry" if is_cpu else options.shape, options.device)
    write_prompts(work / "prompts.jsonl", 4000, seed=1)
    rows = load_dataset("json", data_files=str(work / "prompts.jsonl"), split="train", cache_dir=str(work / "cache"))
    rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}, remove_columns=["label"])
    batch, longest = (16, 8) if is_cpu else (PROMPTS_A_STEP * GROUP, LONGEST)
    micro = min(options.micro, batch)
    generate_s: list[float] = []
    step_s: list[float] = []
    tokens: list[float] = []

    def wait() -> None:
        if not is_cpu:
            torch.cuda.synchronize()

    class Timed(trl.GRPOTrainer):
        def _generate(self, *given: Any, **named: Any) -> Any:
            wait()
            start_s = time.monotonic()
            found = super()._generate(*given, **named)
            wait()
            generate_s.append(time.monotonic() - start_s)
            return found

    class Watch(transformers.TrainerCallback):
        start_s = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait()
            self.start_s = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait()
            step_s.append(time.monotonic() - self.start_s)
            print(f"step {len(step_s)}: {step_s[-1]:.2f} s, of it generating {generate_s[-1]:.2f}", flush=True)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "completions/mean_length" in logs:
                tokens.append(float(logs["completions/mean_length"]) * batch)

    config = trl.GRPOConfig(
        output_dir=str(work / "out"), max_steps=2 if is_cpu else options.steps, use_cpu=is_cpu, bf16=not is_cpu,
        model_init_kwargs={"dtype": "float32" if is_cpu else "bfloat16"}, gradient_checkpointing=False,
        per_device_train_batch_size=micro, gradient_accumulation_steps=batch // micro,
        steps_per_generation=batch // micro, num_generations=GROUP, max_completion_length=longest,
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo",
        learning_rate=1e-6, lr_scheduler_type="constant", max_grad_norm=1.0, logging_steps=1, report_to="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Timed(
        model=str(work / "model"), reward_funcs=spread, args=config, train_dataset=rows, callbacks=[Watch()]
    )
    report.say(f"- TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    report.say(f"- ready after {time.monotonic() - began:.1f} s")
    trainer.train()
    kept, made = step_s[SKIPPED_STEPS:] or step_s, generate_s[SKIPPED_STEPS:] or generate_s
    step, generating = median(kept) or 0.0, median(made) or 0.0
    peak = 0.0 if is_cpu else torch.cuda.max_memory_allocated() / 2**30
    report.table(
        f"{batch} samples a step, {micro} a micro-batch",
        ("figure", "value"),
        [
            ("step, s (median)", number(step)),
            ("of it generating", f"{number(generating)} ({percent(generating / step)})"),
            ("answer tokens a step; a second", f"{number(median(tokens))}; {number((median(tokens) or 0.0) / step)}"),
            ("peak memory of the process, GiB", number(peak)),
        ],
    )
    report.keep("step_s", step_s)
    report.keep("generate_s", generate_s)
    report.end()


if __name__ == "__main__":
    main()
