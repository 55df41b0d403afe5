"""A Megatron rank whose memory leaves between steps; a program for the tests.

    python megatron_moving.py SPEC.json RANK

Every case trains twice, once staying and once moving, and writes both runs' weights and metrics to `CASE/rankR.json`.
The housing is of ordinary memory: what is away holds NaN, so that whatever is read too early shows in the weights.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from megatron_steps import as_program, preload, sibling  # noqa: F401 -- preload: for rank_gang.py


class Shelf:
    """A `Housing` of ordinary memory that knows where Megatron keeps what."""

    def __init__(self) -> None:
        self.backend: Any = None
        self.regions: list[tuple[str, str]] = []
        self.shrunk: tuple[str, ...] = ()
        self.parts: tuple[str, ...] = ()
        self.policy: dict[str, str] = {}
        self.backing: dict[str, str] = {}
        self.copies: dict[str, list[torch.Tensor]] = {}
        self.dirty: list[str] = []
        self.num_waits = 0

    def region(self, tag: str, policy: str) -> AbstractContextManager[None]:
        self.regions.append((tag, policy))
        self.policy[tag] = policy
        self.backing[tag] = "mapped_dirty"
        return nullcontext()

    def shrink(self, tags: tuple[str, ...]) -> None:
        self.shrunk = tuple(tags)

    def divide(self, parts: tuple[str, ...]) -> None:
        """Moments are dealt out to the parts in turn."""
        self.parts = parts
        for part in parts:
            self.policy[part], self.backing[part] = "backup", "mapped_dirty"

    def mark_dirty(self, tag: str) -> None:
        assert self.backing[tag].startswith("mapped") or self.backing[tag] == "copy_in", (tag, self.backing)
        self.backing[tag] = "mapped_dirty"
        self.dirty.append(tag)

    def tensors(self, tag: str) -> list[torch.Tensor]:
        optimizer = self.backend._parts.state.policy.optimizer
        if tag in ("params", "grads"):
            buffers = [b for chunk in optimizer.chunks for b in [*chunk.buffers, *chunk.expert_parallel_buffers]]
            return [b.param_data if tag == "params" else b.grad_data for b in buffers]
        if tag in self.parts:
            states = [state for inner in optimizer.torch_optimizers() for state in inner.state.values()]
            moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
            return moments[self.parts.index(tag) :: len(self.parts)]
        masters = [p.data for inner in optimizer.torch_optimizers() for g in inner.param_groups for p in g["params"]]
        own = {t.untyped_storage().data_ptr() for t in self.tensors("params")}  # float32: the masters are these
        return [m for m in masters if m.untyped_storage().data_ptr() not in own]

    def report(self) -> tuple[Any, ...]:
        from myxa.core.device_memory import TagReport

        make: Any = TagReport
        return tuple(
            make(tag=tag, num_bytes=1, policy=self.policy[tag], backing=backing)
            for tag, backing in self.backing.items()
            if tag != "frozen"
        )

    def release(self, tags: Any) -> Any:
        for tag in tags:
            if self.policy[tag] == "backup":
                self.copies[tag] = [t.clone() for t in self.tensors(tag)]
            for tensor in self.tensors(tag):
                tensor.fill_(float("nan"))
            self.backing[tag] = "host" if self.policy[tag] == "backup" else "discarded"
        return 0

    def begin_restore(self, tags: Any, *, awaited: Any) -> Shelf:
        for tag in tags:
            if tag == "grads":
                for tensor in self.tensors(tag):
                    tensor.zero_()
            self.backing[tag] = "copy_in" if tag != "grads" else "mapped_dirty"
        return self

    def wait(self, tag: str) -> None:
        """Only now the contents are there: whoever read them before has read NaN."""
        if self.policy[tag] == "backup" and self.backing[tag] == "copy_in":
            self.num_waits += 1
            for tensor, copy in zip(self.tensors(tag), self.copies[tag], strict=True):
                tensor.copy_(copy)
            self.backing[tag] = "mapped_clean"

    def close(self) -> None:
        self.backing.clear()


def run(spec: dict[str, Any], case: dict[str, Any], rank: int, *, moves: bool) -> dict[str, Any]:
    steps, gang_rank = sibling("megatron_steps"), sibling("gang_rank")
    from myxa.actors.backends.megatron.backend import MegatronBackend
    from myxa.actors.backends.megatron.offload import MegatronOffload, rebuilds_params
    from myxa.core.device_memory import OPTIMIZER_PARTS

    plain = steps.make_backend(spec, case | {"port": case["ports"][moves]}, rank)
    config = plain._config
    shelf: Any = Shelf()
    rebuilds = rebuilds_params(config.megatron, config.trainer) and case["policy"] != "backup"
    offload = MegatronOffload(lambda _: shelf, config.megatron, rebuilds=rebuilds)
    backend: Any = MegatronBackend(config, offload=offload if moves else None)
    shelf.backend = backend
    backend.setup()
    tags = ("params", "grads", "masters", *OPTIMIZER_PARTS)
    told: dict[str, Any] = {"metrics": [], "scores": []}
    try:
        replicas = backend._parts.world.grid.dp
        dp_size, dp_rank = replicas.size(), replicas.rank()
        for seed in (11, 12, 13):
            shard = gang_rank.make_shards(seed, dp_size, kind="grpo", minibatches=2)[dp_rank]
            if moves:
                # What leaves one device need not leave the others: rank 1 keeps its parameters once.
                gone = tags if rank == 0 or seed != 12 else ("grads", *OPTIMIZER_PARTS[2:])
                offload.release(gone)
                offload.restore(gone)
            try:
                metrics = backend.train(shard, {}).metrics
            except Exception as error:
                raise AssertionError(f"{case['name']}, moves={moves}, seed {seed}") from error
            told["metrics"].append({k: metrics[k] for k in ("train/loss", "train/grad_norm")})
            if moves:
                offload.release(("params", "masters", *OPTIMIZER_PARTS))
                offload.restore(("params", "masters", *OPTIMIZER_PARTS))
            told["scores"].append([s.tolist() for s in sibling("gang_rank").scored(backend, shard.samples)])
        folder = str(Path(spec["out"]) / case["name"] / f"checkpoint{moves}")
        if moves:
            offload.release(OPTIMIZER_PARTS)
            offload.restore(OPTIMIZER_PARTS)
        sibling("gang_rank").save(backend, folder, {"version": 3})
        backend.load(folder)
        told["weights"] = {name: crc32(values.tobytes()) for name, values in steps.weights_of(backend).items()}
        told["regions"], told["shrunk"], told["dirty"] = shelf.regions, shelf.shrunk, shelf.dirty
        told["waits"] = shelf.num_waits
    finally:
        backend.close()
    return told


def main() -> None:
    warnings.filterwarnings("ignore")
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(sys.argv[2])
    sibling("megatron_on_cpu").install()
    for case in spec["cases"]:
        out = Path(spec["out"]) / case["name"]
        out.mkdir(parents=True, exist_ok=True)
        result = {str(moves): run(spec, case, rank, moves=moves) for moves in (False, True)}
        (out / f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    as_program(main)
