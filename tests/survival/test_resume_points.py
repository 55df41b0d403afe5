"""From where a dead run goes on: its newest whole checkpoint with its own ledger, or with the copy in the checkpoint
when the own one is gone, damaged, behind, or has given away what it would need."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.survival.checkpoint_maker import DATASET, RunOnDisk, flip, garble, halve, make_checkpoint, remove, states

from myxa.actors.checkpoints import folder
from myxa.actors.checkpoints.folder import RUN_FILE, look_at, newest_whole, take_away
from myxa.actors.ledger.file import LEDGER, lock_ledger
from myxa.actors.ledger.ledger import Ledger
from myxa.core.errors import LaunchError, LedgerError
from myxa.launch.cli import main
from myxa.launch.run_dir import RunDir
from myxa.launch.run_lineage import next_run
from myxa.launch.run_lineage.next_run import begin_next_life, fork_run, no_longer_alive
from myxa.launch.run_lineage.origin import RunOrigin, origin_events
from myxa.launch.run_lineage.resume_point import choose_point

NOW = datetime(2030, 1, 1)
COPY = "the checkpoint's copy of the ledger"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunOnDisk:
    return RunOnDisk(tmp_path_factory.mktemp("whole"), steps=4)


@pytest.fixture
def run(whole: RunOnDisk, tmp_path: Path) -> RunOnDisk:
    return whole.copied(tmp_path)


HURTS: tuple[Callable[[Path], None], ...] = (flip, halve, remove, garble)


def test_no_byte_of_a_checkpoint_is_read_before_the_nodes_meet(run: RunOnDisk, monkeypatch: pytest.MonkeyPatch):
    """That took minutes where a model is large; the ranks read them, each file once. A fork has no older one."""
    read: list[Path] = []
    real = folder.describe_file
    monkeypatch.setattr(folder, "describe_file", lambda path: read.append(path) or real(path))
    assert choose_point(run.path, None).version == 4
    with pytest.raises(LaunchError, match="has no checkpoint of version 99; there are: 4, 3, 2, 1"):
        choose_point(run.path, 99)
    assert read == []
    flip(run.place(4) / "rank-00001.safetensors")
    assert choose_point(run.path, None).version == 4, "of the right size"
    assert choose_point(run.path, None, reads_all=True).version == 3
    assert read


@pytest.mark.parametrize("hurt", HURTS)
def test_a_ledger_that_is_hurt_is_replaced_by_the_copy(run: RunOnDisk, hurt: Callable[[Path], None]):
    hurt(run.ledger)
    point = choose_point(run.path, None)
    assert (point.version, point.ledger, point.is_own_ledger) == (4, run.place(4) / LEDGER, False)
    assert point.ledger_words.startswith(COPY)
    go_on(run, 4)


@pytest.mark.parametrize("hurt", [flip, remove])
@pytest.mark.parametrize("name", [LEDGER, RUN_FILE])
def test_a_copy_that_is_hurt_is_not_needed_and_with_both_hurt_the_next_older_one_is_taken(
    run: RunOnDisk, name: str, hurt: Callable[[Path], None]
):
    hurt(run.place(4) / name)
    assert choose_point(run.path, None).version == 4
    halve(run.ledger)
    point = choose_point(run.path, None)
    assert (point.version, point.is_own_ledger) == (3, False)
    (text,) = point.passed_over
    assert text.startswith("version_00000004: ")
    assert "of the run's own ledger" in text
    go_on(run, 3)


@pytest.mark.parametrize(("name", "hurt"), [("rank-00001.safetensors", halve), ("manifest.json", remove)])
def test_a_torn_checkpoint_is_passed_over_and_moved_out_of_the_way(
    run: RunOnDisk, name: str, hurt: Callable[[Path], None]
):
    hurt(run.place(4) / name)
    point = choose_point(run.path, None)
    assert (point.version, point.is_own_ledger) == (3, True)
    assert "is torn" in point.passed_over[0]
    go_on(run, 3)
    assert (run.path / "lives" / "1" / "undone" / "version_00000004").is_dir()
    told = dict(origin_events(run.path))
    assert "is torn" in told["checkpoint-passed-over"]
    assert told["resumed"] == "life 2 continues from version 3 with its own ledger"


def test_checkpoints_on_another_disk_are_gone_back_to(run: RunOnDisk):
    """`checkpoints` is a link, or a mount: what is undone cannot be renamed into the run's own disk."""
    with TemporaryDirectory(dir="/dev/shm") as other:
        if Path(other).stat().st_dev == run.path.stat().st_dev:
            pytest.skip("there is one disk")
        shutil.move(run.path / "checkpoints", other)
        (run.path / "checkpoints").symlink_to(f"{other}/checkpoints")
        for life, newest in ((1, 3), (2, 2)):
            begin_next_life(RunDir(run.path), choose_point(run.path, newest))
            assert choose_point(run.path, None).version == newest
            assert (run.path / f"checkpoints/.{life}-undone-version_0000000{newest + 1}/manifest.json").is_file()


