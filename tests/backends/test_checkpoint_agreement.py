"""Ranks load the same checkpoint or none: what one of them finds is raised on all, each file is read by one of them, and
trouble with a file is no mistake in the configuration."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.gang_rank import save
from torch import Tensor

from myxa.actors.backends import checkpoint
from myxa.actors.backends.checkpoint import agreed_checkpoint
from myxa.actors.backends.torch_backend import checkpoint as checkpoint_module
from myxa.actors.backends.torch_backend.world import World
from myxa.actors.checkpoints import folder as folder_module
from myxa.actors.checkpoints.folder import Manifest, begin, commit, rank_file
from myxa.core.errors import ModelError, MyxaError, TornCheckpoint, TrainError
from myxa.core.files import FileEntry, describe_file

NUM_RANKS = 3


class ThreadWorld(World):
    """Ranks as threads: what they say to each other goes through a list."""

    def __init__(self, rank: int, barrier: threading.Barrier, box: list[Tensor]) -> None:
        super().__init__(rank, NUM_RANKS, torch.device("cpu"), None)
        self._barrier, self._box = barrier, box

    def gather(self, values: Tensor) -> Tensor:
        self._box[self.rank] = values
        self._barrier.wait()
        rows = torch.stack(self._box)
        self._barrier.wait()
        return rows


def on_all(work: Callable[[World], Any]) -> list[Any]:
    """What it came to on each rank."""
    barrier, box = threading.Barrier(NUM_RANKS, timeout=20), [torch.zeros(0)] * NUM_RANKS

    def one(rank: int) -> Any:
        try:
            return work(ThreadWorld(rank, barrier, box))
        except MyxaError as error:
            return error

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(one, range(NUM_RANKS)))


def nothing_to_check(folder: Path, manifest: Manifest) -> None:
    """Any will do."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Of three ranks."""
    place = tmp_path / "checkpoints" / "version_00000002"
    partial = begin(place)
    for rank in range(NUM_RANKS):
        (partial / rank_file(rank)).write_bytes(bytes([rank]) * 500)
    files = tuple(describe_file(partial / rank_file(rank)) for rank in range(NUM_RANKS))
    told = {"version": 2}
    commit(place, Manifest(format=1, model={}, world_size=NUM_RANKS, num_updates=7, files=files, extra=told))
    return place


def test_words_of_any_length_reach_every_rank() -> None:
    words = ("", "zwölf Boxkämpfer", "x" * 70_000)
    assert on_all(lambda world: world.exchange(words[world.rank])) == [words] * NUM_RANKS
    assert on_all(lambda world: world.exchange("")) == [("", "", "")] * NUM_RANKS


@pytest.mark.parametrize("up", [0, 2])
def test_all_mean_the_same_and_each_file_is_read_once(saved: Path, monkeypatch: pytest.MonkeyPatch, up: int) -> None:
    read: list[str] = []

    def noted(path: Path) -> FileEntry:
        read.append(path.name)
        return describe_file(path)

    place = saved if not up else saved.parent.parent
    answers = on_all(lambda world: agreed_checkpoint(world, place, nothing_to_check))
    assert [folder for folder, _ in answers] == [saved] * NUM_RANKS
    monkeypatch.setattr(folder_module, "describe_file", noted)
    on_all(lambda world: agreed_checkpoint(world, saved, nothing_to_check))
    assert sorted(read) == [rank_file(rank) for rank in range(NUM_RANKS)]


def test_what_one_rank_finds_torn_is_raised_on_all(saved: Path) -> None:
    (saved / rank_file(1)).write_bytes(bytes(500))
    answers = on_all(lambda world: agreed_checkpoint(world, saved, nothing_to_check))
    assert {type(answer) for answer in answers} == {TornCheckpoint}
    (said,) = {str(answer) for answer in answers}
    assert "rank 1: " in said
    assert "the bytes of rank-00001.safetensors have changed" in said


def test_ranks_that_see_different_ones_do_not_begin(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them reads an older manifest of that name from its cache."""
    lot = iter(["stale", *["fresh"] * NUM_RANKS])
    monkeypatch.setattr(checkpoint, "digest_of_manifest", lambda folder: next(lot))
    answers = on_all(lambda world: agreed_checkpoint(world, saved, nothing_to_check))
    for answer in answers:
        assert isinstance(answer, TrainError)
        assert not isinstance(answer, TornCheckpoint)
        assert "ranks see different checkpoints" in answer.message
        assert "manifest stale" in answer.message


def test_one_that_a_rank_cannot_use_is_refused_by_all(saved: Path) -> None:
    def refuses(world: World) -> Any:
        def check(folder: Path, manifest: Manifest) -> None:
            if world.rank == 2:
                raise TrainError("of another model")

        return agreed_checkpoint(world, saved, check)

    answers = on_all(refuses)
    assert [type(answer) for answer in answers] == [TrainError] * NUM_RANKS
    assert "failed on rank 2" in answers[0].message


def test_a_file_that_cannot_be_read_or_written_is_tried_again(
    tmp_path: Path, backends: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that ends with a ModelError ends the run: its configuration would be wrong."""
    place = str(tmp_path / "one")
    backend = backends()
    save(backend, place, {"version": 1})

    def fails(*_: Any) -> Any:
        raise ModelError("[Errno 5] Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "open_safetensors", fails)
        with pytest.raises(TrainError, match=r"loading checkpoint .*Input/output error"):
            backend.load(place)
        patch.setattr(checkpoint, "write_safetensors", fails)
        with pytest.raises(TrainError, match=r"saving checkpoint .*Input/output error"):
            save(backend, place, {"version": 1})
    assert backend.load(place) == {"version": 1}
