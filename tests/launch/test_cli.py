"""The command line: what it answers to mistakes, without starting anything."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from myxa import __version__
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.errors import MyxaError
from myxa.launch import worker
from myxa.launch.cli import main
from myxa.launch.demo.run import DemoOptions, run_demo
from myxa.launch.waiting import Waiting


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["uup", "run.toml"], "'uup' is no command -- did you mean 'up'?"),
        (["luanch"], "did you mean 'launch'?"),
        (["stop"], "'stop' is no command -- did you mean 'down'?"),
        (["status"], "'status' is no command -- did you mean 'ps'?"),
        ([], "a command is missing -- there are: up, launch, "),
        (["control", "where"], "did you mean 'where'?"),
        (["profile", "all", "--for", "11min"], "'11min' is more than 10min"),
        (["set", "lr=1", "--resaon", "x"], "set does not take --resaon x -- did you mean --reason?"),
        (["step", "-1"], "argument N: '-1' is no whole number from 1 on"),
        (["plan", "run.toml", "--brief"], "plan does not take --brief -- `myxa plan --help` shows what it takes"),
        (["up", "run.toml", "--start-timeout", "x"], "'x' is not a number of seconds"),
        (["up", "run.toml", "--stop-timeout", "0"], "'0' is not a number of seconds"),
        (["up", "run.toml", "--finish-timeout", "nan"], "'nan' is not a number of seconds"),
        (["up", "run.toml", "--finish-timeout", "1e9"], "'1e9' is not a number of seconds"),
        (["logs", "all", "-n", "x"], "argument -n/--lines: 'x' is no whole number from 0 on"),
        (["engine", "serve", "m", "--port", "65536"], "'65536' is no whole number from 0 to 65535"),
        (["demo", "--seed", "-1"], "'-1' is no whole number from 0 on"),
        (["scale", "rollout=-1"], "'rollout=-1': write ROLE=N with a whole number"),
        (["xyzzy"], "there are: up, launch, demo, "),
    ],
)
def test_a_mistaken_verb_is_answered_with_the_right_one(capsys: pytest.CaptureFixture[str], arguments, said: str):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "no-such.toml"], "no-such.toml: there is no such run file"),
        (["launch", "run.toml", "--nnodes", "2", "--rdzv", "h:1"], "--node-rank is not given"),
        (["launch", "run.toml", "--nnodes", "2", "--node-rank", "0", "--rdzv", "h:x"], "'h:x' is no host and port"),
        (["launch", "run.toml", "--join", "h:1", "--nnodes", "2"], "--join goes without --nnodes"),
        (["launch", "run.toml", "--join", "run.toml"], "that is a run file"),
        (["launch", "run.toml", "--node-rank", "-1"], "'-1' is no whole number from 0 on"),
        (["launch", "run.toml", "--nnodes", "4:2"], "fewer at most than at least"),
        (["report", "no-such-folder"], "no-such-folder"),
    ],
)
def test_mistakes_end_with_status_2_and_one_sentence(capsys, monkeypatch, tmp_path: Path, arguments, said: str):
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_NODEID", "PET_NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.toml").write_text('[model]\npath = "m"\n[data]\ntrain = "d"\n')
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("myxa: ")
    assert list(tmp_path.iterdir()) == [tmp_path / "run.toml"], "nothing was made"


def test_files_that_cannot_be_are_told_without_a_traceback(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("no folder")
    assert main(["demo"]) == 2
    assert ": Not a directory -- check the path" in capsys.readouterr().err
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["plan", "run.toml"]) == 2
    assert main(["demo"]) == 2
    assert "myxa: the current folder is gone" in capsys.readouterr().err


def test_a_letter_that_the_terminal_lacks_is_written_in_others(monkeypatch, tmp_path: Path):
    (tmp_path / "run.toml").write_text('[model]\npath = "ü"\n[data]\ntrain = "d"\n')
    monkeypatch.chdir(tmp_path)
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii", write_through=True))
    assert main(["plan", "run.toml"]) == 2
    assert b"\\xfc does not exist" in terminal.getvalue()


def test_help_and_version(capsys: pytest.CaptureFixture[str]):
    """tests/control/test_page.py asks each command."""
    for flag, printed in (("--help", "usage: myxa"), ("--version", f"myxa {__version__}\n")):
        with pytest.raises(SystemExit) as caught:
            main([flag])
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith(printed)


def test_a_worker_that_nobody_launched_says_so(monkeypatch, capsys):
    monkeypatch.delenv(worker.SPEC_VARIABLE, raising=False)
    assert worker.main() == 3
    assert "workers are started by `myxa up`" in capsys.readouterr().err


WITHOUT = """
import sys

