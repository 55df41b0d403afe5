"""The report of planted runs: whole, killed, torn, hostile, empty; and several side by side."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from myxa.core.errors import ConfigError
from myxa.launch.cli import main
from myxa.launch.run_dir import RunDir
from myxa.launch.run_lineage.origin import Life, RunOrigin
from myxa.launch.views.compare import compared, load_runs, runs_of
from myxa.launch.views.report import write_report

Plant = Callable[..., Path]
SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.DOTALL)


class Report:
    """A report's page, and the data in it."""

    def __init__(self, run_dir: Path, tmp_path: Path) -> None:
        self.page = write_report(run_dir, tmp_path / "report.html").read_text()
        scripts: list[tuple[str, str]] = SCRIPT.findall(self.page)
        self.scripts = [body for kind, body in scripts if not kind]
        (self.kept,) = [body for kind, body in scripts if "application/json" in kind]
        data: dict[str, Any] = json.loads(self.kept)
        self.state, self.past, self.samples = data["state"], data["history"], data["samples"]

    @property
    def metrics(self) -> set[str]:
        return {row[0] for row in self.past["series"]}

    def steps(self, metric: str) -> dict[float, float]:
        row = next(row for row in self.past["series"] if row[0] == metric)
        return dict(zip(self.past["axes"][row[2]][0], row[3], strict=True))


def test_a_whole_run(planted: Path, tmp_path: Path) -> None:
    report = Report(planted, tmp_path)
    assert (report.state["name"], report.state["phase"]) == ("sort-1", "finished")
    assert report.state["notice"] == "all 40 steps were trained"
    assert "generation is the bottleneck" in report.state["why"]
    assert report.state["notes"] == []
    facts = dict(report.state["facts"])
    assert facts["step"].startswith("40 of 40   finished")
    assert facts["lag"].startswith("max 2")
    points = [json.loads(line) for line in (planted / "metrics.jsonl").read_text().splitlines()]
    assert report.metrics == {n for p in points for n in p["values"] if not n.startswith("time/")}
    rewards = {p["step"]: p["values"]["reward/raw_mean"] for p in points if "reward/raw_mean" in p["values"]}
    assert report.steps("reward/raw_mean") == pytest.approx(rewards, rel=1e-5)
    assert sum(bar["count"] for bar in report.state["lags"]) == 40 * 32
    assert all(sum(one["total"]) == pytest.approx(1, abs=0.01) for one in report.past["lanes"])


def test_the_page_asks_no_server_for_anything_and_shows_no_secret(planted: Path, tmp_path: Path) -> None:
    report = Report(planted, tmp_path)
    assert "do-not-show-me" not in report.page and "WANDB_API_KEY" in report.page, "secrets of the run file are hidden"
    assert not re.search(r"<link|<img|\ssrc=|\son\w+=|@import", report.page.replace(report.kept, ""))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', report.page)
    assert policy is not None and policy[1].startswith("default-src 'none'")
    for script in report.scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy[1]
    assert "leeoniya/uPlot" in report.scripts[0], "whose licence is beside it"


def test_a_killed_run_says_so_and_a_failed_one_gives_its_reason(plant_run: Plant, tmp_path: Path) -> None:
    run_dir = plant_run(tmp_path / "failed", num_steps=5, end="")
    state = Report(run_dir, tmp_path).state
    assert state["phase"] == "ended" and "killed" in state["notice"]
    with (run_dir / "events.jsonl").open("a") as file:
        for kind, text in (
            ("run-failed", "trainer/0 failed in step 4: loss is nan"),
            ("non-finite", "train/loss is nan"),
        ):
            file.write(json.dumps({"source": "coordinator", "wall_s": 1.8e9, "kind": kind, "text": text}) + "\n")
    state = Report(run_dir, tmp_path).state
    assert (state["phase"], state["notice"]) == ("failed", "trainer/0 failed in step 4: loss is nan")
    alarms = [event["text"] for event in Report(run_dir, tmp_path).past["events"] if event["isAlarming"]]
    assert "train/loss is nan" in alarms


