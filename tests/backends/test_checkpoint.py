"""Checkpoints: the same bits afterwards, torn ones noticed, the newest whole one found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.gang_rank import save

from myxa.actors.backends.torch_backend.backend import TorchBackend
from myxa.actors.checkpoints.folder import find_checkpoint, list_checkpoints, newest_checkpoint, rank_file
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.errors import TrainError
from myxa.core.samples import TrainShard

Backends = Callable[..., TorchBackend]
Shards = Callable[..., tuple[TrainShard, ...]]
Weights = Callable[[TorchBackend], dict[str, np.ndarray]]

OPTIONS = {
    "algo": {"minibatches": 2, "batch_size": 6},
    "optimizer": {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "lr": 1e-3},
    "num_steps": 5,
}


@pytest.fixture
def saved(tmp_path: Path, backends: Backends, make_shards: Shards) -> Path:
    """Two checkpoints, after one and after two steps; returns their folder."""
    backend = backends(**OPTIONS)
    for version in (1, 2):
        backend.train(make_shards(50 + version, minibatches=2)[0], {})
        save(backend, str(tmp_path / "checkpoints" / f"version_{version:08d}"), {"version": version, "names": ["a"]})
    return tmp_path / "checkpoints"


def test_the_next_step_after_loading_is_the_same_to_the_last_bit(
    tmp_path: Path, backends: Backends, make_shards: Shards, weights_of: Weights
) -> None:
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
    assert all(np.array_equal(one[n], two[n]) for n in one)


def test_lists_are_in_order_of_training_and_hold_what_was_given(saved: Path) -> None:
    infos = list_checkpoints(saved)
    assert [(i.path.name, i.num_updates, i.extra, i.problem) for i in infos] == [
        ("version_00000001", 2, {"version": 1, "names": ["a"]}, ""),
        ("version_00000002", 4, {"version": 2, "names": ["a"]}, ""),
    ]
    assert newest_checkpoint(saved) == (infos[1], ())
    assert newest_checkpoint(saved / "nothing") == (None, ())


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "no-manifest": lambda manifest, file: manifest.unlink(),
    "cut-file": lambda manifest, file: file.write_bytes(file.read_bytes()[:-100]),
    "no-file": lambda manifest, file: file.unlink(),
    "scrambled-manifest": lambda manifest, file: manifest.write_bytes(b'{"format": 1, "model"'),
    "foreign-file": lambda manifest, file: manifest.write_text(
        manifest.read_text().replace(f'"{file.name}"', '"../../etc/passwd"')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_checkpoint_is_named_passed_over_and_refused(
    saved: Path, backends: Backends, weights_of: Weights, damage: str
) -> None:
    torn = saved / "version_00000002"
    DAMAGES[damage](torn / "manifest.json", torn / rank_file(0))
    newest, passed_over = newest_checkpoint(saved)
    assert newest is not None
    assert newest.path.name == "version_00000001"
    assert [i.path for i in passed_over] == [torn]
    assert "torn" in passed_over[0].problem
    assert find_checkpoint(saved.parent) == newest.path
    backend = backends(**OPTIONS)
    before = weights_of(backend)
    with pytest.raises(TrainError, match=r"torn|no complete checkpoint"):
        backend.load(str(torn))
    after = weights_of(backend)
    assert all(np.array_equal(before[n], after[n]) for n in before)
    assert backend.load(str(saved)) == {"version": 1, "names": ["a"]}


def test_a_changed_byte_is_found_by_its_digest(saved: Path, backends: Backends) -> None:
    path = saved / "version_00000002" / rank_file(0)
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    assert newest_checkpoint(saved)[0] is not None, "sizes still fit"
    with pytest.raises(TrainError, match="have changed"):
        backends(**OPTIONS).load(str(saved / "version_00000002"))


def test_a_run_directory_or_a_folder_of_checkpoints_means_its_newest(saved: Path) -> None:
    assert find_checkpoint(saved.parent) == find_checkpoint(saved) == saved / "version_00000002"
    assert find_checkpoint(saved / "version_00000001") == saved / "version_00000001"
    with pytest.raises(TrainError, match=r"no complete checkpoint in .*nothing"):
        find_checkpoint(saved.parent / "nowhere")


def test_a_checkpoint_of_another_model_is_refused(saved: Path, tmp_path: Path, backends: Backends) -> None:
    make_tiny_model(tmp_path / "other", "1m", vocab_size=262)
    with pytest.raises(TrainError, match="num_layers is 2, here it is 4"):
        backends(folder=tmp_path / "other").load(str(saved))


def test_saving_over_a_checkpoint_replaces_it_and_leaves_no_scraps(saved: Path, backends: Backends) -> None:
    backend = backends(**OPTIONS)
    backend.load(str(saved / "version_00000001"))
    save(backend, str(saved / "version_00000002"), {"version": 7})
    assert [i.extra["version"] for i in list_checkpoints(saved)] == [1, 7]
    assert sorted(p.name for p in saved.iterdir()) == ["version_00000001", "version_00000002"]


def test_an_interrupted_save_leaves_the_old_checkpoint_and_no_visible_new_one(saved: Path, backends: Backends) -> None:
    scrap = saved / ".partial-version_00000003"
    shutil.copytree(saved / "version_00000002", scrap)
    (scrap / "manifest.json").unlink()
    assert len(list_checkpoints(saved)) == 2
    save(backends(**OPTIONS), str(saved / "version_00000003"), {})
    assert not scrap.exists()
    assert len(list_checkpoints(saved)) == 3


def test_a_checkpoint_written_later_holds_what_was_when_it_was_begun(
    tmp_path: Path, backends: Backends, make_shards: Shards, weights_of: Weights
) -> None:
    backend = backends(**OPTIONS)
    backend.train(make_shards(51, minibatches=2)[0], {})
    then = weights_of(backend)
    pending = backend.begin_save(str(tmp_path / "one"), {"version": 1})
    backend.train(make_shards(52, minibatches=2)[0], {})
    assert any(not np.array_equal(then[n], value) for n, value in weights_of(backend).items())
    with pytest.raises(TrainError, match="has not written its part"):
        pending.finish()
    pending.write()
    assert not (tmp_path / "one").exists(), "nobody may take it for whole before all ranks have written"
    pending.finish()
    assert backend.load(str(tmp_path / "one")) == {"version": 1}
    assert all(np.array_equal(then[n], value) for n, value in weights_of(backend).items())


@pytest.mark.parametrize("extra", [{"x": {1, 2}.__iter__}, {"x": (1, 2)}, {1: "x"}, {"x": float("nan")}])
def test_extra_that_would_not_come_back_is_refused(tmp_path: Path, backends: Backends, extra: Any) -> None:
    with pytest.raises(TrainError, match="extra"):
        save(backends(), str(tmp_path / "x"), extra)
    assert list_checkpoints(tmp_path) == ()


def test_looking_for_checkpoints_needs_no_torch() -> None:
    code = "import sys, myxa.actors.checkpoints.folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
