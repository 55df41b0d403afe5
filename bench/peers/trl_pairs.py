"""Losses step by step on pairs by myxa and by TRL: same model, rows, order, AdamW, one thread, float32.

    python bench/peers/trl_pairs.py [--steps 40]

DPO, IPO and a reward model with margins, whose head begins at zero. TRL runs in the peers' environment, as
`trl_pairs.py FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "bradley_terry": ""}
"""Ours -> TRL's `loss_type`."""
BATCH, RATE, BETAS, CENTER = 8, 3e-4, (0.9, 0.95), 0.01


def rows(count: int) -> list[dict[str, Any]]:
    """Sums, right and wrong, as conversations."""
    rng = random.Random(0)

    def row() -> dict[str, Any]:
        a, b = rng.randrange(1000), rng.randrange(1000)
        said = {"chosen": str(a + b), "rejected": f"{a}{b} or so"}
        pair = {name: [{"role": "assistant", "content": text}] for name, text in said.items()}
        margin = rng.choice([0.0, 0.5, 1.0])
        return {"prompt": [{"role": "user", "content": f"{a} + {b} ="}], **pair, "margin": margin}

    return [row() for _ in range(count)]


def ours(folder: Path, loss: str, num_steps: int) -> list[float]:
    """Of a run of `myxa up`."""
    algo, margin = f'kind = "dpo"\nloss = "{loss}"', ""
    if loss == "bradley_terry":
        algo, margin = f'kind = "reward"\ncenter_coef = {CENTER}', 'margin_key = "margin"'
    (folder / "run.toml").write_text(
        f'[run]\nname = "{loss}"\nnum_steps = {num_steps}\n[model]\npath = "model"\n'
        f'[data]\ntrain = "pairs.jsonl"\nshuffle = false\n{margin}\n[algo]\n{algo}\nbatch_size = {BATCH}\n'
        f"[optimizer]\nlr = {RATE}\n[trainer]\nexport_at_end = false\n"
    )
    command = [sys.executable, "-m", "myxa.launch", "up", "run.toml", "--quiet"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=600)
    (run_dir,) = (folder / "runs").glob(f"{loss}-*")
    points = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [point["values"]["train/loss"] for point in points if "train/loss" in point["values"]]


def by_trl(folder: Path) -> dict[str, list[float]]:
    """In the peers' environment."""
    import torch
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]  # only in the peers' environment
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import (  # pyright: ignore[reportMissingImports]
        DPOConfig,
        DPOTrainer,
        RewardConfig,
        RewardTrainer,
    )

    torch.set_num_threads(1)
    path = str(folder / "model")
    data = load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train", cache_dir=str(folder / "cache"))
    found: dict[str, list[float]] = {}
    for loss, kind in LOSSES.items():
        more: dict[str, Any] = {"loss_type": kind, "beta": 0.1} if kind else {"center_rewards_coefficient": CENTER}
        args = (DPOConfig if kind else RewardConfig)(
            output_dir=str(folder / "trl"), per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=RATE,
            lr_scheduler_type="constant", adam_beta1=BETAS[0], adam_beta2=BETAS[1], weight_decay=0.0,
            max_grad_norm=1.0, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
            train_sampling_strategy="sequential", gradient_checkpointing=False, **more,
        )  # fmt: skip
        load = AutoModelForCausalLM if kind else AutoModelForSequenceClassification
        model = load.from_pretrained(path, dtype=torch.float32, **({} if kind else {"num_labels": 1}))
        if not kind:
            torch.nn.init.zeros_(model.score.weight)
        trainer = (DPOTrainer if kind else RewardTrainer)(
            model, args=args, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(path)
        )
        steps: list[float] = []
        told = trainer.compute_loss

        def watched(*given: Any, told: Any = told, steps: list[float] = steps, **named: Any) -> Any:
            value = told(*given, **named)  # what the log has is rounded
            steps.append(float((value[0] if isinstance(value, tuple) else value).detach()))
            return value

        trainer.compute_loss = watched
        trainer.train()
        found[loss] = steps
    return found


def main() -> None:
    """All losses, ours and theirs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of a run of this program: TRL's part alone")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if options.folder:
        (options.folder / "trl.json").write_text(json.dumps(by_trl(options.folder)))
        return
    from environment import python_with

    from myxa.actors.models.tiny import make_tiny_model

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        make_tiny_model(folder / "model", "0p5m", seed=0)
        text = "".join(json.dumps(row) + "\n" for row in rows(BATCH * options.steps))
        (folder / "pairs.jsonl").write_text(text)
        subprocess.run([python_with(["trl"]), str(Path(__file__).resolve()), str(folder)], check=True, timeout=1200)
        theirs = json.loads((folder / "trl.json").read_text())
        print("| loss | first step | last step | largest difference of a step |\n|---|---:|---:|---:|")
        for loss in LOSSES:
            own = ours(folder, loss, options.steps)
            gaps = [abs(a - b) for a, b in zip(own, theirs[loss], strict=True)]
            print(f"| `{loss}` | {own[0]:.6f} | {own[-1]:.6f} | {max(gaps):.1e} |")


if __name__ == "__main__":
    main()