def test_torn_and_garbage_lines_are_skipped_and_counted(planted: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "torn"
    shutil.copytree(planted, run_dir)
    metrics = run_dir / "metrics.jsonl"
    good = metrics.read_bytes()
    metrics.write_bytes(
        b"\x00\xff garbage\n[1,2]\n{}\n" + b'{"source":1,"step":"x","wall_s":null,"values":[]}\n' + good[:-30]
    )
    (run_dir / "events.jsonl").write_text('{"wall_s": "soon"}\nnot json\n')
    (run_dir / "config.toml").write_text("this is = = not toml <b>")
    report = Report(run_dir, tmp_path)
    notes = "\n".join(report.state["notes"])
    assert "3 lines of metrics.jsonl could not be read and were skipped" in notes
    assert "2 lines of metrics.jsonl are not metric points" in notes
    assert "1 line of events.jsonl could not be read and was skipped" in notes
    assert "config.toml cannot be read" in notes
    assert report.metrics == Report(planted, tmp_path).metrics


@pytest.mark.parametrize("kept", ["metrics.jsonl", "events.jsonl", "config.toml", ""])
def test_one_file_is_enough_and_the_others_are_named(planted: Path, tmp_path: Path, kept: str) -> None:
    run_dir = tmp_path / "partial"
    run_dir.mkdir()
    names = {"metrics.jsonl", "events.jsonl", "config.toml"}
    for name in names:
        if not kept:
            (run_dir / name).touch()
        elif name == kept:
            shutil.copy(planted / kept, run_dir / kept)
    notes = Report(run_dir, tmp_path).state["notes"]
    assert {name for name in names if any(f"{name} is missing" in n for n in notes)} == (
        names - {kept} if kept else set()
    )


def test_a_run_says_where_it_comes_from(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert Report(tmp_path, tmp_path).state["origin"] == ""
    RunOrigin(parent="/runs/first <b>", parent_version=40, lives=(Life(), Life(version=60))).save(tmp_path)
    origin = Report(tmp_path, tmp_path).state["origin"]
    assert "forked from version 40 of /runs/first <b>; life 2, from version 60" in origin
    (tmp_path / "origin.json").write_text("{")
    assert Report(tmp_path, tmp_path).state["origin"] == ""


HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\"'&"


def plant_hostile(run_dir: Path) -> Path:
    """Metric names, sources, events, spans, settings, prompts and answers come from users' code and data sets."""
    run_dir.mkdir()
    values = {"train/loss": 1.0, f"reward/part/{HOSTILE}/mean": 0.5, f"buffer/dropped/{HOSTILE}": 3.0,
              f"lag_hist/{HOSTILE}": 1.0, f"train/{HOSTILE}": 2.0}  # fmt: skip
    lines = [
        {"source": source, "step": step, "wall_s": float(step),
         "values": {**values, "time/compute": float(step), f"time/compute/{HOSTILE}": float(step)}}
        for step in range(20) for source in ("trainer/0", f"rollout/{HOSTILE}")
    ]  # fmt: skip
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"source": HOSTILE, "wall_s": 1.0, "kind": kind, "text": HOSTILE} for kind in (HOSTILE, "run-failed")]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    named = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": HOSTILE}}
    spans = [
        {"ph": "X", "name": HOSTILE, "cat": cat, "ts": i * 1000000, "dur": 9000000, "pid": 1, "tid": 0}
        for i, cat in enumerate(["compute", HOSTILE])
    ]
    (run_dir / "trace.json").write_text("[\n" + ",\n".join(json.dumps(e) for e in (named, *spans)) + "\n]\n")
    (run_dir / "config.toml").write_text(f"[model]\npath = '''{HOSTILE}'''\n")
    call = {"role": "assistant", "content": "", "name": HOSTILE, "calls": [json.dumps({"name": HOSTILE})]}
    said = [{"role": HOSTILE, "content": HOSTILE, "thought": HOSTILE}, call,
            {"role": "assistant", "is_model": True, "content": f"<tool_call>{HOSTILE}</tool_call>{HOSTILE}"}]  # fmt: skip
    answer = {"index": 0, "messages": said, "reward": 0.5, "reward_parts": {HOSTILE: 1.0}, "finish": HOSTILE,
              "num_tokens": 1, "tools": [HOSTILE]}  # fmt: skip
    group = {"step": 3, "group_id": 1, "messages": [{"role": "system", "content": HOSTILE}], "label": HOSTILE,
             "outcome": "kept", "reason": HOSTILE, "source": HOSTILE, "answers": [answer], "is_held_out": False,
             "eval_set": HOSTILE, "wall_s": 1.0, "num_answers": 1, "oldest_version": 1, "newest_version": 2}  # fmt: skip
    (run_dir / "samples.jsonl").write_text(json.dumps(group) + "\n")
    return run_dir


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    """In the data of the page; what the page draws of it: tests/web/test_in_browser.py."""
    report = Report(plant_hostile(tmp_path / "run <b>x"), tmp_path)
    assert "<" not in report.kept, "no text can end the element"
    assert len(report.scripts) == 4
    assert report.state["notice"] == HOSTILE
    assert HOSTILE in report.samples[0]["answers"][0]["text"]