missing = sys.argv[1]

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

sys.meta_path.insert(0, Blocker())
from myxa.launch.cli import main

sys.exit(main(sys.argv[2:]))
"""


def test_a_python_that_was_built_without_sqlite_is_told_what_it_lacks(tmp_path: Path):
    words = [sys.executable, "-c", WITHOUT, "_sqlite3", "doctor"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert 'has no module "_sqlite3" -- this Python was built without it' in done.stderr.replace("\n", " ")


@pytest.mark.parametrize("words", [["init"], ["up", "run.toml"]], ids=" ".join)
def test_where_torch_is_missing_the_command_that_installs_it_is_named(tmp_path: Path, words: list[str]):
    make_tiny_model(tmp_path / "model", preset="0p5m", seed=0)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n' * 64)
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "model"\n[data]\ntrain = "rows.jsonl"\n[reward]\nfn = "exact"\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "torch", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    said = done.stdout + done.stderr
    assert 'has no module "torch"' in said and "pip install 'myxa[cpu]'" in said and "Traceback" not in said
    assert not (tmp_path / "my-task" / "run.toml").exists()


def test_what_lasts_is_said_within_two_seconds_apart_from_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    def said(lasts_s: float, *, is_quiet: bool = False) -> str:
        with Waiting("counting sheep", is_quiet=is_quiet):
            time.sleep(lasts_s)
        out, err = capsys.readouterr()
        assert out == ""
        return err

    assert "counting sheep" in said(1.3)
    assert said(1.3, is_quiet=True) == said(0.1) == ""


@pytest.mark.parametrize(
    ("verb", "variables"),
    [
        ("up", {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}),
        ("launch", {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}),
        ("up", {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0", "SLURM_NNODES": "1"}),
        ("launch", {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3"}),
    ],
)
def test_processes_of_other_launchers_start_no_run_each(
    capsys, monkeypatch, tmp_path: Path, verb: str, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([verb, str(tmp_path / "run.toml")]) == 2
    assert "8 processes would start a whole run each" in capsys.readouterr().err


def test_one_task_of_a_job_of_many_starts_a_run(capsys, monkeypatch, tmp_path: Path) -> None:
    for name, value in {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["up", str(tmp_path / "run.toml")]) == 2
    assert "there is no such run file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["migrate", "verl"], ["ls", ".", "--json"], ["completion", "bash"], ["plan", "x"]])
def test_a_full_disk_behind_stdout_is_named_and_ends_the_command(words: list[str], tmp_path: Path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "myxa.launch", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            cwd=tmp_path, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert "myxa: standard output: No space left on device -- " in done.stderr and "Traceback" not in done.stderr


def test_standard_streams_that_were_closed_are_open_and_hold_no_other_file(tmp_path: Path):
    show = "import os; print(*(os.readlink(f'/proc/self/fd/{n}') for n in range(3)), file=open('there', 'w'))"
    code = f"from myxa.launch.cli import main; main(['ls', '.']); {show}"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert (tmp_path / "there").read_text().split() == ["/dev/null"] * 3


def test_a_warm_model_of_an_earlier_demo_is_not_taken_for_this_ones(tmp_path: Path):
    (tmp_path / "sft").symlink_to("sft-of-an-earlier-demo")
    with pytest.raises(MyxaError):
        run_demo(DemoOptions(folder=tmp_path, ranks=1025, is_quiet=True))
    assert not (tmp_path / "sft").is_symlink()


def test_ctrl_c_while_the_command_line_is_imported_leaves_no_traceback():
    code = """
import signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "myxa.launch.commands.parser":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from myxa.launch.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")
