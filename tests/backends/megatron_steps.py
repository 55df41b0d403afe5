"""One rank of a Megatron gang that trains in several layouts, one after another; a program for the tests.

    python megatron_steps.py SPEC.json RANK

Each case of the spec is a backend from set-up to close. What every rank measured goes to `CASE/rankR.json`, weights
(rank 0) to `CASE/*.npz`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec
import numpy as np

RELOAD_S = 30.0


def sibling(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def make_backend(spec: dict[str, Any], case: dict[str, Any], rank: int) -> Any:
    """A backend of a case, not set up yet."""
    from myxa.actors.backends.megatron.backend import MegatronBackend, MegatronRankSettings
    from myxa.actors.backends.torch_backend.world import Gang
    from myxa.core.config import AlgoConfig, LoraConfig, OptimizerConfig, TrainerConfig
    from myxa.core.config.learning import MegatronSettings

    return MegatronBackend(
        MegatronRankSettings(
            model_path=case["model"],
            algo=AlgoConfig.model_validate(case.get("algo", spec["algo"])),
            optimizer=OptimizerConfig.model_validate(case.get("optimizer", spec["optimizer"])),
            trainer=TrainerConfig.model_validate(case.get("trainer", {})),
            megatron=MegatronSettings.model_validate(case.get("megatron", {})),
            lora=LoraConfig.model_validate(case.get("lora", {})),
            num_steps=9,
            device=spec.get("device", "cpu"),
            gang=Gang(
                rank,
                spec["num_ranks"],
                "127.0.0.1",
                case["port"],
                local_rank=rank,
                timeout_s=60,
                backend="myxa_gloo" if case.get("reloads") else "",
            ),
        )
    )


def run_case(spec: dict[str, Any], case: dict[str, Any], rank: int) -> dict[str, Any]:
    from myxa.core.errors import MyxaError

    gang_rank = sibling("gang_rank")
    out = Path(spec["out"]) / case["name"]
    out.mkdir(parents=True, exist_ok=True)
    backend = make_backend(spec, case, rank)
    reload = reloading() if case.get("reloads") else lambda: None
    result: dict[str, Any] = {}
    if case.get("is_refused"):
        try:
            backend.setup()
        except MyxaError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
    backend.setup()
    try:
        grid = backend._parts.world.grid
        result["is_teller"], dp_size, dp_rank = grid.is_teller, grid.dp.size(), grid.dp.rank()
        algo = case.get("algo", spec["algo"])
        shards = [
            gang_rank.make_shards(
                seed,
                dp_size,
                kind=algo["kind"],
                minibatches=algo["minibatches"],
                temperatures=case.get("temperatures") or spec.get("temperatures", {}).get(algo["kind"], (1.0,)),
                is_served="ref_urls" in algo,
            )[dp_rank]
            for seed in case.get("seeds", (11, 12, 13))
        ]
        if case.get("watches_routing"):
            result["share_routed_alike"] = share_routed_alike(backend, shards[0])
            return result
        if case.get("load"):
            result["extra"] = backend.load(str(Path(spec["out"]) / case["load"] / "checkpoint"))
            gang_rank.keep(out / "loaded.npz", weights_of(backend))
        result["scores"] = named(shards[0], gang_rank.scored(backend, shards[0].samples))
        result["metrics"] = [backend.train(shards[0], {}).metrics]
        if case.get("counts_reads"):
            result["reads"] = gang_rank.reads_of(backend._parts.stepper.policy, shards[0])
        if algo["kind"] == "dpo":
            result["held_out"] = backend.train(gang_rank.held_out(shards[1]), {}).metrics
        if case.get("load") or case.get("optimizer"):
            gang_rank.keep(out / "weights_first.npz", weights_of(backend))
        for shard, knobs in zip(shards[1:], (gang_rank.LIVE, {}), strict=False):
            reload()
            result["metrics"].append(backend.train(shard, knobs).metrics)
        gang_rank.keep(out / "weights.npz", weights_of(backend))
        if case.get("sends"):
            result["on_device"] = {name: float(t.double().sum()) for name, t in backend.export_device()}
            result["on_all"] = {name: float(t.double().sum()) for name, t in backend.export_device(to_all=True)}
        if case.get("save"):
            pending = backend.begin_save(str(out / "checkpoint"), {"version": 3})
            result["metrics_after"] = backend.train(shards[0], {}).metrics
            pending.write()
            pending.finish()
            gang_rank.keep(out / "weights_after.npz", weights_of(backend))
        if case.get("loses_a_folder"):
            result["lost"] = without_its_folder(backend, out / "lost")
        if case.get("export_hf"):
            backend.export_hf(str(out / "hf"))
        mine = gang_rank.with_scores(shards[0], gang_rank.own_scores(backend, shards[0]))
        result["metrics_of_own_scores"] = backend.train(mine, {}).metrics
        if algo.get("loss_fn"):
            last = dp_size - 1
            wrong = gang_rank.poisoned(shards[0], rank=last, own=dp_rank, is_behaviour=True)
            gang_rank.keep(out / "before_failure.npz", weights_of(backend))
            result["failure"] = gang_rank.refusal(backend, wrong)
            gang_rank.keep(out / "after_failure.npz", weights_of(backend))
            result["metrics_again"] = backend.train(shards[0], {}).metrics
        if case.get("poison"):
            poisoned = gang_rank.poisoned(shards[0], rank=dp_size - 1, own=dp_rank)
            gang_rank.keep(out / "before_nan.npz", weights_of(backend))
            result["error"] = gang_rank.refusal(backend, poisoned)
            gang_rank.keep(out / "after_nan.npz", weights_of(backend))
            result["overflow"] = gang_rank.refusal(backend, overflowing(shards[0]))
            result["metrics_again"] = backend.train(shards[0], {}).metrics
    finally:
        backend.close()
    return result


def reloading() -> Callable[[], None]:
    """What drops all communicators and builds them again; to be called once a process, before the group is made."""
    from myxa.memory.communicators.reload import ReloadComms

    comms, epochs = ReloadComms(), itertools.count(1)
    comms.register()

    def reload() -> None:
        num_live = len(comms.live())
        assert len(comms._groups) > 10, "Megatron makes many groups"
        assert num_live > 2, "they are behind proxies"
        comms.release(next(epochs), RELOAD_S)
        assert not comms.live()
        comms.restore(next(epochs), RELOAD_S)
        assert len(comms.live()) >= num_live

    return reload


def without_its_folder(backend: Any, folder: Path) -> str:
    """What a checkpoint says whose folder goes away before it is written."""
    from myxa.actors.checkpoints.folder import partial_of
    from myxa.core.errors import TrainError

    pending = backend.begin_save(str(folder), {})
    shutil.rmtree(partial_of(folder))
    try:
        pending.write()
    except TrainError as error:
        return str(error)
    return "nothing"


def overflowing(shard: Any) -> Any:
    """The loss of its last trained sample is about 1e28: finite, but the squares of its gradient are not."""
    victim = [i for i, s in enumerate(shard.samples) if s.loss_mask.any() and s.advantage][-1]
    samples = list(shard.samples)
    samples[victim] = msgspec.structs.replace(samples[victim], advantage=-1e30)
    return msgspec.structs.replace(shard, samples=tuple(samples))


def share_routed_alike(backend: Any, shard: Any) -> float:
    """Of all tokens in all layers of experts: how many go to the same experts in the training passes of a step as in
    its scoring passes before."""
    maps: list[Any] = []
    for chunk in backend._parts.stepper.policy.chunks:
        for module in chunk.modules():
            if type(module).__name__ == "TopKRouter":
                module.register_forward_hook(lambda _module, _input, output: maps.append(output[1].clone()))
    backend.train(shard, {})
    half = len(maps) // 2
    assert half and len(maps) == 2 * half
    alike = [(a == b).all(dim=-1).float().mean().item() for a, b in zip(maps[:half], maps[half:], strict=True)]
    return sum(alike) / len(alike)


def weights_of(backend: Any) -> dict[str, np.ndarray]:
    """Exported weights as float32 (bfloat16 is its upper half); empty on other ranks than 0."""
    found: dict[str, np.ndarray] = {}
    for array in backend.export_weights():
        if array.spec.dtype == "bfloat16":
            values = (np.frombuffer(bytes(array.data), np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(bytes(array.data), np.float32)
        found[array.spec.name] = values.reshape(array.spec.shape)
    return found


def named(shard: Any, scores: list[np.ndarray]) -> dict[str, list[float]]:
    return {f"{s.group_id}/{s.index}": v.tolist() for s, v in zip(shard.samples, scores, strict=True)}


def preload() -> None:
    """Everything that takes long to import, before the ranks are forked."""
    sibling("megatron_on_cpu").install()
    sibling("gang_rank")
    import myxa.actors.backends.megatron.backend
    from myxa.memory.communicators.reload import load

    load()  # built once, not by ranks against their deadlines
    del myxa


def main() -> None:
    warnings.filterwarnings("ignore")
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(sys.argv[2])
    sibling("megatron_on_cpu").install()
    for case in spec["cases"]:
        result = run_case(spec, case, rank)
        (Path(spec["out"]) / case["name"] / f"rank{rank}.json").write_text(json.dumps(result))


def as_program(program: Callable[[], None]) -> NoReturn:
    """Run it and leave as launch/worker.py does: destructors of gloo's threads have aborted ranks that were done."""
    status = 0
    try:
        program()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    as_program(main)