def test_a_version_whose_payloads_are_given_away_needs_the_copy(run: RunOnDisk):
    """The own ledger goes back one checkpoint, no more."""
    point = choose_point(run.path, 1)
    assert not point.is_own_ledger
    assert "given away" in point.ledger_words
    go_on(run, 1, asked=1)
    assert sorted(path.name for path in (run.path / "lives" / "1" / "undone").iterdir()) == [
        run.place(version).name for version in (2, 3, 4)
    ]
    assert (run.path / "lives" / "1" / LEDGER).is_file(), "nothing is deleted"


def test_a_ledger_whose_end_was_lost_is_behind_the_checkpoint(run: RunOnDisk):
    """A power cut may take its newest transactions back; the checkpoint was told only once its copy was on the disk."""
    shutil.copy2(run.place(3) / LEDGER, run.ledger)
    point = choose_point(run.path, None)
    assert (point.version, point.is_own_ledger) == (4, False)
    assert "its newest part was lost" in point.ledger_words
    go_on(run, 4)


def test_a_version_that_is_named_is_read_before_anything_is_moved(run: RunOnDisk, capsys: pytest.CaptureFixture[str]):
    """Of the right size, but with other bytes: what is newer and whole would be put away for it."""
    flip(run.place(3) / "rank-00001.safetensors")
    before = bytes_of(run.path)
    assert main(["resume", str(run.path), "--from", "3"]) == 3
    said = capsys.readouterr().err
    assert "cannot resume from version 3" in said
    assert "the bytes of rank-00001.safetensors have changed" in said
    assert bytes_of(run.path) == before


def test_a_run_without_any_is_told_what_to_do(tmp_path: Path):
    run = RunOnDisk(tmp_path, steps=0)
    with pytest.raises(LaunchError, match="it wrote none") as caught:
        choose_point(run.path, None)
    assert "myxa up" in caught.value.remedy
    make_checkpoint(run.place(1), 1, extra={})
    halve(run.place(1) / "rank-00000.safetensors")
    with pytest.raises(LaunchError, match="no checkpoint in .* can be used:\n  version_00000001: "):
        choose_point(run.path, None)


# -- the next life -------------------------------------------------------------------------------------------------


def go_on(run: RunOnDisk, version: int, asked: int | None = None) -> None:
    """As `myxa resume` does, up to where the trainer rewinds the buffer; the ledger must hold then."""
    run_dir = RunDir(run.path)
    with no_longer_alive(run_dir):
        begin_next_life(run_dir, choose_point(run.path, asked))
    looks_as_it_should(run, version)


def looks_as_it_should(run: RunOnDisk, version: int) -> None:
    newest, passed = newest_whole(run.path / "checkpoints")
    assert newest is not None
    assert (newest.version, passed) == (version, ()), "a gang that restarts finds no other"
    ledger = run.open()
    try:
        ledger.rewind(version)
        assert (ledger.newest_version, ledger.next_step) == (version, version)
        drawn = [ledger.find(number) for number in range(ledger.draws.next_id)]
        assert all(row is not None for row in drawn)
        trained = [row for row in drawn if row is not None and str(row.state) in ("TRAINED", "DURABLE")]
        assert sorted(row.step for row in trained) == [step for step in range(version) for _ in range(2)]
        if ledger.draws.next_id > run.half_done:
            assert ledger.payload(run.half_done) == b"some tokens", "what was half done goes on"
    finally:
        ledger.close()


class Crash(BaseException):
    """SIGKILL at this moment."""


