"""Checkpoints as folders: whatever a crash or a bad disk leaves of one, the newest whole one is found and the others
are named with what is wrong with them; what is deleted is never the newest whole one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.survival.checkpoint_maker import RunOnDisk, add_run_part, flip, grow, halve, make_checkpoint, remove
from tests.survival.checkpoint_room import checkpoint_options

from myxa.actors.checkpoints import folder
from myxa.actors.checkpoints.folder import (
    MANIFEST,
    find_checkpoint,
    list_checkpoints,
    newest_whole,
    put_in_place,
    rank_file,
)
from myxa.actors.trainer.checkpoints import Checkpoints
from myxa.core.errors import TrainError

DAMAGE = {
    f"{how.__name__} {name}": (how, name)
    for name in (rank_file(0), rank_file(1), MANIFEST)
    for how in (halve, flip, remove, grow)
    if (how, name) != (flip, MANIFEST)  # a flipped bit of a number is another number
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_one_is_passed_over_and_named(tmp_path: Path, name: str):
    for version in (10, 20, 30):
        make_checkpoint(tmp_path / f"version_{version:08d}", version)
    hurt, file = DAMAGE[name]
    hurt(tmp_path / "version_00000030" / file)
    newest, passed = newest_whole(tmp_path)
    assert newest is not None
    assert newest.version == 20
    assert [info.path.name for info in passed] == ["version_00000030"]
    assert "is torn: " in passed[0].problem
    assert ("is missing" in passed[0].problem) is (hurt is remove)
    assert find_checkpoint(tmp_path) == tmp_path / "version_00000020"


MISREAD = [("num_updates", -1), ("world_size", 0)] + [("version", value) for value in (None, -3, 6.5, "six", True)]


@pytest.mark.parametrize(("name", "value"), MISREAD)
def test_a_manifest_with_a_number_that_cannot_be_is_torn(tmp_path: Path, name: str, value: Any):
    for version in (10, 20):
        make_checkpoint(tmp_path / f"version_{version:08d}", version)
    path = tmp_path / "version_00000020" / MANIFEST
    manifest = json.loads(path.read_bytes())
    manifest["extra" if name == "version" else name] = {name: value} if name == "version" else value
    path.write_text(json.dumps(manifest))
    newest, passed = newest_whole(tmp_path)
    assert newest is not None
    assert newest.version == 10
    assert [(info.path.name, f"{name}" in info.problem) for info in passed] == [("version_00000020", True)]


# -- one takes another's place -------------------------------------------------------------------------------------


class Crash(Exception):
    """Of the process, at this moment."""


def crash_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """The m-th change of names or of the disk during a commit is the last thing that happens. Returns what did."""
    done: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **options: Any) -> Any:
            if len(done) == number:
                raise Crash
            done.append(name)
            return real(*args, **options)

        return change

    monkeypatch.setattr(Path, "replace", counted("rename", Path.replace))
    monkeypatch.setattr(folder.shutil, "rmtree", counted("delete", folder.shutil.rmtree))
    return done


def test_a_crash_at_any_moment_of_a_replacement_leaves_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: set[bytes] = set()
    for moment in range(20):
        place = tmp_path / str(moment) / "version_00000007"
        make_checkpoint(place, 7, fill=b"old")
        with monkeypatch.context() as patch:
            done = crash_at(patch, moment)
            try:
                make_checkpoint(place, 7, fill=b"new")
            except Crash:
                has_crashed = True
            else:
                has_crashed = False
        newest, passed = newest_whole(place.parent)
        assert newest is not None, done
        assert passed == ()
        assert newest.version == 7
        assert find_checkpoint(place) == newest.path, "also by its own name"
        assert newest_whole(place.parent, reads_all=False)[0] == newest
        seen.add((newest.path / rank_file(0)).read_bytes()[:3])
        if not has_crashed:
            break
        make_checkpoint(place, 7, fill=b"end")  # the next one takes its place all the same
        assert [info.path for info in list_checkpoints(place.parent)] == [place]
        assert (place / rank_file(0)).read_bytes()[:3] == b"end"
    else:
        pytest.fail("it never came to its end")
    assert seen == {b"old", b"new"}


def test_what_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = make_checkpoint(tmp_path / "version_00000007", 7, fill=b"old")

    rename = Path.replace

    def refuse(one: Path, other: Path) -> Path:
        if one == place:
            raise PermissionError(1, "Operation not permitted")
        return rename(one, other)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(TrainError, match="cannot commit checkpoint"):
            make_checkpoint(place, 7, fill=b"new")
    assert (place / rank_file(0)).read_bytes()[:3] == b"old"
    with pytest.raises(OSError, match="No such file"):
        put_in_place(tmp_path / "nothing", tmp_path / "nowhere")


@pytest.mark.parametrize("is_purged", [False, True])
def test_one_that_was_moved_to_another_disk_is_replaced_and_deleted_as_any_other(tmp_path: Path, is_purged: bool):
    """A link is in its place; what it leads to is not ours, and may be gone."""
    place, elsewhere = tmp_path / "checkpoints" / "version_00000007", tmp_path / "elsewhere"
    make_checkpoint(place, 7, fill=b"old").replace(elsewhere)
    place.symlink_to(elsewhere)
    if is_purged:
        elsewhere.rename(tmp_path / "gone")
    make_checkpoint(place, 7, fill=b"new")
    assert not place.is_symlink()
    assert (place / rank_file(0)).read_bytes()[:3] == b"new"
    place.replace(tmp_path / "newer")
    place.symlink_to(tmp_path / "newer")
    make_checkpoint(place.with_name("version_00000008"), 8)
    assert pruned(place.parent, 8, keep_last=1) == [8], "and no hidden link stays"
    assert (tmp_path / "newer" / MANIFEST).is_file()


# -- which stay ----------------------------------------------------------------------------------------------------


def pruned(folder: Path, newest: int, **options: Any) -> list[int]:
    nobody: Any = None
    kept = Checkpoints(nobody, checkpoint_options(folder.parent, **options), nobody, nobody, nobody)
    kept._prune(folder / f"version_{newest:08d}")
    return sorted(int(path.name.removeprefix("version_")) for path in folder.iterdir())


@pytest.mark.parametrize(("keep_last", "left"), [(1, [45]), (2, [45, 60]), (3, [45, 50, 60])])
def test_the_one_just_written_stays_whatever_a_life_before_left_there(tmp_path: Path, keep_last: int, left: list[int]):
    """A run that went back to step 40 writes 45 beside 50 and 60 of the life that it left."""
    for version in (45, 50, 60):
        make_checkpoint(tmp_path / f"version_{version:08d}", version)
    assert pruned(tmp_path, 45, keep_last=keep_last) == left


def test_a_torn_one_is_no_reason_for_a_whole_one_to_go(tmp_path: Path):
    for version in (10, 20, 30, 40):
        make_checkpoint(tmp_path / f"version_{version:08d}", version)
    for version in (10, 30):
        halve(tmp_path / f"version_{version:08d}" / rank_file(0))
    assert pruned(tmp_path, 40, keep_last=2) == [20, 30, 40], "20 and 40 are whole; 10 helps nobody any more"


def test_nothing_goes_when_the_new_one_is_not_whole(tmp_path: Path):
    for version in (10, 20, 30):
        make_checkpoint(tmp_path / f"version_{version:08d}", version)
    remove(tmp_path / "version_00000030" / MANIFEST)
    assert pruned(tmp_path, 30, keep_last=1) == [10, 20, 30]


def test_what_is_to_stay_for_ever_stays_and_leftovers_of_crashes_go(tmp_path: Path):
    run = RunOnDisk(tmp_path, steps=5)
    holder = run.path / "checkpoints"
    add_run_part(run.place(2), run.ledger, 2, is_kept=True)
    for name in (".partial-version_00000009", ".gone-version_00000001", ".old-version_00000005"):
        (holder / name).mkdir()
    (holder / ".partial-version_00000004-ledger.sqlite").write_bytes(b"half")
    assert pruned(holder, 5, keep_last=2) == [2, 4, 5]


def test_one_that_lost_its_place_in_a_crash_counts_as_any_other(tmp_path: Path):
    """It is the only one of its version; where it is to stay it stays under the name that it has."""
    for version in (10, 20, 30):
        make_checkpoint(tmp_path / f"version_{version:08d}", version)
    for version in (10, 20):
        (tmp_path / f"version_{version:08d}").replace(tmp_path / f".old-version_{version:08d}")
    (tmp_path / "version_20-mine").mkdir()
    nobody: Any = None
    kept = Checkpoints(nobody, checkpoint_options(tmp_path, keep_last=2), nobody, nobody, nobody)
    kept._prune(tmp_path / "version_00000030")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".old-version_00000020", "version_00000030", "version_20-mine"]
