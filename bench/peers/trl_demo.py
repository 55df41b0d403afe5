"""TRL on the second stage of the demo: same model, prompts, reward, group, batch and rate. For trl_cpu.py.

    python trl_demo.py DEMO_FOLDER EVENTS_JSONL --steps 120 --every 10 --stop 0.9 --threads 2 --seed 0

Each line of EVENTS_JSONL: what, wall time, CPU seconds of this process so far, step, held-out reward.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

GROUP, BATCH, LONGEST, RATE = 8, 32, 32, 3e-4


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path)
    parser.add_argument("events", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--stop", type=float, default=0.9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)

    import torch
    import transformers
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]  # only in the peers' environment
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(options.threads)
    events = options.events.open("w", buffering=1)

    def tell(what: str, **more: Any) -> None:
        events.write(json.dumps({"what": what, "wall_s": time.time(), "cpu_s": time.process_time(), **more}) + "\n")

    def rows(name: str) -> Any:
        path = str(options.demo / "data" / f"{name}.jsonl")
        data = load_dataset("json", data_files=path, split="train", cache_dir=f"{options.events}.cache")
        kept = {"demonstration"}
        return data.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}, remove_columns=list(kept))

    def exact(completions: list[Any], label: list[str], **_: Any) -> list[float]:
        return [float(one[0]["content"].strip() == want) for one, want in zip(completions, label, strict=True)]

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            tell("step", step=state.global_step)

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
            reward = (metrics or {}).get("eval_reward")
            tell("eval", step=state.global_step, reward=reward)
            if reward is not None and reward >= options.stop:
                control.should_training_stop = True

    config = GRPOConfig(
        output_dir=f"{options.events}.model", seed=options.seed, use_cpu=True, bf16=False,
        gradient_checkpointing=False, max_steps=options.steps, per_device_train_batch_size=GROUP * BATCH,
        per_device_eval_batch_size=256, num_generations=GROUP, num_generations_eval=1, steps_per_generation=1,
        max_completion_length=LONGEST, temperature=1.0, top_p=1.0, top_k=0, beta=0.0, epsilon=0.2, epsilon_high=0.28,
        learning_rate=RATE, lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0,
        max_grad_norm=1.0, scale_rewards="group", loss_type="dapo", logging_steps=1, report_to="none",
        save_strategy="no", eval_strategy="steps", eval_steps=options.every, eval_on_start=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(options.demo / "sft" / "export"), reward_funcs=exact, args=config, train_dataset=rows("prompts"),
        eval_dataset=rows("heldout"), callbacks=[Watch()],
    )  # fmt: skip
    tell("ready")
    trainer.train()
    tell("end")


if __name__ == "__main__":
    main()
