"""The report of planted runs: whole, killed, torn, hostile, empty. Structure by an HTML parser; looks by bench/."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from myxa.core.errors import ConfigError
from myxa.launch.run_lineage.origin import Life, RunOrigin
from myxa.launch.views.report import write_report

VOID = {"meta", "input", "br", "link", "img", "hr"}
Plant = Callable[..., Path]


class Page(HTMLParser):
    """Checks that tags nest, and collects what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: dict[str, list[str]] = {}
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        assert len(found) == len(attrs), f"<{tag}> has an attribute twice"
        self.tags.append((tag, found))
        if "id" in found:
            self.ids.append(found["id"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.words.setdefault(self.open[-1], []).append(data.strip())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def text(self) -> str:
        visible = (words for tag, words in self.words.items() if tag not in {"style", "script"})
        return "\n".join(word for words in visible for word in words)

    @property
    def charts(self) -> set[str]:
        return {attrs["aria-label"].partition(":")[0] for attrs in self.all("svg")}


def report_of(run_dir: Path, tmp_path: Path) -> Page:
    path = write_report(run_dir, tmp_path / "report.html")
    return Page(path.read_text())


ALL_CHARTS = {
    "Reward", "Loss", "Gradient norm", "Entropy (nats per token)", "Approximate KL to the behaviour policy",
    "Trainer against engine", "Share of clipped tokens", "Finished groups", "Groups without spread of rewards",
    "Learning rate", "The whole run", "Close-up", "Lag of the trained groups (versions)", "Groups trained by lag",
    "Tokens per second", "Seconds per step", "Requests in the engines", "Groups in the buffer", "Slots of admission",
    "Mean response length (tokens)", "Share of truncated samples", "Dropped groups by reason",
}  # fmt: skip


def test_a_whole_run(planted: Path, tmp_path: Path) -> None:
    page = report_of(planted, tmp_path)
    assert page.charts == ALL_CHARTS
    assert page.ids == ["learning", "time", "staleness", "speed", "events", "filter", "config"]
    assert {link["href"] for link in page.all("a")} <= {f"#{name}" for name in page.ids}
    for needed in ("sort-1", "finished", "all 40 steps were trained", "generation is the bottleneck", "Slowest steps"):
        assert needed in page.text
    assert "missing" not in page.words.get("b", [])


def test_the_page_asks_no_server_for_anything_and_shows_no_secret(planted: Path, tmp_path: Path) -> None:
    path = write_report(planted, tmp_path / "report.html")
    text, page = path.read_text(), Page(path.read_text())
    assert "do-not-show-me" not in text and "WANDB_API_KEY" in text, "secrets of the run file are hidden"
    assert not page.all("link")
    assert not page.all("img")
    assert not any("src" in attrs or "onclick" in attrs for _, attrs in page.tags)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    policy = next(meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy


def test_numbers_in_the_page_are_those_of_the_files(planted: Path, tmp_path: Path) -> None:
    page = report_of(planted, tmp_path)
    points = [json.loads(line) for line in (planted / "metrics.jsonl").read_text().splitlines()]
    rewards = {p["step"]: p["values"]["reward/raw_mean"] for p in points if "reward/raw_mean" in p["values"]}
    chart = next(json.loads(figure["data-hover"]) for figure in page.all("figure") if "data-hover" in figure)
    training = next(line for line in chart if line["n"] == "training")
    assert len(training["p"]) == len(rewards) == 40
    highest = min(training["p"], key=lambda point: point[1])
    assert highest[2] == f"step {max(rewards, key=lambda step: rewards[step])}"
    lags = sum(v for p in points for name, v in p["values"].items() if name.startswith("lag_hist/"))
    label = next(svg["aria-label"] for svg in page.all("svg") if svg["aria-label"].startswith("Groups trained by lag"))
    assert sum(float(number) for number in re.findall(r"\d+: ([\d.]+)", label)) == lags == 40 * 32
    shares = [re.findall(r"width:([\d.]+)%", span["style"]) for span in page.all("span") if "style" in span]
    assert sum(float(share[0]) for share in shares) == pytest.approx(100 * 5, abs=0.5)  # five actors, 100 % each


def test_a_killed_run_says_so_and_a_failed_one_gives_its_reason(plant_run: Plant, tmp_path: Path) -> None:
    run_dir = plant_run(tmp_path / "failed", num_steps=5, end="")
    page = report_of(run_dir, tmp_path)
    assert "unfinished" in page.text and "killed" in page.text
    with (run_dir / "events.jsonl").open("a") as file:
        for kind, text in (
            ("run-failed", "trainer/0 failed in step 4: loss is nan"),
            ("non-finite", "train/loss is nan"),
        ):
            file.write(json.dumps({"source": "coordinator", "wall_s": 1.8e9, "kind": kind, "text": text}) + "\n")
    page = report_of(run_dir, tmp_path)
    assert "failed" in page.words["span"]
    assert "trainer/0 failed in step 4: loss is nan" in page.text
    assert "Not a number: train/loss is nan." in page.text


def test_torn_and_garbage_lines_are_skipped_and_counted(planted: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "torn"
    shutil.copytree(planted, run_dir)
    metrics, trace = run_dir / "metrics.jsonl", run_dir / "trace.json"
    good = metrics.read_bytes()
    metrics.write_bytes(
        b"\x00\xff garbage\n[1,2]\n{}\n" + b'{"source":1,"step":"x","wall_s":null,"values":[]}\n' + good[:-30]
    )
    trace.write_bytes(trace.read_bytes()[: trace.stat().st_size // 2])
    (run_dir / "events.jsonl").write_text('{"wall_s": "soon"}\nnot json\n')
    (run_dir / "config.toml").write_text("this is = = not toml <b>")
    page = report_of(run_dir, tmp_path)
    assert "3 lines of metrics.jsonl could not be read and were skipped" in page.text
    assert "2 lines of metrics.jsonl are not metric points" in page.text
    assert "1 line of events.jsonl could not be read and was skipped" in page.text
    assert "config.toml cannot be read" in page.text
    assert ALL_CHARTS - {"Close-up"} <= page.charts
    assert "No event was reported." in page.text


@pytest.mark.parametrize("kept", ["metrics.jsonl", "events.jsonl", "trace.json", "config.toml"])
def test_one_file_is_enough(planted: Path, tmp_path: Path, kept: str) -> None:
    run_dir = tmp_path / "partial"
    run_dir.mkdir()
    shutil.copy(planted / kept, run_dir / kept)
    page = report_of(run_dir, tmp_path)
    gone = {"metrics.jsonl", "events.jsonl", "trace.json", "config.toml"} - {kept}
    for name in gone:
        assert f"{name} is missing" in page.text


def test_empty_files_give_an_honest_page(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "trace.json"):
        (tmp_path / name).touch()
    page = report_of(tmp_path, tmp_path)
    for sentence in ("No training step was reported.", "No actor reported its time.", "No lag was reported."):
        assert sentence in page.text
    assert not page.all("svg")


def test_a_run_says_where_it_comes_from(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "trace.json"):
        (tmp_path / name).touch()
    assert "forked from" not in report_of(tmp_path, tmp_path).text
    RunOrigin(parent="/runs/first <b>", parent_version=40, lives=(Life(), Life(version=60))).save(tmp_path)
    assert "forked from version 40 of /runs/first <b>; life 2, from version 60" in report_of(tmp_path, tmp_path).text
    (tmp_path / "origin.json").write_text("{")
    assert "forked from" not in report_of(tmp_path, tmp_path).text


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    """Metric names, sources, events, spans, settings and state names come from users' code and datasets."""
    run_dir = tmp_path / "run <b>x"
    run_dir.mkdir()
    lines = [
        {
            "source": f"rollout/{HOSTILE}",
            "step": step,
            "wall_s": float(step),
            "values": {
                "train/loss": 1.0,
                "reward/mean": 0.5,
                "rollout/tokens_per_s": 3.0,
                f"buffer/{HOSTILE.replace('/', '')}": 2.0,
                f"buffer/dropped/{HOSTILE}": 3.0,
                f"lag_hist/{HOSTILE}": 1.0,
                "time/compute": float(step),
                f"time/compute/{HOSTILE}": float(step),
            },
        }
        for step in range(20)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    event = {"source": HOSTILE, "wall_s": 1.0, "kind": HOSTILE, "text": HOSTILE}
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    named = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": HOSTILE}}
    spans = [
        {"ph": "X", "name": HOSTILE, "cat": cat, "ts": i * 1000000, "dur": 1000000, "pid": 1, "tid": 0}
        for i, cat in enumerate(["compute", HOSTILE])
    ]
    (run_dir / "trace.json").write_text("[\n" + ",\n".join(json.dumps(e) for e in (named, *spans)) + "\n]\n")
    (run_dir / "config.toml").write_text(f"[model]\npath = '''{HOSTILE}'''\n")
    page = report_of(run_dir, tmp_path)
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert {attrs["class"] for attrs in page.all("rect")} <= {"c1", "c2", "k-compute", "k-other"}
    assert HOSTILE in page.text


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
    values = dict.fromkeys(("train/loss", "reward/mean", "train/entropy", "lag/max", "rollout/tokens_per_s"), 0.5)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(5_000):
            point = {"source": "trainer/0", "step": step, "wall_s": step * 30.0, "values": values}
            file.write(json.dumps(point) + "\n")
    with (tmp_path / "events.jsonl").open("w") as file:
        for step in range(5_000):
            event = {"source": "x", "wall_s": step * 30.0, "kind": "weights-adopted", "text": f"serves version {step}"}
            file.write(json.dumps(event) + "\n")
    with (tmp_path / "trace.json").open("w") as file:
        file.write("[\n")
        for index in range(12_000):
            kind = ("compute", "wait-data")[index % 2]
            at = {"ts": index * 12_000_000, "dur": 12_000_000, "pid": 1, "tid": 0}
            span = {"ph": "X", "name": kind, "cat": kind, **at}
            file.write(json.dumps(span) + (",\n" if index < 11_999 else "\n"))
        file.write("]\n")
    path = write_report(tmp_path)
    assert path.stat().st_size < 700_000
    page = Page(path.read_text())
    assert {"Reward", "The whole run", "Close-up"} <= page.charts