@pytest.mark.parametrize("version", [1, 4])
def test_an_attempt_that_is_killed_at_any_moment_is_repeated(
    whole: RunOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
):
    for moment in range(60):
        run = whole.copied(tmp_path / str(moment))
        for name in ("coordinator.journal", "logs"):
            (run.path / name).mkdir()
        calls = 0

        def counted(real: Callable[..., Any], moment: int = moment) -> Callable[..., Any]:
            def change(*args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > moment:
                    raise Crash
                return real(*args, **options)

            return change

        has_crashed = False
        with monkeypatch.context() as patch:
            for name in ("replace", "rename", "unlink", "mkdir"):
                patch.setattr(Path, name, counted(getattr(Path, name)))
            patch.setattr(next_run.shutil, "copy2", counted(shutil.copy2))
            try:
                begin_next_life(RunDir(run.path), choose_point(run.path, version))
            except Crash:
                has_crashed = True
        if has_crashed:
            begin_next_life(RunDir(run.path), choose_point(run.path, version))
        looks_as_it_should(run, version)
        assert not (run.path / "coordinator.journal").exists()
        if not has_crashed:
            assert moment > 3
            return
    pytest.fail("it never came to its end")


def test_a_run_that_lives_is_left_alone(run: RunOnDisk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(next_run, "BUFFER_ENDS_S", 0.3)
    run_dir = RunDir(run.path)
    with run_dir.held():
        assert run_dir.is_held
        with pytest.raises(LaunchError, match="still running"), no_longer_alive(RunDir(run.path)):
            pass
    assert not run_dir.is_held
    with (
        lock_ledger(run.ledger),
        pytest.raises(LaunchError, match="buffer is still running: .* is in use"),
        no_longer_alive(run_dir),
    ):
        pass


def test_settings_of_the_last_life_are_forgotten(run: RunOnDisk):
    ledger = run.open()
    ledger.remember("deaths", "{}")
    ledger.close()
    go_on(run, 4)
    ledger = run.open()
    assert ledger.recall("deaths") == ""
    ledger.close()


def test_lives_are_counted_and_the_config_of_each_is_kept(run: RunOnDisk):
    (run.path / "config.toml").write_text("first")
    go_on(run, 4)
    (run.path / "config.toml").write_text("second")
    go_on(run, 4)
    assert [(run.path / "lives" / n / "config.toml").read_text() for n in ("1", "2")] == ["first", "second"]
    assert RunOrigin.load(run.path).in_words() == "life 3, from version 4"


# -- forks ---------------------------------------------------------------------------------------------------------

CONFIG = """
[run]
name = "small"
dir = "{folder}"
num_steps = 7
[model]
path = "model"
[data]
train = "rows.jsonl"
"""


def bytes_of(folder: Path) -> dict[str, str]:
    """Every file's digest; what a lock leaves is none of a run's."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


@pytest.fixture
def parent(run: RunOnDisk, tmp_path: Path) -> RunOnDisk:
    (run.path / "config.toml").write_text(CONFIG.format(folder=tmp_path / "runs"))
    return run


def test_a_fork_of_a_run_that_lives_changes_nothing_there(parent: RunOnDisk):
    with lock_ledger(parent.ledger), RunDir(parent.path).held():
        before = bytes_of(parent.path)
        made = fork_run(parent.path, 2, "other", ["run.num_steps=9"], NOW)
        assert bytes_of(parent.path) == before
    text = (made / "config.toml").read_text()
    assert 'name = "other"' in text
    assert "num_steps = 9" in text
    assert made.name.startswith("other-")
    child = RunOrigin.load(made)
    assert (child.parent, child.parent_version) == (str(parent.path.resolve()), 2)
    point = choose_point(made, None)
    assert (point.version, point.is_own_ledger) == (2, False)
    begin_next_life(RunDir(made), point)
    assert [kind for kind, _ in origin_events(made)] == ["forked"]
    assert not (made / "lives").exists()
    ledger = Ledger(made / LEDGER, run=made.name, fingerprint=DATASET, wall=lambda: 0.0)
    ledger.rewind(2)
    assert ledger.newest_version == 2
    ledger.close()
    assert bytes_of(parent.path) == before


def test_a_fork_shares_the_bytes_of_its_parent_and_outlives_them(parent: RunOnDisk):
    made = fork_run(parent.path, 4, "", [], NOW) / "checkpoints" / parent.place(4).name
    assert all(file.samefile(parent.place(4) / file.name) for file in made.iterdir())
    take_away(parent.place(4))
    assert look_at(made).is_complete


def test_a_fork_of_a_checkpoint_without_a_copy_needs_a_run_that_is_over(parent: RunOnDisk):
    make_checkpoint(parent.place(4), 4, extra={"version": 4, "life": 3, "attempt": 2})
    for version in range(1, 4):
        (parent.place(version) / RUN_FILE).unlink()
        (parent.place(version) / LEDGER).unlink()
    with lock_ledger(parent.ledger), pytest.raises(LaunchError, match="has no run.json"):
        fork_run(parent.path, None, "", [], NOW)
    made = fork_run(parent.path, None, "", [], NOW)
    assert choose_point(made, None).is_own_ledger
    assert states(made / LEDGER) == states(parent.ledger)
    again = make_checkpoint(
        made / "checkpoints" / parent.place(4).name, 4, extra={"version": 4, "life": 1, "attempt": 0}
    )
    assert look_at(again).writer == (1, 0), "its first life may write that version again"
    assert look_at(parent.place(4)).writer == (3, 2)


def test_a_fork_of_what_is_no_run_is_told(tmp_path: Path):
    with pytest.raises(LaunchError, match="is no run directory"):
        fork_run(tmp_path, None, "", [], NOW)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_fork_that_fails_leaves_nothing_and_the_latest_run_is_who_it_was(
    parent: RunOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
):
    runs = tmp_path / "runs"
    before = fork_run(parent.path, 2, "", [], NOW).name if earlier else ""
    for version in range(1, 5):
        (parent.place(version) / RUN_FILE).unlink()
        (parent.place(version) / LEDGER).unlink()

    def fails(*_: Any) -> None:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(next_run, "continue_ledger", fails)
    with pytest.raises(LaunchError, match="could not be taken over: the disk is full"):
        fork_run(parent.path, None, "", [], NOW)
    assert [path.name for path in runs.iterdir() if not path.is_symlink()] == ([before] if earlier else [])
    assert (runs / "latest").is_symlink() == earlier
    assert not earlier or (runs / "latest").resolve().name == before
