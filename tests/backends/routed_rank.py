"""One rank of a Megatron gang that scores and trains samples whose experts are given; a program for the tests.

python routed_rank.py SPEC.json RANK
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import megatron_steps as steps
import msgspec
import numpy as np


def samples_of(file: Path) -> list[Any]:
    from myxa.core.samples import Sample
    from myxa.transport.codec import Codec

    body, *frames = msgspec.msgpack.decode(file.read_bytes())
    return Codec(list[Sample]).decode(body, tuple(frames))


def run_case(spec: dict[str, Any], case: dict[str, Any], rank: int) -> dict[str, Any]:
    from myxa.core.errors import TrainError
    from myxa.core.samples import TrainSample, TrainShard

    gang_rank = steps.sibling("gang_rank")
    backend = steps.make_backend(spec, case, rank)
    backend.setup()
    try:
        grid = backend._parts.world.grid
        size, number = grid.dp.size(), grid.dp.rank()
        samples = samples_of(Path(case["samples"]))[number::size]
        numbers = range(number, len(samples) * size, size)
        scores = gang_rank.scored(backend, samples)
        told = {str(n): row.tolist() for n, row in zip(numbers, scores, strict=True)} if grid.is_teller else {}

        def shard_of(scores: list[np.ndarray]) -> TrainShard:
            mine = tuple(
                TrainSample.of(msgspec.structs.replace(one, logprobs=row), 1.0 if n % 3 else -1.0)
                for n, (one, row) in enumerate(zip(samples, scores, strict=True))
            )
            half = len(mine) // 2
            cuts = ((tuple(range(half)),), (tuple(range(half, len(mine))),))
            tokens = [size * float(sum(mine[i].loss_mask.sum() for i in part[0])) for part in cuts]
            return TrainShard(
                step=0, samples=mine, minibatches=cuts, minibatch_tokens=tuple(tokens),
                minibatch_rollouts=(float(size * half), float(size * (len(mine) - half))),
            )  # fmt: skip

        own = gang_rank.own_scores(backend, shard_of(scores))
        metrics = backend.train(shard_of(own), {}).metrics
        later = gang_rank.scored(backend, samples)
        lacking = [msgspec.structs.replace(samples[0], experts=None), *samples[1:]]
        samples = lacking
        try:
            backend.train(shard_of(later), {})
            refusal = ""
        except TrainError as error:
            refusal = str(error)
    finally:
        backend.close()
    moved = max(float(np.abs(a - b).max()) for a, b in zip(scores, later, strict=True))
    return {"scores": told, "metrics": metrics, "moved": moved, "refusal": refusal}


def main() -> None:
    spec, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    steps.sibling("megatron_on_cpu").install()
    for case in spec["cases"]:
        result = run_case(spec, case, rank)
        place = Path(spec["out"]) / case["name"]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    steps.as_program(main)