def test_not_a_run_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"holds none of metrics\.jsonl"):
        write_report(tmp_path)


def test_the_report_lies_in_the_run_directory_and_is_replaced_whole(planted: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(planted, run_dir)
    (run_dir / "report.html").write_text("old")
    assert write_report(run_dir) == run_dir / "report.html"
    assert (run_dir / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert not list(run_dir.glob(".report*"))
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(run_dir, tmp_path / "no" / "such" / "folder.html")


def test_a_long_run_gives_a_page_of_bounded_size(tmp_path: Path) -> None:
    names = ("train/loss", "reward/mean", "train/entropy", "lag/max", "rollout/tokens_per_s")
    with (tmp_path / "metrics.jsonl").open("w") as file, (tmp_path / "events.jsonl").open("w") as events:
        for step in range(5_000):
            values = dict.fromkeys(names, 0.5 + step % 7)
            point = {"source": "trainer/0", "step": step, "wall_s": step * 30.0, "values": values}
            file.write(json.dumps(point) + "\n")
            event = {"source": "x", "wall_s": step * 30.0, "kind": "weights-adopted", "text": f"serves version {step}"}
            events.write(json.dumps(event) + "\n")
    assert write_report(tmp_path).stat().st_size < 300_000


# -- several runs --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(planted: Path, plant_run: Plant, tmp_path: Path) -> Path:
    """Two runs: one of 40 steps, and one that was killed after 6."""
    shutil.copytree(planted, tmp_path / "runs" / "first")
    plant_run(tmp_path / "runs" / "second", num_steps=6, end="", seed=2)
    (tmp_path / "runs" / "latest").symlink_to("second")
    (tmp_path / "runs" / "no-run").mkdir()
    return tmp_path / "runs"


def test_ls_names_the_runs_of_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row.name: row for row in runs_of(folder)}
    assert {name: (row.state, row.step) for name, row in rows.items()} == {
        "first": ("finished", 40), "second": ("unfinished", 6),
    }  # fmt: skip
    (folder / "third").mkdir()
    (folder / "third" / "config.toml").touch()
    assert {row.name: row.state for row in runs_of(folder)}["third"] == "not started", "its coordinator never answered"
    shutil.rmtree(folder / "third")
    with RunDir(folder / "second").held():
        assert {row.name: row.state for row in runs_of(folder)}["second"] == "running"
    assert main(["ls", str(folder)]) == 0
    assert re.search(r"first +finished +40 +0\.9", capsys.readouterr().out)
    assert main(["ls", str(folder), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert [row.name for row in runs_of(folder / "latest")] == ["second"], "a run that is named itself"
    assert main(["ls", str(folder / "nowhere")]) == ConfigError.exit_code


def test_compare_shows_last_values_and_curves_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = load_runs([folder / "first", folder / "second"])
    by_name = {each.metric: each for each in compared(runs)}
    assert list(by_name)[:2] == ["reward/raw_mean", "reward/mean"]
    assert [len(curve) for curve in by_name["train/loss"].curves] == [40, 6]
    assert by_name["eval/reward"].last[1] is None, "the second was never evaluated"
    assert [each.metric for each in compared(runs, ["lag/m*"])] == ["lag/max", "lag/mean", "lag/min"]
    named = [str(folder / "first"), str(folder / "second")]
    assert main(["compare", *named, "--metric", "train/entropy"]) == 0
    assert re.search(r"train/entropy +0\.\d+ +\S+ +0\.\d+ +\S+", capsys.readouterr().out)
    page = folder / "both.html"
    assert main(["compare", *named, "--html", str(page)]) == 0
    data = json.loads(re.search(r'application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])  # pyright: ignore[reportOptionalSubscript]
    assert [data["history"]["name"], *(run["name"] for run in data["others"])] == ["first", "second"]
    capsys.readouterr()
    for words, said in (
        (["compare", named[0]], "two runs or more"),
        (["compare", *named, "--metric", "nothing"], "no metric is called nothing"),
        (["compare", named[0], str(folder / "no-run")], "holds none of"),
    ):
        assert main(words) == ConfigError.exit_code
        assert said in capsys.readouterr().err
