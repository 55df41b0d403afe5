"""The folder of the sockets: who removes it and when, where it lies, and what is not taken for it. That a live run gets it
back is in test_trainer_gang.py."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from tests.harness.waiting import until

from myxa.actors.user_code.sandbox import scratch_folder
from myxa.core.errors import LaunchError
from myxa.core.files import SCRATCH
from myxa.launch import runtime_dir
from myxa.launch.runtime_dir import RuntimeDir
from myxa.transport.address import make_private


async def test_e01_a_folder_that_is_gone_is_made_again_and_is_still_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "x"
    base.mkdir()
    monkeypatch.setattr(runtime_dir, "short_base", lambda: str(base))
    with RuntimeDir() as runtime:
        note = runtime.path / "rdzv.json"
        note.write_text("here")
        async with runtime.kept([note]):
            shutil.rmtree(base)
            await until(note.exists)
        assert note.read_text() == "here"
        assert runtime.path.stat().st_mode & 0o777 == 0o700
        with RuntimeDir() as other:  # a launcher that starts removes what nobody holds
            assert runtime.path.is_dir()
            assert other.path != runtime.path
    assert not runtime.path.exists()


def test_a_launcher_that_starts_removes_what_nobody_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_dir, "short_base", lambda: str(tmp_path))
    deserted = tmp_path / f"{runtime_dir.PREFIX}1"
    deserted.mkdir()
    with RuntimeDir():
        assert not deserted.exists()


async def test_a_launcher_that_ends_removes_what_killed_actors_had_for_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(runtime_dir, "short_base", lambda: str(tmp_path))
    (tmp_path / f"{SCRATCH}job-1" / "files").mkdir(parents=True)
    async with scratch_folder() as living:
        with RuntimeDir():
            pass
        assert [*tmp_path.iterdir()] == [living]
    assert not [*tmp_path.iterdir()]


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(LaunchError, match="not a directory that only we can enter"):
        make_private(folder)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="exists"):
        make_private(link)
