"""One rank of a trainer gang through a whole little run; a program for the tests, and their maker of batches.

    python gang_rank.py SPEC.json RANK

The test process calls `run` itself for a gang of one, so that all gangs go through the same steps.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from myxa.actors.backends.rank_backend import RankSettings
from myxa.actors.backends.torch_backend.accounting import skips_neutral
from myxa.actors.backends.torch_backend.backend import TorchBackend
from myxa.actors.backends.torch_backend.tensors import whole_tensor
from myxa.actors.backends.torch_backend.world import Gang
from myxa.actors.trainer.step_plan import StepPlanOptions, plan_step
from myxa.algos.objective import objective_config
from myxa.core.config import AlgoConfig, CriticConfig, LoraConfig, OptimizerConfig, TrainerConfig
from myxa.core.config.learning import PAIR_KINDS
from myxa.core.errors import MyxaError
from myxa.core.samples import Group, Message, Prompt, Sample, TrainShard

Backends = Callable[..., TorchBackend]
"""Of the fixture that makes them."""
VOCAB = 262
FROZEN = ("embed_tokens", r"layers\.0\.(mlp|self_attn\.q_)")
"""What a gang that shards its model does not train."""
LIVE = {"lr": 4e-4, "weight_decay": 0.3, "clip_high": 0.1}
"""Knobs as they stand in the second step."""


def make_groups(
    seed: int,
    num_groups: int = 6,
    num_samples: int = 4,
    *,
    with_tools: bool = True,
    temperatures: Sequence[float] = (1.0,),
) -> list[Group]:
    """Groups of random tokens and rewards; one group without spread, some masked stretches, one fully masked sample.

    Groups are drawn at `temperatures` in turn.
    """
    rng, judge = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    groups: list[Group] = []
    for group_id in range(num_groups):
        prompt_ids = rng.integers(0, VOCAB, int(rng.integers(3, 12))).astype(np.int32)
        samples: list[Sample] = []
        for index in range(num_samples):
            length = int(rng.integers(1, 10))
            mask = np.ones(length, np.uint8)
            if with_tools and index == 1:
                mask[length // 3 : 2 * length // 3] = 0
            if with_tools and (group_id, index) == (1, 2):
                mask[:] = 0
            logprobs = (-rng.random(length) * 3 - 3.5).astype(np.float32) * mask
            samples.append(
                Sample(
                    group_id=group_id, index=index, prompt_ids=prompt_ids,
                    response_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                    logprobs=logprobs.astype(np.float32), loss_mask=mask,
                    versions=np.where(mask == 1, 0, -1).astype(np.int32), finish="stop",
                    temperature=temperatures[group_id % len(temperatures)],
                    reference_logprobs=((-judge.random(length) * 3 - 3.5) * mask).astype(np.float32),
                )
            )  # fmt: skip
        rewards = rng.normal(size=num_samples) if group_id != 2 else np.ones(num_samples)
        prompt = Prompt(group_id=group_id, row=group_id, pass_index=0, messages=(Message(role="user", content="q"),))
        groups.append(Group(prompt=prompt, samples=tuple(samples), rewards=rewards.astype(np.float32)))
    return groups


def make_shards(
    seed: int,
    num_ranks: int = 1,
    *,
    kind: str = "grpo",
    max_tokens: int = 120,
    minibatches: int = 1,
    is_served: bool = False,
    **groups: Any,
) -> tuple[TrainShard, ...]:
    """One shard per rank, planned as the leader does. `is_served`: the reference log-probs come with the samples."""
    algo = AlgoConfig.model_validate({"kind": kind, "reduction": "rollout"})
    if is_served:
        algo = algo.model_copy(update={"ref_urls": ("http://teacher:1",)})
    options = StepPlanOptions(algo, num_ranks=num_ranks, max_tokens=max_tokens, minibatches=minibatches)
    if kind not in PAIR_KINDS:
        return plan_step(seed, make_groups(seed, **groups), options)
    pairs = make_groups(seed, num_samples=2, with_tools=False, **groups)
    right = np.asarray([1, 0], np.float32)
    return plan_step(seed, [msgspec.structs.replace(pair, rewards=right) for pair in pairs], options)


def held_out(shard: TrainShard) -> TrainShard:
    return msgspec.structs.replace(shard, is_held_out=True)


def make_backend(
    model: str | Path,
    *,
    algo: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    critic: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    gang: Gang | None = None,
    **rest: Any,
) -> TorchBackend:
    """A backend that is not set up yet."""
    config = RankSettings(
        model_path=str(model),
        algo=AlgoConfig.model_validate(algo or {}),
        optimizer=OptimizerConfig.model_validate(optimizer or {}),
        trainer=TrainerConfig.model_validate(trainer or {}),
        critic=CriticConfig.model_validate(critic or {}),
        lora=LoraConfig.model_validate(lora or {}),
        gang=gang or Gang(),
        **rest,
    )
    return TorchBackend(config)


def token_ids(sample: Sample) -> np.ndarray:
    """int32 [P + R]."""
    return np.concatenate([sample.prompt_ids, sample.response_ids])


def own_scores(backend: Any, shard: TrainShard) -> list[np.ndarray]:
    """Log-probs of the loss tokens by the very passes that `train` makes of the shard, and those of samples that it
    leaves out."""
    stepper = backend._parts.stepper
    objective = objective_config(stepper.settings.algo, max(1, len(shard.minibatches)))
    micros = [m for part in stepper.policy.cut(shard, skips_neutral=skips_neutral(objective)) for m in part]
    taken = {i for micro in micros for i in micro.layout.members}
    left = [[i for i in micro if i not in taken] for minibatch in shard.minibatches for micro in minibatch]
    return _scores(
        stepper.policy, shard.samples, [[m.layout for m in micros], stepper.policy.layouts(shard.samples, left)]
    )


def scored(backend: Any, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Log-probs of the loss tokens under the current weights, float32 [R] each, 0 where the mask is 0. Collective."""
    policy = backend._ready().stepper.policy
    micros = [list(range(i, min(i + 8, len(samples)))) for i in range(0, len(samples), 8)]
    longest = int(policy.world.max(torch.tensor([len(micros)])).item())
    return _scores(policy, samples, [policy.layouts(samples, micros + [[]] * (longest - len(micros)))])


