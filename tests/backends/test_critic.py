"""A critic beside the policy on one rank: advantages from its values, what it learns, what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.backends.gang_rank import Backends, close, critic_of, make_shards, same, save, weights_of

from myxa.actors.backends.torch_backend.backend import TorchBackend
from myxa.actors.backends.torch_backend.layout import plan_layout
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.errors import ConfigError, ModelError, TrainError
from myxa.core.samples import TrainShard

PPO = {"kind": "ppo", "gamma": 0.9, "lam": 0.8}
PLAIN = {"eps": 1e-4, "lr": 1e-3}


def critic(**settings: Any) -> dict[str, Any]:
    return {"enabled": True, "lr": 1e-2, **settings}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another folder, whose value head says something."""
    folder = tmp_path_factory.mktemp("judge")
    make_tiny_model(folder, "0p5m", seed=8, vocab_size=262)
    with_head(folder, folder, "score.weight", bias=True)
    return folder


def with_head(source: Path, folder: Path, name: str, *, rows: int = 1, bias: bool = False) -> None:
    tensors = load_file(source / "model.safetensors")
    width = tensors["model.norm.weight"].shape[0]
    tensors[name] = np.random.default_rng(5).normal(size=(rows, width)).astype(np.float32) / 8
    if bias:
        tensors[name.replace("weight", "bias")] = np.array([0.25], np.float32)
    save_file(tensors, folder / "model.safetensors")


def the_critic(backend: TorchBackend) -> Any:
    parts = backend._parts
    assert parts is not None
    state: Any = parts.state
    found = state.critic
    assert found is not None
    return found


def values_of(backend: TorchBackend, shard: TrainShard) -> list[np.ndarray]:
    """Of each sample's loss tokens, one sample at a time."""
    found = []
    for i in range(len(shard.samples)):
        layout = plan_layout(shard.samples, [i], linear_cost=100.0, device=torch.device("cpu"))
        found.append(the_critic(backend).values(layout).numpy())
    return found


def by_hand(rewards: float, values: np.ndarray, lam: float = PPO["lam"]) -> np.ndarray:
    advantages = np.zeros(len(values))
    ahead = 0.0
    for t in reversed(range(len(values))):
        is_last = t == len(values) - 1
        delta = (rewards if is_last else PPO["gamma"] * values[t + 1]) - values[t]
        ahead = delta + PPO["gamma"] * lam * ahead
        advantages[t] = ahead
    return advantages


def test_a_value_is_that_of_the_state_that_the_token_is_drawn_from(backends: Backends, judge: Path) -> None:
    """What comes behind a token, and the token itself, cannot change its value."""
    backend = backends(algo=PPO, critic=critic(path=str(judge)))
    (shard,) = make_shards(70, kind="ppo", with_tools=False)
    position = max(range(len(shard.samples)), key=lambda i: len(shard.samples[i].loss_mask))
    sample = shard.samples[position]
    before = values_of(backend, shard)[position]
    for t in range(len(sample.loss_mask)):
        tokens = sample.response_ids.copy()
        tokens[t] = (tokens[t] + 1) % 262
        changed = list(shard.samples)
        changed[position] = msgspec.structs.replace(sample, response_ids=tokens)
        after = values_of(backend, msgspec.structs.replace(shard, samples=tuple(changed)))[position]
        np.testing.assert_allclose(after[: t + 1], before[: t + 1], atol=1e-6)
        if t + 1 < len(before):
            assert abs(after[t + 1] - before[t + 1]) > 1e-6


