"""On several machines one node says from where a run goes on: node 0 chooses the checkpoint and the ledger, the others
take what it posts; so do ranks, the buffer and restarted gangs where `trainer.resume` names a run that lives."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.survival.checkpoint_maker import RunOnDisk, halve, make_checkpoint

from myxa.actors.checkpoints.folder import MANIFEST
from myxa.actors.ledger.file import LEDGER, lock_ledger
from myxa.core.config import RunConfig, dump_config, load_config
from myxa.core.errors import ConfigError
from myxa.launch import launcher
from myxa.launch.cli import main
from myxa.launch.first_failure import RunEnd
from myxa.launch.frozen_code import post_run
from myxa.launch.launcher import LaunchOptions, with_start
from myxa.launch.node_place import find_place
from myxa.launch.run_dir import RunDir
from myxa.launch.run_lineage import resume_point
from myxa.launch.run_lineage.resume_point import earlier_ledger

ALONE = find_place(1, 0, None, {})
CONFIG = '[run]\nname = "small"\ndir = "{folder}"\n[model]\npath = "/m"\n[data]\ntrain = "/d.jsonl"\n'
Launches = list[tuple[RunConfig | None, LaunchOptions]]


@pytest.fixture
def run(tmp_path: Path) -> RunOnDisk:
    run = RunOnDisk(tmp_path, steps=4)
    (run.path / "config.toml").write_text(CONFIG.format(folder=tmp_path))
    return run


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    seen: Launches = []

    def launch(config: RunConfig | None, options: LaunchOptions) -> RunEnd:
        seen.append((config, options))
        return RunEnd(0, "over")

    monkeypatch.setattr(launcher, "launch", launch)
    return seen


def resume(run: RunOnDisk, rank: int) -> int:
    return main(["resume", str(run.path), "--nnodes", "2", "--node-rank", str(rank), "--rdzv", "127.0.0.1:29400"])


def test_other_nodes_leave_checkpoints_and_ledger_to_node_0(
    run: RunOnDisk, launches: Launches, monkeypatch: pytest.MonkeyPatch
):
    """Node 0 has started the run again already: its launcher holds the directory, its buffer the ledger."""
    assert resume(run, 0) == 0
    before = sorted(path.name for path in run.path.iterdir())
    looked: list[Path] = []
    monkeypatch.setattr(resume_point, "whole_ones", lambda folder, *_, **__: looked.append(folder) or iter(()))
    monkeypatch.setattr(resume_point, "read_facts", looked.append)
    with RunDir(run.path).held(), lock_ledger(run.ledger):
        assert resume(run, 1) == 0
    assert looked == []
    assert sorted({*before, ".launcher.lock", f"{LEDGER}.lock"}) == sorted(path.name for path in run.path.iterdir())
    (first, of_node_0), (second, of_node_1) = launches
    assert first is not None and first.trainer.resume == str(run.place(4))
    assert with_start(first, of_node_0) == first, "what the command chose is not chosen again"
    assert (second, of_node_1.run_dir, of_node_1.prepare) == (None, None, None)


def test_a_checkpoint_that_was_passed_over_does_not_replace_the_run_file(
    run: RunOnDisk, launches: Launches, capsys: pytest.CaptureFixture[str]
):
    halve(run.place(4) / "rank-00001.safetensors")
    before = (run.path / "config.toml").read_text()
    assert main(["resume", str(run.path)]) == 0
    assert "version_00000004" in capsys.readouterr().out
    ((_, options),) = launches
    assert options.prepare is not None
    options.prepare()
    assert (run.path / "config.toml").read_text() == before


def test_a_scheduler_says_who_is_who_once_several_are_meant(
    run: RunOnDisk, launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name, value in {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "gpu[1-2]"}.items():
        monkeypatch.setenv(name, value)
    assert main(["resume", str(run.path), "--rdzv-file", str(tmp_path / "rdzv")]) == 0
    assert main(["resume", str(run.path)]) == 0
    (_, among_two), (_, alone) = launches
    assert (among_two.place.rank, among_two.place.num_nodes) == (1, 2)
    assert alone.place == ALONE, "one machine of an allocation goes on with a run of its own"


def test_what_node_0_posts_is_what_every_node_runs(run: RunOnDisk, tmp_path: Path):
    told = load_config(run.path / "config.toml", [f'trainer.resume="{run.path}"'])
    posted = dump_config(with_start(told, LaunchOptions(place=ALONE)))
    place = tmp_path / "runs" / "next"
    post_run(RunDir(place), posted, {})
    assert load_config(place / "config.toml").trainer.resume == str(run.place(4))


def test_a_run_that_lives_is_gone_on_from_at_one_version(run: RunOnDisk, tmp_path: Path):
    """It writes version 5 while the new run starts: the buffer's ledger and the trainer's weights are those of 4."""
    told = load_config(run.path / "config.toml", [f'trainer.resume="{run.path}"'])
    config = with_start(told, LaunchOptions(place=ALONE))
    make_checkpoint(run.place(5), 5)
    assert with_start(told, LaunchOptions(place=ALONE)).trainer.resume == str(run.place(5))
    assert config.trainer.resume == str(run.place(4))
    with lock_ledger(run.ledger):
        assert earlier_ledger(config, tmp_path / "next") == run.place(4) / LEDGER, "the copy: the run lives"
    assert earlier_ledger(config, tmp_path / "next") == run.ledger


def test_a_name_that_means_nothing_is_told_before_anything_starts(run: RunOnDisk, tmp_path: Path):
    told = load_config(run.path / "config.toml", [f'trainer.resume="{tmp_path}/nowhere"'])
    with pytest.raises(ConfigError, match=r"trainer.resume: no complete checkpoint in"):
        with_start(told, LaunchOptions(place=ALONE))
    gone = load_config(run.path / "config.toml", [f'trainer.resume="{run.place(4).with_name("version_00000099")}"'])
    with pytest.raises(ConfigError, match="there is no checkpoint .*its run deletes old ones .trainer.keep_last"):
        with_start(gone, LaunchOptions(place=ALONE))
    inside = load_config(run.path / "config.toml", [f'trainer.resume="{run.place(4) / MANIFEST}"'])
    with pytest.raises(ConfigError, match=f"{MANIFEST} is a file, not a checkpoint -- name the folder .*_00000004$"):
        with_start(inside, LaunchOptions(place=ALONE))
    (tmp_path / "config.json").write_text("{}")
    model = load_config(run.path / "config.toml", [f'trainer.resume="{tmp_path}"'])
    with pytest.raises(ConfigError, match=f"{tmp_path} is a model folder, not a checkpoint -- begin with it by model"):
        with_start(model, LaunchOptions(place=ALONE))
    mine = LaunchOptions(place=ALONE, program="mine:build")
    assert with_start(told, mine) == told, "another composition root may mean something else by it"


@pytest.mark.parametrize(
    "flags", [["--nnodes", "2"], ["--node-rank", "1"], ["--rdzv", "127.0.0.1:29400"], ["--rdzv-file", "rdzv"]]
)
def test_a_fork_is_started_on_one_machine_however_several_are_meant(
    run: RunOnDisk, launches: Launches, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
):
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["fork", str(run.path), *flags]) == 2
    assert "fork makes a directory, on one machine" in capsys.readouterr().err
    assert launches == []
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert main(["fork", str(run.path), "--no-start", *flags]) == 0
