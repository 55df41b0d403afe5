"""Sinks by name, and what is said when the name or the thing is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.harness.manual_clock import ManualClock

from myxa.actors.sinks.chrome_trace import ChromeTraceSink
from myxa.actors.sinks.jsonl import JsonlSink
from myxa.actors.sinks.registry import BUILT_IN, check_name, choose_sinks, make_sink
from myxa.actors.sinks.trackers import TensorBoardSink
from myxa.core.config import load_config
from myxa.core.config.run import MonitorSettings
from myxa.core.errors import ConfigError, UserCodeError
from myxa.core.messages import MetricPoint, Telemetry
from myxa.core.sink import SinkContext

MODULE = """
class Mine:
    name = "mine"
    def open(self, context): pass
    def write(self, bundle): pass
    def flush(self): pass
    def close(self): pass

class NoFlush:
    name = "half"
    def open(self, context): pass
    def write(self, bundle): pass
    def close(self): pass

class Nameless(Mine):
    name = 3

class Explodes:
    def __init__(self): raise RuntimeError("no key")

class Outer:
    Inner = Mine
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "sinks_of_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sinks_of_a_user", raising=False)
    return "sinks_of_a_user"


def test_the_monitor_section_chooses() -> None:
    all_of_them = [JsonlSink, ChromeTraceSink, TensorBoardSink]
    assert [type(sink) for sink in choose_sinks(MonitorSettings())] == all_of_them
    few = MonitorSettings(tensorboard=False, trace=False)
    assert [type(sink) for sink in choose_sinks(few)] == [JsonlSink]
    named = MonitorSettings(sinks=("tensorboard", "jsonl"))
    assert [type(sink) for sink in choose_sinks(named)] == all_of_them, "two writers would double each line"


def test_every_built_in_sink_can_be_made() -> None:
    for name in BUILT_IN:
        assert make_sink(name).name == name


def test_user_sinks_by_path(module: str) -> None:
    assert make_sink(f"{module}:Mine").name == "mine"
    assert make_sink(f"{module}:Outer.Inner").name == "mine"
    assert [sink.name for sink in choose_sinks(MonitorSettings(sinks=(f"{module}:Mine",)))][-1] == "mine"


@pytest.mark.parametrize(("name", "error", "says"), [
    ("comet", ConfigError, "no sink is called 'comet' -- known are chrome_trace, jsonl, mlflow"),
    ("sinks_of_a_user:Missing", ConfigError, 'has no "Missing"'),
    ("sinks_of_a_user:NoFlush", UserCodeError, r"gave a NoFlush, which lacks flush\(\)"),
    ("sinks_of_a_user:Nameless", UserCodeError, "lacks a name"),
    ("sinks_of_a_user:Explodes", UserCodeError, "raised RuntimeError: no key"),
])  # fmt: skip
def test_a_wrong_name_is_told_with_its_cause(module: str, name: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make_sink(name)


def test_the_sink_of_the_examples_works_by_its_file_beside_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "own_sink.py").write_text((Path(__file__).parents[2] / "examples" / "own_sink.py").read_text())
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m"\n[data]\ntrain = "t.jsonl"\n[monitor]\nsinks = ["own_sink.py:PrintLoss"]\n'
        '[monitor.options."own_sink.py:PrintLoss"]\n'
    )
    settings = load_config([tmp_path / "run.toml"]).monitor
    assert settings.sinks == (f"{tmp_path}/own_sink.py:PrintLoss",) == tuple(settings.options)
    with pytest.raises(ConfigError, match="there is no file"):
        check_name(f"{tmp_path}/sink.py:PrintLoss")
    sink = make_sink(settings.sinks[0], settings.options[settings.sinks[0]])
    sink.open(SinkContext(run_dir=tmp_path, run_name="x", clock=ManualClock(), emit=lambda kind, text: None))
    point = MetricPoint(source="trainer/0", step=3, wall_s=0.0, values={"train/loss": 0.5})
    sink.write(Telemetry(metrics=(point,)))
    sink.flush()
    assert (tmp_path / "loss.txt").read_text() == "3 0.5\n"
    sink.close()
