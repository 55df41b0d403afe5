"""What the demo starts from, made on the spot: a random model, its tokenizer, the data, the run files."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from ...actors.models.tiny import make_tiny_model
from .sort_task import prompts, write_rows

PRESET = "0p5m"
NUM_DEMONSTRATIONS = 12_800
NUM_PROMPTS = 20_000
NUM_HELDOUT = 256


def prepare(folder: Path, seed: int) -> None:
    """Write everything into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(folder / "model", preset=PRESET, seed=seed)
    data = folder / "data"
    write_rows(data / "heldout.jsonl", NUM_HELDOUT, seed=seed + 1)
    unseen = prompts(data / "heldout.jsonl")
    write_rows(data / "demonstrations.jsonl", NUM_DEMONSTRATIONS, seed=seed + 2, exclude=unseen)
    write_rows(data / "prompts.jsonl", NUM_PROMPTS, seed=seed + 3, exclude=unseen)
    for name in ("sft.toml", "rl.toml"):
        (folder / name).write_text((files("myxa.launch.demo") / name).read_text())