@pytest.mark.parametrize(("whiten", "critic_lam"), [(True, PPO["lam"]), (False, 1.0)])
def test_the_step_is_that_of_advantages_computed_by_hand(
    backends: Backends, judge: Path, whiten: bool, critic_lam: float
) -> None:
    """GAE from the critic's values, given to a policy without a critic as advantages per token: the same weights come
    out. So does the value loss, of returns with the critic's own lambda."""
    (shard,) = make_shards(71, kind="ppo")
    algo = {**PPO, "whiten": whiten, "critic_lam": critic_lam}
    backend = backends(algo=algo, optimizer=PLAIN, critic=critic(path=str(judge)))
    values = values_of(backend, shard)
    advantages = [by_hand(s.advantage, v) for s, v in zip(shard.samples, values, strict=True)]
    joined = np.concatenate(advantages)
    mean, std = (joined.mean(), np.sqrt(joined.var(ddof=1) + 1e-8)) if whiten else (0, 1)
    white = [(a - mean) / std for a in advantages]
    metrics = backend.train(shard, {}).metrics
    samples = []
    for sample, row in zip(shard.samples, white, strict=True):
        placed = np.zeros(len(sample.loss_mask), np.float32)
        placed[sample.loss_mask == 1] = row
        samples.append(msgspec.structs.replace(sample, token_advantages=placed, advantage=1.0))
    plain = backends(algo={"kind": "grpo", "reduction": "token"}, optimizer=PLAIN)
    plain.train(msgspec.structs.replace(shard, samples=tuple(samples)), {})
    found, right = weights_of(backend), weights_of(plain)
    close(found, right, 2e-5)
    joined = np.concatenate([by_hand(s.advantage, v, critic_lam) for s, v in zip(shard.samples, values, strict=True)])
    returns = joined + np.concatenate(values)
    assert metrics["train/value_loss"] == pytest.approx(np.mean(joined**2), rel=1e-4)
    assert metrics["train/value_mean"] == pytest.approx(np.concatenate(values).mean(), rel=1e-4)
    assert metrics["train/explained_variance"] == pytest.approx(1 - joined.var() / returns.var(), rel=1e-3)
    assert metrics["train/value_clip_fraction"] == 0.0
    assert metrics["train/critic_lr"] == pytest.approx(1e-2)
    assert metrics["train/critic_grad_norm"] > 0


def test_a_kl_term_in_the_reward_is_foreseen_by_values_and_one_in_the_advantage_is_not(
    backends: Backends, judge: Path
) -> None:
    (shard,) = make_shards(71, kind="ppo")
    told = {}
    for place in ("loss", "reward", "advantage"):
        algo = {**PPO, "kl_coef": 0.5, "kl_in": place, "ref_path": str(judge)}
        told[place] = backends(algo=algo, critic=critic(path=str(judge))).train(shard, {}).metrics
    assert told["advantage"]["train/value_loss"] == told["loss"]["train/value_loss"]
    assert told["advantage"]["train/loss"] != told["loss"]["train/loss"]
    assert abs(told["reward"]["train/value_loss"] - told["loss"]["train/value_loss"]) > 1e-3


def test_cutting_a_batch_changes_nothing_and_mini_batches_share_the_values_of_the_start(
    backends: Backends, judge: Path
) -> None:
    results = []
    for max_tokens in (10_000, 60):
        algo = {**PPO, "minibatches": 3, "batch_size": 6, "reduction": "rollout"}
        backend = backends(algo=algo, optimizer=PLAIN, critic=critic(path=str(judge), value_clip=0.05))
        (shard,) = make_shards(72, kind="ppo", max_tokens=max_tokens, minibatches=3)
        results.append((backend.train(shard, {}).metrics, critic_of(backend)))
    (whole, weights), (cut, cut_weights) = results
    for name in ("value_loss", "value_mean", "explained_variance", "critic_grad_norm", "value_clip_fraction", "loss"):
        assert cut[f"train/{name}"] == pytest.approx(whole[f"train/{name}"], rel=1e-3), name
    assert 0 < whole["train/value_clip_fraction"] < 1, "later mini-batches have moved on"
    close(cut_weights, weights, 1e-4)


