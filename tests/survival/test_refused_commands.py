"""A run that is killed as a whole (SIGKILL), and resumed, trains each prompt once, as if it had never been killed. In
between, a refused command changes nothing on the disk: every byte of the run's folder is compared."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.survival.checkpoint_maker import flip
from tests.survival.lives import BATCH, Lives, check_each_once, make_lives

from myxa.actors.coordinator.audit import verify_audit
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.files import take_lock
from myxa.launch.cli import main
from myxa.launch.run_lineage.origin import RunOrigin
from myxa.launch.runtime_dir import RuntimeDir

pytestmark = pytest.mark.timeout(400)


def tree(folder: Path) -> dict[str, str]:
    """Every name below a folder, with its bytes' digest or where it leads."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        else:
            found[str(path)] = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    folder = tmp_path_factory.mktemp("refused")
    lives = make_lives(folder, f"rollout.max_groups={BATCH}", "trainer.keep_last=3", patience_s=0.4)
    try:
        lives.begin()
        lives.until_version(7)
        lives.kill()
        rows = (folder / "data" / "prompts.jsonl").read_text().splitlines()
        (folder / "other.jsonl").write_text("\n".join(rows[10:90]) + "\n")
        make_tiny_model(folder / "larger", preset="2m", seed=1)
        (folder / "broken.py").write_text("def advantages(\n")
        (folder / "late.py").write_text("import no_module_of_this_name\ndef loss(tokens): ...\n")
        yield lives
    finally:
        lives.end()
        with RuntimeDir():  # the next launcher removes what the killed one left
            pass


def refused(words: list[str], lives: Lives, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(lives.job.folder)
    before = tree(lives.job.folder / "runs")
    assert main(words) in (2, 3, 4, 5), words
    said = capsys.readouterr().err
    assert tree(lives.job.folder / "runs") == before, said
    return said


def set_to(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


REFUSALS: dict[str, tuple[list[str], str]] = {
    "a key that is none": (set_to("algo.nonsense=1"), "is not a known key"),
    "other rows": (set_to("data.train=other.jsonl"), "are not those that the run"),
    "another order": (set_to("run.seed=5"), "are not those that the run"),
    "another model": (set_to("model.path=larger"), "is of another model: hidden_size"),
    "another kind of trainer": (set_to('roles.trainer.kind="megatron"'), "was written by the torch trainer"),
    "a critic that was not there": (set_to("critic.enabled=true", 'algo.kind="ppo"'), "critic"),
    "a function that does not import": (set_to("algo.advantage_fn=broken.py:advantages"), "SyntaxError"),
    "an interpreter that is none": (set_to('roles.trainer.python="/nowhere/python"'), "cannot be run"),
    "another name": (set_to("run.name=other"), "keeps its name"),
    "a version that is not there": (["--from", "999"], "has no checkpoint of version 999"),
    "a program that is not there": (["--program", "no_such_program:build"], "there is no module"),
}


FORKED_TOO = ("other rows", "a version that is not there")
"""`fork` has the same checks."""


@pytest.mark.parametrize(
    ("verb", "what"), [*(("resume", what) for what in REFUSALS), *(("fork", w) for w in FORKED_TOO)]
)
def test_e02_a_refused_start_leaves_every_byte(
    killed: Lives, verb: str, what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, cause = REFUSALS[what]
    assert cause in refused([verb, str(killed.run_dir), *words], killed, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["nowhere"], "there is no run directory"),
        (["data"], "is no run directory"),
        (["{run}/checkpoints/version_00000002"], "run directory.* -- name its run, {run}$"),
        ([], "does not answer|one that is over is named"),  # its sockets are there, or removed already
        (["{run}", "--run", "data"], "which run"),
    ],
)
def test_a_run_that_is_not_named_is_not_guessed(
    killed: Lives, words: list[str], cause: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    *words, cause = [word.replace("{run}", str(killed.run_dir)) for word in (*words, cause)]
    assert re.search(cause, refused(["resume", *words], killed, capsys, monkeypatch))


def test_e02_a_run_that_a_launcher_has_is_refused(
    killed: Lives, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = take_lock(killed.run_dir / ".launcher.lock", "r+")
    assert lock is not None
    with lock:
        refused(["resume", str(killed.run_dir)], killed, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("hurt", "cause"),
    [
        (lambda run: shutil.rmtree(run / "checkpoints"), "has no checkpoint"),
        (lambda run: [os.truncate(path, 9) for path in run.glob("checkpoints/*/manifest.json")], "is torn"),
        (lambda run: (run / "origin.json").write_text("{"), "origin.json"),
        (lambda run: (run / "config.toml").write_text("[["), "config.toml"),
    ],
    ids=["no checkpoint", "torn checkpoints", "no origin", "no configuration"],
)
def test_e02_a_run_with_nothing_to_go_on_from_is_left(
    killed: Lives, hurt: Callable[[Path], object], cause: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    copy = killed.run_dir.with_name("hurt-copy")
    shutil.copytree(killed.run_dir, copy, symlinks=True)
    try:
        for path in copy.glob("checkpoints/*/start.json"):  # else they bring what is hurt
            path.unlink()
        hurt(copy)
        assert cause in refused(["resume", str(copy)], killed, capsys, monkeypatch)
        refused(["fork", str(copy)], killed, capsys, monkeypatch)
    finally:
        shutil.rmtree(copy)


def test_a_run_killed_as_a_whole_and_resumed_trains_each_prompt_once(killed: Lives) -> None:
    """E02: no code of a user runs before an actor's process does; a start that fails then leaves the configuration. The newest
    checkpoints are damaged (their sizes as they were) and the start files torn. The last test of this module: it uses the
    run up."""
    config = killed.run_dir / "config.toml"
    before = config.read_text()
    killed.resume("--set", "algo.loss_fn=late.py:loss", "--set", "optimizer.lr=2e-3")
    assert killed.wait() != 0
    assert "no_module_of_this_name" in killed.said[-1]
    assert "is again what it was" in killed.said[-1]
    assert config.read_text() == before
    whole, *damaged = sorted(path.parent for path in killed.run_dir.glob("checkpoints/version_*/manifest.json"))[-3:]
    for checkpoint in damaged:
        flip(checkpoint / "rank-00000.safetensors")
    config.write_text(before[: len(before) // 2])
    (killed.run_dir / "origin.json").unlink()
    killed.resume()
    assert killed.wait() == 0, killed.said
    for what in ("config.toml is cut off", "origin.json cannot be read"):
        assert what in killed.said[-1]
    assert killed.said[-1].count(": its copy in version_") == 2
    settings = [[line for line in text.splitlines() if "resume" not in line] for text in (before, config.read_text())]
    assert settings[0] == settings[1]
    life = RunOrigin.load(killed.run_dir).lives[-1]
    assert (life.began_at, life.ledger) == (int(whole.name.removeprefix("version_")), "its own ledger")
    told = "\n".join(killed.told("checkpoint-passed-over"))
    assert all(checkpoint.name in told for checkpoint in damaged)
    check_each_once(killed.run_dir)
    assert verify_audit(killed.run_dir / "audit.jsonl").complaint == ""
