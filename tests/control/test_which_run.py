"""F5: a command says which run it speaks to, and changes none that is elsewhere unless that one is named."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from myxa.core.errors import LaunchError
from myxa.launch.cli import main
from myxa.launch.commands.parser import show
from myxa.launch.control.client import SeveralLiveRuns, find_run
from myxa.launch.runtime_dir import PREFIX, short_base
from myxa.launch.views.why import Reason


@pytest.fixture
def live_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory whose launcher's socket is there, as the user's runtime folder knows it."""
    run_dir = tmp_path / "there" / "my runs" / "sort-1"
    run_dir.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="r") as base, socket.socket(socket.AF_UNIX) as link:
        monkeypatch.setattr(tempfile, "tempdir", base)
        place = Path(short_base()) / f"{PREFIX}test"
        place.mkdir(mode=0o700)
        link.bind(str(place / "s"))
        link.listen()
        note = {"run_dir": str(run_dir), "control": str(place / "s"), "view": str(place / "s"), "pid": 1}
        (place / "control.json").write_text(json.dumps(note))
        yield run_dir


def test_f5_only_a_run_of_this_folder_is_changed_without_a_name(
    live_note: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert find_run(None).run_dir == str(live_note), "to look is free"
    for words in (
        ["set", "lr=1e-4"], ["down"], ["kill", "rollout/0"], ["scale", "rollout=2"], ["pause"], ["step"], ["resume"],
        ["undo"], ["ckpt"], ["eval"], ["drain", "rollout/1"], ["restart", "rollout/0"],
    ):  # fmt: skip
        assert main(words) == 3, words
        said = capsys.readouterr().err
        assert f"({elsewhere}), only elsewhere:\n  {live_note}" in said
        assert f"myxa {' '.join(words)} --run '{live_note}'" in said
    for inside in (live_note.parents[1], live_note.parent, live_note):
        monkeypatch.chdir(inside)
        assert find_run(None, command="myxa down").run_dir == str(live_note)


def test_f5_two_runs_below_are_listed(live_note: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(short_base()) / f"{PREFIX}other"
    place.mkdir(mode=0o700)
    note = json.loads((Path(short_base()) / f"{PREFIX}test" / "control.json").read_text())
    (place / "control.json").write_text(json.dumps({**note, "run_dir": str(tmp_path / "b")}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SeveralLiveRuns, match=f"2 runs are live:\n  {tmp_path / 'b'}"):
        find_run(None)
    monkeypatch.chdir(live_note)
    assert find_run(None).run_dir == str(live_note), "the one of this folder"


def test_the_run_here_that_is_over_goes_before_a_live_one_elsewhere(
    live_note: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = tmp_path / "project" / "runs" / "mine-1"
    over.mkdir(parents=True)
    (over / "config.toml").write_text("")
    (over / "samples.jsonl").write_text("")
    (over.parent / "latest").symlink_to(over.name)
    monkeypatch.chdir(tmp_path / "project")
    main(["samples"])
    assert f"run mine-1 in {over} is over" in capsys.readouterr().err
    assert find_run(None).run_dir == str(live_note), "of what only a live run answers"
    with pytest.raises(LaunchError, match="it is over, or has"):
        find_run(over)
    (over / ".launcher.lock").touch()
    with pytest.raises(LaunchError, match="it is over -- `myxa resume "):
        find_run(over)


def test_an_answer_of_another_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def page(answer: dict[str, object]) -> str:
        return msgspec.convert(answer, Reason).sentence

    known = {"bound": "data", "sentence": "it waits", "share": 1.0}
    show(Namespace(json=False), known, page)
    assert capsys.readouterr().out == "it waits\n"
    with pytest.raises(LaunchError, match="another_field"):
        show(Namespace(json=False), {**known, "another_field": 1}, page)


@pytest.mark.parametrize("name", ["nowhere", "over", "gone"])
def test_a_run_that_cannot_be_reached_is_told_with_status_3(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("over", "gone"):
        (tmp_path / folder).mkdir()
    with socket.socket(socket.AF_UNIX) as link:
        link.bind(str(tmp_path / "gone" / "s"))  # and nobody listens
    note = dict.fromkeys(("run_dir", "control", "view"), str(tmp_path / "gone" / "s"))
    (tmp_path / "gone" / "control.json").write_text(json.dumps({**note, "pid": 1}))
    assert main(["get", "--run", str(tmp_path / name), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "LaunchError"


def test_a_command_starts_fast_and_light() -> None:
    heavy = ("zmq", "asyncio", "torch", "numpy", "pydantic", "rich", "aiohttp", "textual")
    code = (
        "import sys; from myxa.launch.cli import make_parser; make_parser(); import myxa.launch.control.client; "
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (out.stdout.strip(), out.stderr) == ("[]", "")
