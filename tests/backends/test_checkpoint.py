"""Checkpoints: the same bits afterwards, torn ones noticed, the newest whole one found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.backends.gang_rank import Backends, make_shards, same, save, weights_of
from tests.models.deepseek import DEEPSEEK_V3

from myxa.actors.checkpoints.folder import Manifest, check_model, identity_of, list_checkpoints, rank_file
from myxa.actors.models.model_config import parse_model_config
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.errors import TrainError

OPTIONS = {
    "algo": {"minibatches": 2, "batch_size": 6},
    "optimizer": {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "lr": 1e-3},
    "num_steps": 5,
}


@pytest.fixture
def saved(tmp_path: Path, backends: Backends) -> Path:
    """Two checkpoints, after one and after two steps; returns their folder."""
    backend = backends(**OPTIONS)
    for version in (1, 2):
        backend.train(make_shards(50 + version, minibatches=2)[0], {})
        save(backend, str(tmp_path / "checkpoints" / f"version_{version:08d}"), {"version": version, "names": ["a"]})
    return tmp_path / "checkpoints"


def test_the_next_step_after_loading_is_the_same_to_the_last_bit(tmp_path: Path, backends: Backends) -> None:
    first = backends(**OPTIONS)
    first.train(make_shards(51, minibatches=2)[0], {})
    save(first, str(tmp_path / "one"), {})
    torch_draw_expected = torch.rand(3)
    expected = first.train(make_shards(52, minibatches=2)[0], {}).metrics
    second = backends(**OPTIONS, seed=99)
    second.train(make_shards(53, minibatches=2)[0], {})  # whatever was there before must leave no trace
    assert second.load(str(tmp_path / "one")) == {}
    assert torch.equal(torch.rand(3), torch_draw_expected)
    got = second.train(make_shards(52, minibatches=2)[0], {}).metrics
    for name, value in expected.items():
        if not name.endswith("_s"):
            assert got[name] == value, name
    one, two = weights_of(first), weights_of(second)
    assert same(one, two)


@pytest.mark.parametrize("damage", [-5000, None])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
    saved: Path, backends: Backends, damage: int | None
) -> None:
    """A byte that changed, or the end that is missing; the one before is whole."""
    path = saved / "version_00000002" / rank_file(0)
    data = bytearray(path.read_bytes())
    if damage is None:
        del data[-100:]
    else:
        data[damage] ^= 1
    path.write_bytes(data)
    backend = backends(**OPTIONS)
    before = weights_of(backend)
    with pytest.raises(TrainError, match="have changed" if damage else "torn"):
        backend.load(str(saved / "version_00000002"))
    after = weights_of(backend)
    assert same(before, after)
    assert backend.load(str(saved)) == {"version": 1, "names": ["a"]}


def test_a_checkpoint_of_another_model_is_refused(saved: Path, tmp_path: Path, backends: Backends) -> None:
    make_tiny_model(tmp_path / "other", "1m", vocab_size=262)
    with pytest.raises(TrainError, match="num_layers is 2, here it is 4"):
        backends(folder=tmp_path / "other").load(str(saved))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts_per_tok": 4, "topk_group": 2}, "experts_per_token is 8, here it is 4"),
        ({"routed_scaling_factor": 1.0}, "routed_scaling is 2.5, here it is 1.0"),
        ({"rope_interleave": False}, "is_rope_interleaved is True, here it is False"),
        ({"first_k_dense_replace": 2}, r"dense_layers is \[0, 1, 2\], here it is \[0, 1\]"),
    ],
)
def test_weights_that_would_compute_something_else_are_of_another_model(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """Shapes are the same. What a config says of number types and lengths may change."""
    source = {**DEEPSEEK_V3, "quantization_config": None}
    facts = identity_of(parse_model_config(source, "x"))
    manifest = Manifest(format=1, model=facts, world_size=1, num_updates=1, files=(), extra={}, backend="megatron")
    longer = parse_model_config(source | {"max_position_embeddings": 99, "torch_dtype": "float32"}, "x")
    check_model(tmp_path, manifest, longer, "megatron")
    changed = parse_model_config(source | change, "x")
    assert not changed.foreign
    with pytest.raises(TrainError, match=f"is of another model: {named}"):
        check_model(tmp_path, manifest, changed, "megatron")
    earlier = {name: facts[name] for name in ("model_type", "vocab_size", "hidden_size", "rope_scaling")}
    check_model(tmp_path, msgspec.structs.replace(manifest, model=earlier), changed, "megatron")


def test_a_checkpoint_written_later_holds_what_was_when_it_was_begun(saved: Path, backends: Backends) -> None:
    """In the place of an older one, which is there until then."""
    backend, place = backends(**OPTIONS), saved / "version_00000002"
    backend.train(make_shards(51, minibatches=2)[0], {})
    then = weights_of(backend)
    pending = backend.begin_save(str(place), {"version": 7})
    backend.train(make_shards(52, minibatches=2)[0], {})
    assert not same(then, weights_of(backend))
    with pytest.raises(TrainError, match="has not written its part"):
        pending.finish()
    pending.write()
    assert [i.extra["version"] for i in list_checkpoints(saved)] == [1, 2], "not all ranks may have written"
    pending.finish()
    assert sorted(p.name for p in saved.iterdir()) == ["version_00000001", "version_00000002"]
    assert backend.load(str(place)) == {"version": 7}
    assert same(then, weights_of(backend))
