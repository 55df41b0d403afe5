"""config.toml and origin.json are once in the run directory and once in each checkpoint: a run with a whole
checkpoint goes on whatever became of the two, and says what it took instead."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from tests.survival.checkpoint_maker import RunOnDisk, garble, halve, remove

from myxa.core.errors import LaunchError
from myxa.launch.run_dir import RunDir, is_run_folder
from myxa.launch.run_lineage.next_run import begin_next_life
from myxa.launch.run_lineage.origin import START_FILE, Life, RunOrigin, config_of, start_keeper
from myxa.launch.run_lineage.resume_point import choose_point

TEXT = '# Resolved\n[run]\nname = "small"\n\n[model]\npath = "model"\n\n[optimizer]\nlr = 0.001\n'


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_within_a_number(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").write_text("x")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HURTS: tuple[Callable[[Path], None], ...] = (empty, halve, garble, zeros, remove, folder, pipe)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunOnDisk:
    made = RunOnDisk(tmp_path_factory.mktemp("torn"), steps=3)
    (made.path / "config.toml").write_text(TEXT)
    RunOrigin(program="mine:build", lives=(Life(), Life(version=1))).save(made.path)
    for version in (1, 2, 3):
        start_keeper(made.path)(made.place(version))
    return made


@pytest.fixture
def run(whole: RunOnDisk, tmp_path: Path) -> RunOnDisk:
    return whole.copied(tmp_path)


def test_e11_torn_files_are_replaced_by_their_copies_and_kept_aside(whole: RunOnDisk, tmp_path: Path):
    before = RunOrigin.load(whole.path)
    for hurt in (*HURTS, cut_within_a_number):
        run = whole.copied(tmp_path / hurt.__name__)
        config = run.path / "config.toml"
        hurt(config)
        if hurt is not cut_within_a_number:
            hurt(run.path / "origin.json")
        text, why = config_of(run.path)
        assert text == TEXT, hurt
        assert str(config) in why and "its copy in version_00000003 is taken" in why
        origin, lost = RunOrigin.found(run.path)
        assert origin == before and ("its copy in version_00000003 is taken" in lost) is (hurt in HURTS)
        assert is_run_folder(run.path)
        begun = begin_next_life(RunDir(run.path), choose_point(run.path, None), text)
        assert config.read_text() == TEXT and config_of(run.path) == (None, "")
        assert (begun.program, len(begun.lives)) == ("mine:build", 3)
        assert RunOrigin.found(run.path) == (begun, "")
        kept = {path.name for path in (run.path / "lives" / "2" / "damaged").glob("*")}
        assert kept == (set() if hurt is remove else {"config.toml", "origin.json"} if hurt in HURTS else {config.name})


def test_a_torn_copy_is_passed_over_for_an_older_one(whole: RunOnDisk, tmp_path: Path):
    for hurt in (empty, halve, garble, remove, folder):
        run = whole.copied(tmp_path / hurt.__name__)
        hurt(run.place(3) / START_FILE)
        empty(run.path / "config.toml")
        assert "its copy in version_00000002 is taken" in config_of(run.path)[1], hurt


def test_without_any_copy_the_files_say_what_is_wrong_themselves(run: RunOnDisk):
    """A guess could start another composition root."""
    for version in (1, 2, 3):
        remove(run.place(version) / START_FILE)
    empty(run.path / "config.toml")
    assert config_of(run.path) == (None, "")
    for damage in (b"", b"{", b'{"program": 3}', b"\xff\xfe"):
        (run.path / "origin.json").write_bytes(damage)
        for ask in (lambda: RunOrigin.load(run.path), lambda: choose_point(run.path, None)):
            with pytest.raises(LaunchError, match="origin.json.*cannot be read") as caught:
                ask()
            assert caught.value.remedy
    remove(run.path / "origin.json")
    assert len(RunOrigin.load(run.path).lives) == 1, "started once, by an older version"


def test_what_a_person_wrote_is_not_passed_over(run: RunOnDisk):
    config = run.path / "config.toml"
    for text in (TEXT.replace("0.001", "0.002"), TEXT.replace("lr =", "lr "), '[model]\npath = "other"\n', TEXT + "\n"):
        config.write_text(text)
        assert config_of(run.path) == (None, ""), text


def test_the_copy_of_the_latest_life_is_taken(run: RunOnDisk):
    """A life that went back to version 2, and made no checkpoint of its own yet."""
    begun = begin_next_life(RunDir(run.path), choose_point(run.path, 2))
    remove(run.path / "origin.json")
    assert RunOrigin.load(run.path) == begun


def test_a_fork_keeps_its_own_and_leaves_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from myxa.launch.run_lineage.next_run import fork_run

    monkeypatch.chdir(tmp_path)
    made = RunOnDisk(tmp_path, steps=3)
    whole = f'[run]\nname = "small"\ndir = "{tmp_path}"\n[model]\npath = "model"\n[data]\ntrain = "rows.jsonl"\n'
    (made.path / "config.toml").write_text(whole)
    start_keeper(made.path)(made.place(3))
    before = (made.place(3) / START_FILE).read_bytes()
    empty(made.path / "config.toml")
    child = fork_run(made.path, 3, "child", [], datetime(2030, 1, 1))
    origin = RunOrigin.load(child)
    assert (made.place(3) / START_FILE).read_bytes() == before
    remove(child / "config.toml")
    remove(child / "origin.json")
    assert 'name = "child"' in str(config_of(child)[0])
    assert RunOrigin.load(child) == origin and origin.parent == str(made.path)
