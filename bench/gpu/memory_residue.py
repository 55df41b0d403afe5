"""What a trainer's process holds on its GPU beside its tags, from set-up to the hand-over of its first weights.

    python memory_residue.py [--shape 1.7b] [--set SECTION.KEY=VALUE]

One rank of the run of `memory_colocated.toml`, without the run: its backend over our arenas, and its weights staged for
an engine. At every stage: what the device lost (as NVML has it), of it in tags, in torch's cache outside of them (used,
idle), and the rest, which is the context, libraries and communicators. Needs Megatron and a GPU.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import torch
from figures import Report, parser, work_folder
from make_model import make_apart
from memory_colocated import RUN_FILE, sets_of
from memory_device import settled_used
from memory_figures import GIB, size
from trial_runs import stage

from myxa.actors.backends.torch_backend.world import Gang
from myxa.actors.tenancy.time_share import TRAINER_TAGS
from myxa.core.clock import SystemClock
from myxa.core.config import load_config
from myxa.launch.composition.trainer_parts import gang_comms, make_backend, weight_sender
from myxa.launch.composition.weight_channels import choose_channel
from myxa.launch.supervisor.placement import place
from myxa.memory.arenas.cuda_memory import trim_torch_cache


class Stages:
    """Rows of the table."""

    def __init__(self, store: Any) -> None:
        self.base = settled_used(0)
        self.store = store
        self.rows: list[tuple[str, ...]] = []
        self.rest = 0

    def look(self, stage_name: str) -> None:
        torch.cuda.synchronize()
        used = settled_used(0) - self.base
        tags = sum(r.num_bytes for r in self.store.report() if r.backing.startswith("mapped"))
        pools = torch.cuda.memory.memory_snapshot()
        plain = [s for s in pools if s["segment_pool_id"] == (0, 0)]
        held = sum(s["total_size"] for s in plain)
        in_use = sum(s["allocated_size"] for s in plain)
        elsewhere = sum(s["total_size"] for s in pools) - held
        self.rest = used - tags - held
        cells = (used, tags, in_use, held - in_use, self.rest, elsewhere)
        self.rows.append((stage_name, *(size(cell) for cell in cells)))


def measure(options: argparse.Namespace, report: Report, work: Path) -> Stages:
    sets = [*sets_of(options, "ours", 0.85), f'model.path="{work / "model"}"']
    config = load_config([work / RUN_FILE], sets)
    spec = next(actor for actor in place(config, 1) if actor.role == "trainer")
    gang, _ = gang_comms(config, Gang(), on_gpus=True)
    backend = make_backend(spec, config, gang, SystemClock())
    sender = weight_sender(config, 0, choose_channel(config), local_rank=0)
    store = backend.memory()
    assert store is not None
    stages = Stages(store)
    facts = backend.setup()
    report.say(f"- {facts}\n")
    stages.look("set up")
    sender.publish(0, backend.export_device)
    stages.look("first weights staged")
    gc.collect()
    trim_torch_cache(0)
    stages.look("cache given back")
    store.release(TRAINER_TAGS)
    stages.look("tags away")
    sender.release(0)
    gc.collect()
    trim_torch_cache(0)
    stages.look("staged weights given back")
    stages.largest = largest()  # pyright: ignore[reportAttributeAccessIssue]
    backend.close()
    return stages


def largest() -> list[tuple[str, ...]]:
    """Blocks in use outside of tags, by size."""
    sizes: dict[int, int] = {}
    for segment in torch.cuda.memory.memory_snapshot():
        if segment["segment_pool_id"] == (0, 0):
            for block in segment["blocks"]:
                if block["state"].startswith("active"):
                    sizes[block["size"]] = sizes.get(block["size"], 0) + 1
    return [(size(each), str(count)) for each, count in sorted(sizes.items(), key=lambda i: -i[0] * i[1])[:8]]


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--shape", default="1.7b")
    args.add_argument("--steps", type=int, default=7)
    args.add_argument("--tokens", type=int, default=8192)
    args.add_argument("--capacity-mib", type=int, default=0)
    args.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    args.set_defaults(gpus=1, servers="each")
    options = args.parse_args()
    report = Report("memory_residue", is_dry=options.device == "cpu")
    if options.device == "cpu":
        report.missing("the rest of a process on a GPU needs a GPU")
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    work = work_folder() / "memory_residue"
    stage(work, RUN_FILE, "spread_reward.py", launches=True)
    make_apart(work / "model", options.shape, options.device)
    (work / "data").mkdir(parents=True, exist_ok=True)
    (work / "data" / "prompts.jsonl").write_text('{"prompt": "a", "label": "a"}\n')
    stages = measure(options, report, work)
    heads = ("stage", "lost by the device", "in tags", "torch, used", "torch, idle", "rest", "in regions, by torch")
    report.table("A trainer's process", heads, stages.rows)
    report.table("Blocks in use outside of tags, at the end", ("size", "number"), stages.largest)  # pyright: ignore[reportAttributeAccessIssue]
    report.goal("rest: context, libraries, communicators, GiB", stages.rest / GIB, at_most=1.0)
    report.end()


if __name__ == "__main__":
    main()
