"""Writers of several lives of a run: an earlier one harms no later one."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from tests.survival.checkpoint_maker import RunOnDisk, add_run_part, make_checkpoint
from tests.survival.checkpoint_room import CheckpointRoom

from myxa.actors.checkpoints import folder
from myxa.actors.checkpoints.folder import (
    begin,
    find_checkpoint,
    look_at,
    partial_of,
    sweep,
)
from myxa.actors.ledger.file import lock_ledger
from myxa.core.errors import MyxaError, TrainError
from myxa.core.files import is_locked, locked_folder, sync_folder, take_lock
from myxa.launch.run_dir import RunDir

ZOMBIE, OWN, LATER = (1, 3), (2, 0), (2, 1)


def names(holder: Path) -> list[str]:
    return sorted(path.name for path in holder.iterdir())


def test_a_lock_is_held_by_one_or_shared_and_seen_by_all(tmp_path: Path):
    path = tmp_path / "lock"
    assert not is_locked(path), "there is no such file"
    first = take_lock(path)
    assert first is not None and is_locked(path) and take_lock(path) is None
    assert take_lock(path, "r", is_shared=True) is None
    first.close()
    assert not is_locked(path)
    one, other = (take_lock(path, "r", is_shared=True) for _ in range(2))
    assert one is not None and other is not None and take_lock(path, "r+") is None
    assert not is_locked(path), "nobody has it for itself"
    one.close()
    other.close()


def test_a_draft_goes_with_its_writers_life(tmp_path: Path):
    """A process of the life before may still write the same version: what it writes is obsolete."""
    place = tmp_path / "version_00000040"
    for writer in (ZOMBIE, OWN, LATER, None):
        begin(place, writer)
    sweep(tmp_path, OWN)
    assert names(tmp_path) == [partial_of(place, LATER).name], "a later one's is for later ones to clear"
    sweep(tmp_path, (3, 0))
    assert names(tmp_path) == []


async def test_a_leader_of_an_earlier_life_comes_too_late(tmp_path: Path):
    """Where it had its files in time, too."""
    for is_in_time in (False, True):
        run = tmp_path / str(is_in_time)
        zombie = CheckpointRoom(run, checkpoint_every=1, async_save=True, writer=ZOMBIE)
        own = CheckpointRoom(run, checkpoint_every=1, writer=OWN)
        if is_in_time:
            await own.checkpoints.save(40)
        await zombie.checkpoints.save(40)
        await zombie.files_are_written()
        if not is_in_time:
            await own.checkpoints.save(40)
        why = "is of life 2, attempt 0 of the run: life 1, attempt 3 comes too late" if is_in_time else "deleted"
        with pytest.raises((TrainError, AssertionError), match=why):
            await zombie.checkpoints.settle()
        assert look_at(run / "checkpoints" / "version_00000040").writer == OWN
        await own.checkpoints.save(41)
        assert names(run / "checkpoints") == ["version_00000040", "version_00000041"], "nothing is left of the late one"


def test_a_checkpoint_of_another_run_has_no_claim_to_its_place(tmp_path: Path):
    """A fork counts its lives from one; what it began with was written by a later one of its parent."""
    run = RunOnDisk(tmp_path, steps=1)
    later, own = ({"version": 1, "life": life, "attempt": 0} for life in (7, 1))
    make_checkpoint(run.place(1), 1, extra=later)
    add_run_part(run.place(1), run.ledger, 1, run="parent")
    make_checkpoint(run.place(1), 1, extra=own)
    assert look_at(run.place(1)).writer == (1, 0)
    make_checkpoint(run.place(1), 1, extra=later)
    for has_run_part in (False, True):
        if has_run_part:
            add_run_part(run.place(1), run.ledger, 1, run=run.path.name)
        with pytest.raises(TrainError, match="comes too late"):
            make_checkpoint(run.place(1), 1, extra=own)
    assert look_at(run.place(1)).writer == (7, 0)


def test_who_puts_one_in_its_place_waits_for_others_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder, "PLACE_S", 0.1)
    place = make_checkpoint(tmp_path / "checkpoints" / "version_00000001", 1)
    with (
        locked_folder(place.parent, 0.0) as is_mine,
        pytest.raises(TrainError, match="another process has been putting a checkpoint"),
    ):
        assert is_mine
        make_checkpoint(place, 1, fill=b"other")
    make_checkpoint(place, 1, fill=b"other")
    assert names(place.parent) == [place.name], "the lock left no file"


def test_a_file_system_that_cannot_sync_folders_is_written_to():
    """CIFS and some of FUSE; here proc."""
    sync_folder(Path("/proc"))
    with pytest.raises(OSError, match="Not a directory"):
        sync_folder(Path("/proc/version"))


def test_where_there_are_no_locks_a_checkpoint_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    place = make_checkpoint(tmp_path / "version_00000001", 1)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert is_locked(place / "manifest.json"), "nobody can tell"
    run_dir, ledger = RunDir(tmp_path), tmp_path / "ledger.sqlite"
    for hold in (run_dir.held().__enter__, lambda: lock_ledger(ledger)):
        with pytest.raises(MyxaError, match="No locks available") as caught:
            hold()
        assert "mount it with them" in caught.value.remedy
    assert find_checkpoint(make_checkpoint(place, 1)) == place