def _scores(policy: Any, samples: Sequence[Sample], parts: Sequence[Sequence[Any]]) -> list[np.ndarray]:
    scores = [np.zeros(len(s.loss_mask), dtype=np.float32) for s in samples]
    for layouts in parts:
        for layout, found in zip(layouts, policy.score(layouts), strict=False):  # none where none is scored
            rows = np.split(found.logprobs_M.detach().float().cpu().numpy(), layout.offsets[1:-1])
            for i, row in zip(layout.members, rows, strict=False):
                scores[i][samples[i].loss_mask != 0] = row
    world = policy.world
    replica = world.grid.dp.rank() if hasattr(world, "grid") else world.rank
    own = np.concatenate([*scores, np.zeros(0, np.float32)]).tobytes().hex()
    said = [text.split() for text in world.exchange(f"{replica} {own}" if policy.is_scoring else "")]
    whole = next("".join(one[1:]) for one in said if one and one[0] == str(replica))
    found = np.frombuffer(bytes.fromhex(whole), np.float32)
    return np.split(found, np.cumsum([len(s) for s in scores])[:-1]) if scores else []


class Reads(TorchDispatchMode):
    """Counts what makes a host wait for its device: numbers that are read, and sizes that depend on numbers."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
        return func(*args, **(kwargs or {}))


def reads_of(policy: Any, shard: TrainShard) -> tuple[int, int]:
    """In a log-prob pass of all micro-batches, and in the norm of the gradients. Collective."""
    layouts = [micro.layout for part in policy.cut(shard, skips_neutral=False) for micro in part]
    with Reads() as in_pass:
        policy.score(layouts)
    with Reads() as in_norm:
        policy.gradient_norm()
    return in_pass.count, in_norm.count


def with_scores(shard: TrainShard, scores: Sequence[np.ndarray]) -> TrainShard:
    """The shard as if the scores had been the engine's log-probs."""
    samples = tuple(msgspec.structs.replace(s, logprobs=v) for s, v in zip(shard.samples, scores, strict=True))
    return msgspec.structs.replace(shard, samples=samples)


