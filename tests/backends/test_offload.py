"""A torch rank whose memory leaves the device between steps trains what a rank trains that never moved, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.backends.gang_rank import make_shards, save

from myxa.actors.backends.rank_backend import RankSettings
from myxa.actors.backends.torch_backend.backend import TorchBackend
from myxa.actors.backends.torch_backend.offload import TorchOffload, planned
from myxa.core.config import AlgoConfig, CriticConfig, OptimizerConfig
from myxa.core.device_memory import OPTIMIZER_PARTS, Tag, whole_of
from myxa.core.samples import TrainShard
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostVmmDriver

MIB = 1 << 20
TAGS: tuple[Tag, ...] = ("params", "grads", *OPTIMIZER_PARTS, "frozen")
Shards = Callable[..., tuple[TrainShard, ...]]


def settings(model: Path, *, kl_coef: float = 0.0, has_critic: bool = False) -> RankSettings:
    return RankSettings(
        model_path=str(model), algo=AlgoConfig(kl_coef=kl_coef, kind="ppo" if has_critic else "grpo"),
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-4), critic=CriticConfig(enabled=has_critic),
    )  # fmt: skip


@pytest.fixture
def offload() -> TorchOffload:
    arena = Arena(HostVmmDriver("host:0", 64 * MIB), HostPool(64 * MIB), chunk_bytes=MIB)
    return TorchOffload(arena)


@pytest.fixture
def moving(model: Path, offload: TorchOffload) -> Iterator[TorchBackend]:
    backend = TorchBackend(settings(model, kl_coef=0.1), offload=offload)
    backend.setup()
    yield backend
    backend.close()


@pytest.fixture
def staying(model: Path) -> Iterator[TorchBackend]:
    backend = TorchBackend(settings(model, kl_coef=0.1))
    backend.setup()
    yield backend
    backend.close()


def everything(backend: TorchBackend) -> dict[str, bytes]:
    return {array.spec.name: bytes(array.data) for array in backend.export_weights()}


def test_training_between_moves_is_bit_equal(
    moving: TorchBackend, staying: TorchBackend, offload: TorchOffload, tmp_path: Path
) -> None:
    for step in range(4):
        (shard,) = make_shards(40 + step)
        offload.release(TAGS)
        assert {r.backing for r in offload.report()} == {"host", "discarded"}
        offload.restore(TAGS)
        told, expected = moving.train(shard, {}).metrics, staying.train(shard, {}).metrics
        assert told["train/loss"] == expected["train/loss"], f"step {step}"
        assert told["train/grad_norm"] == expected["train/grad_norm"], f"step {step}"
        assert everything(moving) == everything(staying), f"weights differ after step {step}"
    save(moving, str(tmp_path / "moving"), {"version": 4})
    offload.release(TAGS)
    offload.restore(TAGS)
    assert moving.load(str(tmp_path / "moving"))["version"] == 4
    assert everything(moving) == everything(staying)


def test_a_critic_leaves_and_comes_back_with_the_policy(model: Path, offload: TorchOffload) -> None:
    moving = TorchBackend(settings(model, has_critic=True), offload=offload)
    staying = TorchBackend(settings(model, has_critic=True))
    for backend in (moving, staying):
        backend.setup()
    try:
        num_parameters = sum(np.prod(array.spec.shape, dtype=int) for array in moving.export_weights())
        critic = moving._parts.state.critic  # type: ignore[union-attr]
        assert critic is not None
        num_parameters += sum(parameter.numel() for _, parameter in critic.model.parameters())
        for tag, (num_bytes, _) in planned(int(num_parameters), num_reference=0).items():
            taken = sum(r.num_bytes for r in offload.report() if whole_of(r.tag) == tag)
            assert num_bytes <= taken <= 1.05 * num_bytes + MIB
        for step in range(3):
            (shard,) = make_shards(80 + step, kind="ppo")
            offload.release(TAGS)
            offload.restore(TAGS)
            told, expected = moving.train(shard, {}).metrics, staying.train(shard, {}).metrics
            for name in ("loss", "value_loss", "critic_grad_norm", "explained_variance"):
                assert told[f"train/{name}"] == expected[f"train/{name}"], f"step {step}: {name}"
            assert everything(moving) == everything(staying), f"weights differ after step {step}"
    finally:
        moving.close()
        staying.close()


def test_only_what_changed_is_copied(moving: TorchBackend, offload: TorchOffload) -> None:
    size = {r.tag: r.num_bytes for r in offload.report()}
    (shard,) = make_shards(50)
    offload.release(TAGS)
    offload.restore(TAGS)
    again = offload.release(TAGS)
    assert again == 0, "nothing was written since it came back"
    offload.restore(TAGS)
    moving.train(shard, {})
    written = sum(num for tag, num in size.items() if whole_of(tag) in ("params", "optimizer"))
    assert offload.release(TAGS) == written
    offload.restore(("params",))
    assert {r.tag: r.backing for r in offload.report()}["optimizer"] == "host"


def test_a_part_of_the_optimizer_leaves_and_the_rest_stays(
    moving: TorchBackend, staying: TorchBackend, offload: TorchOffload
) -> None:
    def both(shard: TrainShard) -> None:
        moving.train(shard, {})
        staying.train(shard, {})

    (shard,) = make_shards(60)
    sizes = [r.num_bytes for r in offload.report() if r.tag in OPTIMIZER_PARTS]
    assert len(sizes) == len(OPTIMIZER_PARTS)
    assert max(sizes) <= 1.4 * min(sizes), "parts are about equal"
    both(shard)
    for gone in (OPTIMIZER_PARTS[:3], OPTIMIZER_PARTS[2:5]):
        moved = offload.release(gone)
        assert moved == sum(r.num_bytes for r in offload.report() if r.tag in gone)
        assert {r.tag for r in offload.report() if r.backing == "host"} == set(gone)
        offload.restore(gone)
        both(shard)
        assert everything(moving) == everything(staying)
