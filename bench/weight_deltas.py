"""Weight versions as deltas over the disk channel: bytes and seconds against whole folders, on a CPU.

    python bench/weight_deltas.py [--steps N] [--layers N] [--folder DIR]

    demo      the demo's model and AdamW in float32, at the demo's learning rate and at 1e-6
    0.6B      the shape of Qwen3-0.6B with its vocabulary of 151,936 and `--layers` of its 28 layers, float32 masters,
              AdamW at lr 1e-6, published in bfloat16

tcp: what a rollout actor fetches of the same, by calls of this process.

The gradients are those of the loss on random tokens. Every version is published whole and as a delta, read from both,
and compared to the bit. `write` is the trainer's side, `read` the rollout actor's: the check of a whole folder, or
making it of what is held. Both are with the digest. The first delta copies the whole folder and is told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from myxa.actors.backends.rank_backend import named_arrays
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.weights.channels.host import DiskWeightWriter, RebuiltFolder, read_folder

SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip
TOKENS = 64


def versions(folder: Path, lr: float, dtype: torch.dtype, steps: int) -> Iterator[list[Any]]:
    """Named arrays of the model after each optimizer step; they hold until the next."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
    for _ in range(steps + 1):
        ids = torch.randint(0, model.config.vocab_size, (1, TOKENS))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        yield named_arrays((name, each.detach().to(dtype)) for name, each in model.named_parameters())


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.monotonic()
    return work(), time.monotonic() - started


def check(manifest: Any) -> None:
    with read_folder(manifest):
        return


def content(location: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(location).glob("*.safetensors"))]


class Calls:
    """The trainer's rank, as a rollout actor asks it."""

    def __init__(self, writer: DiskWeightWriter) -> None:
        self.writer, self.num_bytes = writer, 0

    async def ask(self, sender: str, order: Any) -> Any:
        reply = await asyncio.to_thread(self.writer.answer, order)
        self.num_bytes += reply.data.nbytes
        return reply


def measure(name: str, folder: Path, lr: float, dtype: torch.dtype, steps: int, scratch: Path) -> None:
    whole = DiskWeightWriter(scratch / "whole", folder, "here")
    changed = DiskWeightWriter(scratch / "deltas", folder, "here", steps + 1)
    joined = (0, 0.0)
    rebuilt, rows = RebuiltFolder(), list[tuple[float, ...]]()
    first_s, calls = 0.0, Calls(changed)
    far = RebuiltFolder(calls)
    for version, arrays in enumerate(versions(folder, lr, dtype, steps)):
        full, write_full_s = timed(lambda version=version, arrays=arrays: whole.publish(version, arrays))
        delta, write_s = timed(lambda version=version, arrays=arrays: changed.publish(version, arrays))
        _, read_full_s = timed(lambda full=full: check(full))
        before = calls.num_bytes
        (fetched, _), fetch_s = timed(lambda delta=delta: asyncio.run(far.whole(replace(delta, channel="tcp"))))
        assert content(fetched.location) == content(full.location), "equal to the bit"
        if not delta.deltas:
            rebuilt.seen(delta)
            joined = (calls.num_bytes, fetch_s)
            continue
        (made, why), read_s = timed(lambda delta=delta: rebuilt.rebuild(delta))
        assert not why
        assert content(made.location) == content(full.location), "equal to the bit"
        first_s = first_s or read_s
        sizes = (full.num_bytes, delta.deltas[-1].num_bytes, calls.num_bytes - before)
        rows.append((*sizes, write_full_s, write_s, fetch_s, read_full_s, read_s))
        whole.release(version)
    for end in (rebuilt, far):
        asyncio.run(end.close())
    for end in (whole, changed):
        end.close()
    size, part, fetched_bytes, write_full_s, write_s, fetch_s, _, _ = map(statistics.median, zip(*rows, strict=True))
    read_full_s, read_s = (statistics.median(column) for column in list(zip(*rows[1:], strict=True))[6:])
    print(
        f"{name:34} {size / 1e6:9.1f} MB full {part / 1e6:9.2f} MB delta = {100 * part / size:5.2f} %   write "
        f"{write_full_s:6.2f} / {write_s:6.2f} s   read {read_full_s:6.2f} / {read_s:6.2f} s, first {first_s:.2f} s   "
        f"tcp {joined[0] / 1e6:.1f} MB, {joined[1]:.2f} s to join, then {fetched_bytes / 1e6:.2f} MB, {fetch_s:.2f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--folder", help="where folders are written; else a temporary one")
    options = parser.parse_args()
    print("seconds: whole folder / delta, medians")
    with tempfile.TemporaryDirectory(dir=options.folder) as text:
        root = Path(text)
        make_tiny_model(root / "demo", preset="1m")
        make_tiny_model(root / "large", preset="0p5m", vocab_size=SHAPE["vocab_size"])
        config = json.loads((root / "large" / "config.json").read_text()) | SHAPE
        config["num_hidden_layers"] = options.layers
        config |= {"layer_types": ["full_attention"] * options.layers} if "layer_types" in config else {}
        (root / "large" / "config.json").write_text(json.dumps(config))
        for lr in (1e-3, 1e-6):
            measure(f"demo, float32, lr {lr:g}", root / "demo", lr, torch.float32, options.steps, root)
        name = f"0.6B, {options.layers} layers, bfloat16, lr 1e-06"
        measure(name, root / "large", 1e-6, torch.bfloat16, options.steps, root)


if __name__ == "__main__":
    main()
