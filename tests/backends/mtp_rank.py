"""One rank of a Megatron gang that trains a model with its MTP layer; a program for the tests.

python mtp_rank.py SPEC.json RANK
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import megatron_steps as steps
import numpy as np


def shard_of(rows: list[dict[str, Any]], number: int, size: int) -> Any:
    from myxa.core.samples import TrainSample, TrainShard

    samples = tuple(
        TrainSample(
            group_id=n, index=0, prompt_ids=np.asarray(row["prompt"], np.int32), advantage=1.0 if n % 3 else -0.5,
            response_ids=np.asarray(row["response"], np.int32), loss_mask=np.asarray(row["mask"], np.uint8),
            logprobs=np.full(len(row["mask"]), -4.0, np.float32), versions=np.zeros(len(row["mask"]), np.int32),
            finish="stop",
        )
        for n, row in enumerate(rows)
    )[number::size]  # fmt: skip
    cuts = tuple(tuple(range(k, min(k + 3, len(samples)))) for k in range(0, len(samples), 3))
    return TrainShard(
        step=0, samples=samples, minibatches=(cuts,), minibatch_tokens=(float(sum(sum(row["mask"]) for row in rows)),),
        minibatch_rollouts=(float(len(rows)),),
    )  # fmt: skip


def run_case(spec: dict[str, Any], case: dict[str, Any], rank: int) -> None:
    import torch
    from safetensors.torch import save_file

    from myxa.actors.backends.megatron.hf_weights import iter_hf_tensors
    from myxa.actors.backends.torch_backend.accounting import TrainingStep

    backend = steps.make_backend(spec, case, rank)
    backend.setup()
    try:
        stepper = backend._parts.stepper
        policy, grid = stepper.policy, backend._parts.world.grid
        config = backend._parts.state.model
        shard = shard_of(spec["rows"], grid.dp.rank(), grid.dp.size())

        def whole(pick: Any) -> dict[str, torch.Tensor]:
            return {n: t.clone() for n, t in iter_hf_tensors(policy.chunks, config, to_all=True, pick=pick)}

        found = {"weights": whole(torch.Tensor.detach)}
        step = TrainingStep.begin(shard, stepper.settings)
        minibatches = policy.cut(shard, skips_neutral=False)
        stepper._score_before(step, minibatches)
        stepper._learners(step, step.normalisers(0))[0].passes(minibatches[0], step.tally)
        policy.gradient_norm()
        found["grads"] = whole(lambda tensor: getattr(tensor, "main_grad", torch.zeros_like(tensor)))
        rest: dict[str, Any] = {"is_back": False}
        later, saved = found["weights"], str(Path(spec["out"]) / f"{case['name']}-saved")
        if case["trains"]:
            rest["metrics"] = backend.train(shard, {}).metrics
            later = found["later"] = whole(torch.Tensor.detach)
            rest["moved"] = {name: float((later[name] - found["weights"][name]).abs().max()) for name in later}
        if case["saves"]:
            pending = backend.begin_save(saved, {})
            pending.write()
            pending.finish()
        if case["comes_back"]:
            backend.train(shard, {})
            backend.load(saved)
            again = whole(torch.Tensor.detach)
            rest["is_back"] = all(torch.equal(again[name], later[name]) for name in later)
    finally:
        backend.close()
    if rank == 0:
        place = Path(spec["out"]) / case["name"]
        place.mkdir(parents=True, exist_ok=True)
        for name, tensors in found.items():
            save_file(tensors, place / f"{name}.safetensors")
        (place / "rest.json").write_text(json.dumps(rest))


def main() -> None:
    spec, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    steps.sibling("megatron_on_cpu").install()
    for case in spec["cases"]:
        run_case(spec, case, rank)


if __name__ == "__main__":
    steps.as_program(main)
