"""`myxa resume`, `myxa fork` and what a run that is told to stop leaves, with real runs: what is said where it cannot
be, and that a run goes on with its version, its knobs and its files."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from tests.control.live import Live, live_run
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import BATCH, events, metrics, newest_step_in
from tests.harness.waiting import wait_until

from myxa.actors.checkpoints.folder import ledger_in, look_at, read_run_part
from myxa.actors.ledger.file import read_facts
from myxa.core.config import load_config
from myxa.launch.run_lineage.origin import RunOrigin

pytestmark = pytest.mark.timeout(400)

HOOKS = """
import told

def advantages(groups):
    return [told.factor() * (group.rewards - group.rewards.mean()) for group in groups]

def loss(tokens):
    loss = -(tokens.live_T - tokens.old_T).exp() * tokens.advantages_T
    return loss, {"factor": 0 * tokens.live_T + told.factor()}
"""
TOLD = "def factor():\n    return {}\n"
OWN = ("algo.advantage_fn=mine.py:advantages", "algo.loss_fn=mine.py:loss")


def ended(launcher: subprocess.Popen[str]) -> int:
    return launcher.wait(90)


def rates(run_dir: Path) -> dict[int, float]:
    return {p["step"]: p["values"]["train/lr"] for p in metrics(run_dir) if "train/lr" in p["values"]}


def check_steps(run_dir: Path, count: int) -> None:
    found = audit_ledger(run_dir / "ledger.sqlite")
    assert found.problems == () and set(found.trained.values()) == {1} and found.trained.total() == count * BATCH


def test_a_run_from_its_first_to_its_last_life(tmp_path: Path):
    (tmp_path / "mine.py").write_text(HOOKS)
    (tmp_path / "told.py").write_text(TOLD.format(0.25))
    with live_run(tmp_path, *OWN, steps=2) as live:
        run_dir = live.run_dir
        (tmp_path / "mine.py").write_text("the file is being edited\n")
        nothing_to_go_on_from_yet(live)
        live.ask("set", "lr=2.5e-4", "-m", "kept")
        folder = Path(live.ask("ckpt")["folder"])
        one_that_lives_is_not_started_again(live, run_dir)
        fork_goes_on_beside_its_parent(live, run_dir, int(folder.name.removeprefix("version_")))
        live.launcher.send_signal(signal.SIGTERM)
        assert ended(live.launcher) == 0
        version = what_it_left(run_dir)
        it_goes_on(live, run_dir, version)
        it_goes_on_with_its_own_functions(live, run_dir)


def nothing_to_go_on_from_yet(live: Live) -> None:
    done = live.myxa("fork", str(live.run_dir))
    assert done.returncode == 3
    assert "has no checkpoint" in done.stderr


def one_that_lives_is_not_started_again(live: Live, run_dir: Path) -> None:
    done = live.myxa("resume", str(run_dir), "--from", "1", "--set", "run.num_steps=3")
    assert done.returncode == 2
    assert "--from and --set are for one that has ended" in done.stderr
    assert "myxa fork" in done.stderr
    live.ask("pause")
    for words in (["resume"], ["resume", str(run_dir)]):
        done = live.myxa(*words)
        assert (done.returncode, done.stdout) == (0, "the run continues\n"), done.stderr


def fork_goes_on_beside_its_parent(live: Live, run_dir: Path, version: int) -> None:
    last = version + 2
    done = live.myxa(
        "fork", str(run_dir), "--name", "child", "--quiet", "--set", f"run.num_steps={last}",
        "--set", "trainer.checkpoint_every=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (child,) = (run_dir.parent).glob("child-*")
    origin = RunOrigin.load(child)
    assert (origin.parent, origin.parent_version) == (str(run_dir.resolve()), version)
    assert [event["text"] for event in events(child, "forked")], "it is told"
    check_steps(child, last)
    assert rates(child)[last] == pytest.approx(2.5e-4), "knobs come along"
    assert live.launcher.poll() is None
    before = newest_step_in(run_dir)
    wait_until(lambda: newest_step_in(run_dir) > before, "the parent goes on")


def what_it_left(run_dir: Path) -> int:
    """A whole checkpoint of the version at which it was stopped, although none was asked for by schedule."""
    folder = max((run_dir / "checkpoints").iterdir())
    info = look_at(folder)
    assert info.is_complete, info.problem
    part = read_run_part(folder)
    assert (part.run, part.version) == (run_dir.name, info.version)
    assert {knob["name"]: knob["value"] for knob in info.extra["knobs"]["knobs"]}["lr"] == pytest.approx(2.5e-4)
    assert ledger_in(folder).is_file()
    facts = read_facts(run_dir / "ledger.sqlite")
    assert facts.claimed in (info.version, info.version + 1)
    assert max(rates(run_dir)) == info.version, "of the version that it stood at"
    return info.version


def it_goes_on(live: Live, run_dir: Path, version: int) -> None:
    before = (run_dir / "metrics.jsonl").read_bytes()
    done = live.myxa("resume", str(run_dir), "--quiet", "--set", f"run.num_steps={version + 2}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"from version {version} of {run_dir.resolve()}, with its own ledger" in done.stdout
    assert (run_dir / "metrics.jsonl").read_bytes().startswith(before), "files go on"
    assert rates(run_dir)[version + 2] == pytest.approx(2.5e-4)
    assert any("lr = 0.00025" in event["text"] for event in events(run_dir, "knobs-restored"))
    check_steps(run_dir, version + 2)
    assert (run_dir / "lives" / "1" / "logs" / "latest").is_dir()
    assert (run_dir / "logs" / "trainer.0.0.log").is_file()


def it_goes_on_with_its_own_functions(live: Live, run_dir: Path) -> None:
    factors = {p["values"]["train/user/factor"] for p in metrics(run_dir) if "train/user/factor" in p["values"]}
    assert factors == {0.25}
    for run in (run_dir, next(run_dir.parent.glob("child-*"))):
        (copy,) = (run / "code").glob("*/mine.py")
        assert (copy.read_text(), copy.with_name("told.py").read_text()) == (HOOKS, TOLD.format(0.25))
        config = load_config(run / "config.toml")
        assert config.algo.loss_fn == f"{copy}:loss"
        assert f'advantage_fn = "code/{copy.parent.name}/mine.py:advantages"' in (run / "config.toml").read_text()
