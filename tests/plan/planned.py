"""A good run for `myxa plan` to look at, and mistakes to put into it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from myxa.actors.models.tiny import make_tiny_model
from myxa.launch.cli import main

RUN = """\
[run]
name = "good"
num_steps = 20

[model]
path = "model"

[data]
train = "data/train.jsonl"

[eval]
data = "data/heldout.jsonl"
every = 10
num_prompts = 16

[rollout]
num_samples = 4
max_new_tokens = 32
max_groups = 32
temperature = 1.0

[reward]
fn = "mine.py:score"

[algo]
kind = "grpo"
batch_size = 8
minibatches = 2

[async]
max_staleness = 2

[optimizer]
lr = 1e-4

[trainer]
checkpoint_every = 10
max_tokens_per_microbatch = 1024

[engine]
max_running = 32
context_length = 256

[monitor]
tensorboard = false

[roles.trainer]
count = 2

[roles.rollout]
count = 2
"""

MINE = """\
def score(completion):
    return 1.0


async def flow(ctx, prompt, *, mode=0):
    return None


def needy(ctx, prompt, *, level):
    return None


class Flow:
    def __init__(self, price=1):
        self.price = price

    def run(self, ctx, prompt):
        return None


def two_needed(completion, tolerance):
    return 1.0


async def later(groups):
    return []


def keep(group):
    return True
"""


@dataclass(frozen=True)
class Site:
    folder: Path

    def write(self, text: str) -> Path:
        file = self.folder / "run.toml"
        file.write_text(text)
        return file


def make_site(folder: Path) -> Site:
    make_tiny_model(folder / "model", preset="0p5m", seed=0)
    for name in ("no_weights", "torn_weights", "moe_type"):
        shutil.copytree(folder / "model", folder / name)
    (folder / "no_weights/model.safetensors").unlink()
    weights = (folder / "model/model.safetensors").read_bytes()
    (folder / "torn_weights/model.safetensors").write_bytes(weights[: len(weights) // 2])
    config = json.loads((folder / "model/config.json").read_text())
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    (folder / "moe_type/config.json").write_text(json.dumps({**config, **experts}))
    data = folder / "data"
    data.mkdir()
    rows = [json.dumps({"prompt": f"sort {n}", "label": str(n)}) for n in range(40)]
    (data / "train.jsonl").write_text("\n".join(rows) + "\n")
    (data / "heldout.jsonl").write_text("\n".join(rows[:16]) + "\n")
    (data / "torn.jsonl").write_text("\n".join([*rows[:3], '{"prompt": "sort 1"', *rows[3:]]) + "\n")
    (data / "other_column.jsonl").write_text('{"promt": "a", "label": "b"}\n')
    (data / "empty.jsonl").write_text("")
    (data / "three.jsonl").write_text("\n".join(rows[:3]) + "\n")
    (data / "packed.jsonl").write_bytes(b"\x1f\x8b\x08 and so on")
    (folder / "mine.py").write_text(MINE)
    (folder / "broken.py").write_text("def score(completion:\n    return 1\n")
    return Site(folder)


def plan(file: Path, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Exit status and answer of `myxa plan FILE --json`, in this process."""
    code = main(["plan", str(file), "--json", *flags])
    return code, json.loads(capsys.readouterr().out)
