"""What adapters save: memory, time of a step, sizes of a checkpoint and of an export, against training all weights.

    python bench/lora.py [--preset 20m] [--rank 16] [--steps 5]

The torch trainer, one rank, one thread, float32: 32 samples of 96 tokens a step in packs of 1024, GRPO, `algo.kl_coef`
above 0, so that a reference model takes part. Each case is a process of its own. Memory: resident at its most, above
that of the process before the backend is set up. On a GPU: `bench/gpu.sh lora`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {"all weights": {}, "adapters": {"rank": 16}}
NUM_SAMPLES, LENGTH, PROMPT = 32, 96, 16


def shard_of(step: int, vocab_size: int) -> Any:
    import numpy as np

    from myxa.core.samples import TrainSample, TrainShard

    rng, num_new = np.random.default_rng(step), LENGTH - PROMPT
    samples = tuple(
        TrainSample(
            group_id=index // 8, index=index % 8, prompt_ids=rng.integers(0, vocab_size, PROMPT).astype(np.int32),
            response_ids=rng.integers(0, vocab_size, num_new).astype(np.int32),
            loss_mask=np.ones(num_new, np.uint8), logprobs=np.full(num_new, -np.log(vocab_size), np.float32),
            versions=np.full(num_new, step, np.int32), finish="stop", advantage=1.0 if index % 2 else -1.0,
        )
        for index in range(NUM_SAMPLES)
    )  # fmt: skip
    packs = tuple(tuple(range(start, start + 8)) for start in range(0, NUM_SAMPLES, 8))
    total = float(NUM_SAMPLES)
    return TrainShard(step=step, samples=samples, minibatches=(packs,), minibatch_tokens=(total * num_new,),
                      minibatch_rollouts=(total,))  # fmt: skip


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def size_mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def case_main(folder: Path, lora: dict[str, Any], num_steps: int) -> dict[str, float]:
    import torch

    from myxa.actors.backends.rank_backend import RankSettings
    from myxa.actors.backends.torch_backend.backend import TorchBackend
    from myxa.actors.models.hf_folder import read_config
    from myxa.core.config import AlgoConfig, LoraConfig

    model = str(folder / "model")
    algo, shape = AlgoConfig(kl_coef=0.1), read_config(model)
    torch.zeros(8, 8).matmul(torch.zeros(8, 8))  # its libraries are loaded
    before = peak_mib()
    backend = TorchBackend(RankSettings(model_path=model, algo=algo, lora=LoraConfig.model_validate(lora)))
    backend.setup()
    backend.train(shard_of(0, shape.vocab_size), {})
    times: list[float] = []
    for step in range(1, num_steps + 1):
        shard, started_s = shard_of(step, shape.vocab_size), time.process_time()
        backend.train(shard, {})
        times.append(time.process_time() - started_s)
    peak = peak_mib() - before
    started_s = time.process_time()
    backend.export_weights()
    export_s = time.process_time() - started_s
    pending = backend.begin_save(str(folder / "checkpoint"), {"version": 1})
    pending.write()
    pending.finish()
    backend.export_hf(str(folder / "export"))
    backend.close()
    return {
        "parameters": shape.num_parameters, "cpu_s": sorted(times)[len(times) // 2], "peak_mib": peak,
        "merge_s": export_s, "checkpoint_mib": size_mib(folder / "checkpoint"),
        "export_mib": size_mib(folder / "export"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="20m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        lora = {**CASES[options.case], "rank": options.rank} if CASES[options.case] else {}
        print(json.dumps(case_main(options.folder, lora, options.steps)))
        return
    from myxa.actors.models.tiny import make_tiny_model

    print("| trained | CPU s a step | peak MiB | merging for engines, CPU s | checkpoint MiB | export MiB |")
    print("|---|---:|---:|---:|---:|---:|")
    for case in CASES:
        with tempfile.TemporaryDirectory() as place:
            make_tiny_model(Path(place) / "model", options.preset, vocab_size=4096)
            words = ["--case", case, "--folder", place, "--rank", str(options.rank), "--steps", str(options.steps)]
            done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {case} ({found['parameters']:,} in the model) | {found['cpu_s']:.2f} | {found['peak_mib']:.0f} | "
            f"{found['merge_s']:.3f} | {found['checkpoint_mib']:.1f} | {found['export_mib']:.1f} |"
        )


if __name__ == "__main__":
    main()
