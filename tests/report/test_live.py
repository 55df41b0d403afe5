"""The live view in a terminal and in a pipe, and the last words of a run."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from myxa.core.messages import BufferStats, EngineStatus, RunStatus
from myxa.launch.views.live import LiveView, final_summary, lasting, render
from myxa.launch.views.run_view import RunView, fact_lines, notice_text, plain_line

SNAPSHOT: dict[str, dict[str, float]] = {
    "metrics": {
        "reward/mean": 0.81, "reward/std": 0.3, "reward/zero_std_groups": 4, "lag/max": 2, "lag/mean": 1.2,
        "train/loss": 0.0123, "train/grad_norm": 0.7, "train/num_loss_tokens": 5000,
    },
    "rollout/0": {"rollout/tokens_per_s": 1400, "rollout/running": 34, "rollout/waiting": 2},
    "rollout/1": {"rollout/tokens_per_s": 1200},
    "rollout/2": {"rollout/tokens_per_s": 9e9},
    "age_s": {"rollout/0": 0.3, "rollout/1": 0.5, "rollout/2": 99.0, "trainer/0": 1.0},
    "time/trainer/0": {"compute": 0.38, "wait-data": 0.62, "wait-data/claim": 0.62},
    "time/rollout/0": {"compute": 0.97, "wait-weights": 0.03},
    "time/buffer": {"other": 1.0},
}  # fmt: skip


def state(now_s: float = 94.0, version: int = 47, phase: str = "running", **options: object) -> RunView:
    engines = (EngineStatus(rollout="rollout/0", version=46, running=0, waiting=0),)
    named: dict[str, Any] = {"name": "sort", "phase": phase, "num_steps": 60}
    status = RunStatus(**named, version=version, engines=engines, eval_reward=0.83)
    buffer = BufferStats(
        states={"DISPATCHED": 12, "READY": 5, "CLAIMED": 0}, drawn=80, trained=40, dropped={"zero-variance": 3},
        slots_total=96, slots_used=49, max_staleness=2, policy="pace",
    )  # fmt: skip
    past = {"step_s": 2.0, "rewards": tuple(step / 50 for step in range(47))}
    given = {"status": status, "buffer": buffer, "snapshot": SNAPSHOT, **past, **options}
    return RunView(now_wall_s=now_s, started_wall_s=0.0, **given)


def screen(width: int = 120, *, terminal: bool = True) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None, legacy_windows=False)
    return console, file


def drawn(view: RunView, width: int = 120) -> str:
    console, file = screen(width)
    console.print(render(view))
    return file.getvalue()


def test_a_sink_that_is_off_is_told() -> None:
    off = state(snapshot={**SNAPSHOT, "monitor": {"sinks_off": 1.0}})
    assert "1 of the monitor's sinks are off" in notice_text(off) and "sinks are off" in plain_line(off)
    assert "sinks" not in notice_text(state()) + plain_line(state())


def test_a_run_that_is_paused_now_is_not_judged_by_the_minute_before() -> None:
    view = state(status=RunStatus(name="sort", phase="running", version=47, num_steps=60, paused="by root"))
    assert plain_line(view).count("paused: by root") == 1
    assert "bottleneck" not in drawn(view) and "the run is paused: by root" in drawn(view)


def test_of_pairs_it_is_told_how_many_are_ranked_rightly() -> None:
    view = state(snapshot={"metrics": {"train/loss": 0.5, "train/accuracy": 0.75, "train/margin": 1.5}})
    assert "loss 0.5   accuracy 0.75   margin 1.5" in drawn(view) and "| loss 0.5 accuracy 0.75" in plain_line(view)


def test_of_demonstrations_no_lag_is_told() -> None:
    assert "lag max 2 mean 1.2 bound" in plain_line(state())
    view = state(snapshot={"metrics": {"train/loss": 0.5}})
    assert "lag" not in dict(fact_lines(view)) and "lag" not in plain_line(view)


def test_the_table_says_what_is_asked_first() -> None:
    text = drawn(state())
    for needed in (
        "47 of 60   running   2 s a step   26 s to go",
        "train 0.81 ± 0.3   eval 0.83   4 groups without spread",
        "loss 0.0123   grad 0.7",
        "max 2   mean 1.2   bound 2 (pace)",
        "slots 49 of 96   dispatched 12   ready 5",
        "generated 2600 tokens/s   trained 2500 tokens/s",  # rollout/2 was not heard of for 99 s; 5000 in steps of 2 s
        "drawn 80   trained 40   dropped 3 (zero-variance 3)",
        "rollout/0   v46   1     34     2       1400",
        "wait-data 62 %  compute 38 %",
        "generation is the bottleneck (rollout/0 computes 97 %)",
        "▁▁",
        "1 min 34 s",
    ):
        assert needed in text
    assert "claimed" not in text
    assert "time/" not in text and "rollout/2" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    assert max(len(line) for line in drawn(state(), width).splitlines()) <= width


def test_before_anything_is_known_it_says_what_it_waits_for() -> None:
    assert "waiting for x" in drawn(RunView(now_wall_s=3.0, started_wall_s=0.0, note="waiting for x"))


def test_many_engines_are_counted() -> None:
    engines = tuple(EngineStatus(rollout=f"rollout/{i}", version=40 + i % 2, running=0, waiting=0) for i in range(64))
    gauges = {engine.rollout: {"rollout/running": 10.0, "rollout/waiting": 1.0} for engine in engines}
    seen = {**gauges, "age_s": dict.fromkeys(gauges, 0.1)}
    status = RunStatus(name="x", phase="running", version=41, num_steps=0, engines=engines)
    text = drawn(RunView(now_wall_s=1.0, started_wall_s=0.0, status=status, snapshot=seen))
    assert "64 engines, of which" in text and len(text.splitlines()) < 30


def test_hostile_names_neither_style_nor_steer_the_terminal() -> None:
    status = RunStatus(name="[red]x\x1b[2J", phase="failed", version=1, num_steps=2, error="[bold]no\x1b]0;t\x07\nline")
    text = drawn(RunView(now_wall_s=1.0, started_wall_s=0.0, status=status))
    assert "[red]x" in text and "[bold]no" in text
    assert "\x1b" not in text and "\x07" not in text


def test_in_a_terminal_it_redraws_and_leaves_the_cursor_visible() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, _environ={"TERM": "xterm"})
    with LiveView(console) as view:
        view.update(state(version=46))
        view.update(state(version=47))
        view.say("rollout/1 joined")
    text = file.getvalue()
    assert "47 of 60" in text
    assert "rollout/1 joined" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_in_a_pipe_there_is_a_line_per_step_but_not_more_than_one_per_two_seconds() -> None:
    console, file = screen(terminal=False)
    with LiveView(console) as view:
        for tick in range(100):  # 10 s, a step every 0.5 s, looked at ten times a second
            view.update(state(now_s=tick / 10, version=tick // 5))
        for tick in range(10, 80):  # a minute and more without news
            view.update(state(now_s=float(tick), version=19))
        view.update(state(now_s=80.0, version=19, phase="finished"))
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("step 0 of 60") and "loss 0.0123" in lines[0]
    assert 5 <= len([line for line in lines if "running" in line]) <= 9
    assert "finished" in lines[-1]
    assert not any("\x1b" in line for line in lines)
    assert max(map(len, lines)) > 100  # one line each, never wrapped


def test_a_run_outlives_the_reader_of_its_output() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for number, encoding in ((writing, "utf-8"), (os.open("/dev/full", os.O_WRONLY), "ascii")):
        with os.fdopen(number, "w", encoding=encoding) as file:
            console = Console(file=lasting(file), width=80)
            view = LiveView(console)
            for version in (1, 2, 3):
                view.say(f"step {version}")
            assert not console.is_terminal
            assert console.encoding == encoding, "the file's own"


@pytest.mark.parametrize("phase", ["finished", "failed"])
def test_the_last_words(phase: str) -> None:
    console, file = screen(100)
    final_summary(
        console,
        RunStatus(name="sort", phase=phase, version=60, num_steps=60, reason="all steps done"),  # pyright: ignore[reportArgumentType]
        elapsed_s=130.0,
        run_dir=Path("runs/sort-1"),
        report=Path("runs/sort-1/report.html"),
        curves={"reward": {step: step / 60 for step in range(60)}, "held-out reward": {0: 0.02, 60: 0.9}},
    )
    text = file.getvalue()
    assert f"sort: {phase} after 60 of 60 steps, 2 min 10 s" in text
    assert "all steps done" in text
    assert "\nreward: 0.0417 -> 0.942\n  ▁" in text
    assert "\nheld-out reward: 0.02 -> 0.9\n  ▁█\n" in text
    assert "report: runs/sort-1/report.html" in text


def test_without_a_curve_there_is_none_and_demonstrations_have_a_loss() -> None:
    console, file = screen(100)
    status = RunStatus(name="sort", phase="failed", version=0, num_steps=60, error="rollout/0 died: no model")
    final_summary(console, status, elapsed_s=3.0, run_dir=Path("runs/sort-1"), report=None, curves={"reward": {}})
    assert "reward" not in file.getvalue()
    assert "report" not in file.getvalue()
    assert "rollout/0 died: no model" in file.getvalue()
    console, file = screen(100)
    status = RunStatus(name="sft", phase="finished", version=9, num_steps=9, reason="all steps done")
    loss = {step: 2.0 - step / 10 for step in range(10)}
    final_summary(console, status, elapsed_s=3.0, run_dir=Path("r"), report=None, curves={"loss": loss})
    assert "loss: 2 -> 1.1" in file.getvalue()
    assert "reward" not in file.getvalue()