def test_a_critic_learns_what_a_batch_returns(backends: Backends) -> None:
    """From a head at zero, which explains nothing, alone until it does; the policy stays to the bit, versions count."""
    steps = 20
    backend = backends(algo={**PPO, "gamma": 1.0, "lam": 1.0}, critic=critic(lr=5e-3, value_clip=0, warmup_steps=steps))
    (shard,) = make_shards(73, kind="ppo", with_tools=False)
    before = {array.spec.name: bytes(array.data) for array in backend.export_weights()}
    told = [backend.train(msgspec.structs.replace(shard, step=step), {}).metrics for step in range(steps)]
    assert told[0]["train/explained_variance"] == 0.0
    assert told[0]["train/value_mean"] == 0.0
    assert told[-1]["train/explained_variance"] > 0.8
    assert told[-1]["train/value_loss"] < 0.2 * told[0]["train/value_loss"]
    assert {array.spec.name: bytes(array.data) for array in backend.export_weights()} == before
    assert {m["train/lr"] for m in told} == {0.0}
    assert {m["train/num_updates"] for m in told} == {0.0}
    after = backend.train(msgspec.structs.replace(shard, step=steps), {}).metrics
    assert after["train/num_updates"] == 1.0
    assert after["train/lr"] > 0
    assert {array.spec.name: bytes(array.data) for array in backend.export_weights()} != before


def test_a_checkpoint_without_a_critic_or_with_one_too_many_is_refused_and_changes_nothing(
    backends: Backends, tmp_path: Path
) -> None:
    (shard,) = make_shards(77, kind="ppo")
    backend, bare = (backends(algo=PPO, critic=setting) for setting in (critic(), None))
    for one, name in ((backend, "with"), (bare, "without")):
        one.train(shard, {})
        save(one, str(tmp_path / name), {})
    before = critic_of(backend), weights_of(backend)
    with pytest.raises(TrainError, match=r"is of a run without a critic, this run is not -- set \[critic\] as"):
        backend.load(str(tmp_path / "without"))
    with pytest.raises(TrainError, match=r"is of a run with a critic, this run is not"):
        bare.load(str(tmp_path / "with"))
    assert same(critic_of(backend), before[0])
    assert same(weights_of(backend), before[1])


@pytest.mark.parametrize(("size", "said"), [(1e30, "critic's loss"), (1e12, "critic's gradient")])
def test_a_critic_that_is_not_finite_stops_both(backends: Backends, size: float, said: str) -> None:
    """A head that gives values whose squares overflow, or whose gradient's squares do; the policy sees whitened
    advantages of them, and would be well."""
    backend = backends(algo=PPO, optimizer=PLAIN, critic=critic())
    (shard,) = make_shards(78, kind="ppo", max_tokens=60)
    head = the_critic(backend).model.module.value_head.weight
    torch.nn.init.constant_(head, size)
    before = critic_of(backend), weights_of(backend)
    with pytest.raises(
        TrainError, match=f"mini-batch 0: the {said} is not a finite number in micro-batch 0 of rank 0 "
    ):
        backend.train(shard, {})
    assert same(critic_of(backend), before[0])
    assert same(weights_of(backend), before[1])
    torch.nn.init.zeros_(head)
    assert np.isfinite(backend.train(shard, {}).metrics["train/value_loss"]), "the backend can still be used"


@pytest.mark.parametrize("name", ["value_head.weight", "score.weight"])
def test_a_value_head_in_the_folder_is_taken_over(backends: Backends, model: Path, tmp_path: Path, name: str) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with_head(model, tmp_path, name)
    backend = backends(algo=PPO, critic=critic(path=str(tmp_path)))
    weights = critic_of(backend)
    assert np.array_equal(weights["value_head.weight"], load_file(tmp_path / "model.safetensors")[name])
    assert not weights["value_head.bias"].any()
    with_head(model, tmp_path, name, rows=2)
    with pytest.raises(ModelError, match=rf"{name} has shape \[2, \d+\], a value head's is \[1, \d+\]"):
        backends(algo=PPO, critic=critic(path=str(tmp_path)))


def test_a_critic_of_another_vocabulary_is_refused(backends: Backends, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "foreign", "0p5m", seed=4, vocab_size=300)
    with pytest.raises(ConfigError, match=r"critic.path = .*foreign: its vocab_size is 300, that of model.path is 262"):
        backends(algo=PPO, critic=critic(path=str(tmp_path / "foreign")))
    with pytest.raises(ConfigError, match=r"critic.path: .*nowhere"):
        backends(algo=PPO, critic=critic(path=str(tmp_path / "nowhere")))