def weights_of(backend: TorchBackend) -> dict[str, np.ndarray]:
    """Copies of the exported float32 weights; empty on other ranks than 0."""
    return {
        a.spec.name: np.frombuffer(bytes(a.data), np.float32).reshape(a.spec.shape) for a in backend.export_weights()
    }


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """To the bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def close(found: dict[str, np.ndarray], right: dict[str, np.ndarray], atol: float) -> None:
    assert found.keys() == right.keys()
    for name in right:
        np.testing.assert_allclose(found[name], right[name], rtol=0, atol=atol, err_msg=name)


def save(backend: Any, folder: str, extra: dict[str, Any]) -> None:
    """A whole checkpoint. Collective."""
    pending = backend.begin_save(folder, extra)
    pending.write()
    pending.finish()


def run(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train, save, go on, come back, meet a NaN. Weights go to `out`, the rest is returned."""
    out = Path(spec["out"])
    gang = Gang(rank, spec["num_ranks"], "127.0.0.1", spec["port"], local_rank=rank, timeout_s=60)
    backend = make_backend(
        spec["model"], algo=spec["algo"], optimizer=spec["optimizer"], trainer=spec["trainer"],
        critic=spec.get("critic"), lora=spec.get("lora"), gang=gang, num_steps=9, device=spec.get("device", "cpu"),
    )  # fmt: skip
    kind, minibatches = spec["algo"]["kind"], spec["algo"]["minibatches"]
    shards = [make_shards(seed, spec["num_ranks"], kind=kind, minibatches=minibatches)[rank] for seed in (11, 12, 13)]
    result: dict[str, Any] = {"facts": backend.setup(), "frozen": spec["trainer"].get("freeze", ())}
    try:
        result["scores"] = {
            f"{s.group_id}/{s.index}": scores.tolist()
            for s, scores in zip(shards[0].samples, scored(backend, shards[0].samples), strict=True)
        }
        result["metrics"] = [backend.train(shards[0], {}).metrics, backend.train(shards[1], LIVE).metrics]
        result["mark"] = [float(p.detach().double().sum()) for p in parameters_of(backend)]
        keep(out / "weights.npz", weights_of(backend))
        result["critic_mark"] = [float(v.astype(np.float64).sum()) for v in critic_of(backend).values()]
        keep_critic(out, "critic", backend)
        result["sent"], result["sent_to_all"] = (
            {name: float(t.double().sum()) for name, t in backend.export_device(to_all=to_all)}
            for to_all in (False, True)
        )
        scored(backend, shards[0].samples)  # a pass without gradient leaves nothing behind that would be saved
        save(backend, str(out / "checkpoints" / "two"), {"version": 2})
        result["metrics"].append(backend.train(shards[2], {}).metrics)
        keep(out / "weights_on.npz", weights_of(backend))
        keep_critic(out, "critic_on", backend)
        result["extra"] = backend.load(str(out / "checkpoints"))
        keep(out / "weights_back.npz", weights_of(backend))
        keep_critic(out, "critic_back", backend)
        backend.train(shards[2], {})
        keep(out / "weights_again.npz", weights_of(backend))
        keep_critic(out, "critic_again", backend)
        backend.export_hf(str(out / "hf"))
        if kind in PAIR_KINDS:  # a pair without signs is refused before its loss is made
            return result
        result["error"] = refusal(backend, poisoned(shards[0], rank=spec["num_ranks"] - 1, own=rank))
        keep(out / "weights_after_nan.npz", weights_of(backend))
        keep_critic(out, "critic_after_nan", backend)
        if spec.get("critic"):
            result["held"] = backend.train(msgspec.structs.replace(shards[2], step=0), {}).metrics
            keep(out / "weights_held.npz", weights_of(backend))
            keep_critic(out, "critic_held", backend)
            save(backend, str(out / "held"), {})
        if spec["algo"].get("loss_fn"):
            last = spec["num_ranks"] - 1
            result["failure"] = refusal(backend, poisoned(shards[0], rank=last, own=rank, is_behaviour=True))
            keep(out / "weights_after_failure.npz", weights_of(backend))
            result["metrics_again"] = backend.train(shards[0], {}).metrics
    finally:
        backend.close()
    return result


def parameters_of(backend: TorchBackend) -> list[Any]:
    """What this rank holds of them."""
    parts = backend._parts
    assert parts is not None
    state: Any = parts.state
    return [getattr(p, "_local_tensor", p) for p in state.policy.module.parameters()]


def critic_of(backend: TorchBackend) -> dict[str, np.ndarray]:
    """Copies of the critic's float32 weights, whole, on every rank; empty without one. Collective."""
    parts = backend._parts
    assert parts is not None
    state: Any = parts.state
    critic = state.critic
    named = [] if critic is None else critic.model.parameters()
    return {name: whole_tensor(p.detach()).numpy().copy() for name, p in named}


def keep_critic(out: Path, name: str, backend: TorchBackend) -> None:
    """By the first rank; what it is made of is gathered from all."""
    weights = critic_of(backend)
    parts = backend._parts
    assert parts is not None
    keep(out / f"{name}.npz", weights if parts.world.rank == 0 else {})


def keep(path: Path, weights: dict[str, np.ndarray]) -> None:
    if weights:
        np.savez(path, allow_pickle=False, **weights)


def poisoned(shard: TrainShard, *, rank: int, own: int, is_behaviour: bool = False) -> TrainShard:
    """The last rank's first trained sample gets a NaN, or log-probs of the engine's that are far too high."""
    if rank != own:
        return shard
    victim = next(i for i, s in enumerate(shard.samples) if s.loss_mask.any() and s.advantage)
    samples = list(shard.samples)
    wrong: dict[str, Any] = {"advantage": float("nan")}
    if is_behaviour:
        wrong = {"logprobs": samples[victim].logprobs - np.float32(99)}
    samples[victim] = msgspec.structs.replace(samples[victim], **wrong)
    return msgspec.structs.replace(shard, samples=tuple(samples))


def refusal(backend: TorchBackend, shard: TrainShard) -> str:
    try:
        backend.train(shard, {})
    except MyxaError as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    the_spec = json.loads(Path(sys.argv[1]).read_text())
    the_result = run(the_spec, int(sys.argv[2]))
    (Path(the_spec["out"]) / f"rank{sys.argv[2]}.json").write_text(json.dumps(the_result))
    sys.stdout.flush()
    os._exit(0)  # as launch/worker.py does: destructors of gloo's threads have aborted ranks that were done
