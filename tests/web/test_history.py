"""The past of a run out of its files: read on while they grow, bounded, whatever is in them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxa.launch.views.report import speed_charts
from myxa.launch.views.run_files import RunFiles
from myxa.launch.web.history import History, JsonTail, Series, ShareBins, TimeBins
from myxa.launch.web.state import all_charts, marks, staleness_bound, time_charts


def point(source: str, step: int, wall_s: float, **values: float) -> dict[str, Any]:
    named = {k.replace("__", "/"): v for k, v in values.items()}
    return {"source": source, "step": step, "wall_s": wall_s, "values": named}


@given(st.integers(1, 3000))
def test_a_series_is_bounded_and_keeps_its_mean_and_its_peaks(num: int) -> None:
    rng = random.Random(num)
    values = [rng.gauss(0, 1) for _ in range(num)]
    series = Series(limit=50)
    for x, y in enumerate(values):
        series.put(float(x), y)
    points = series.points()
    assert len(points) <= 50
    assert [p[0] for p in points] == sorted(p[0] for p in points)
    assert points[-1][0] == num - 1
    assert (min(p[2] for p in points), max(p[3] for p in points)) == (min(values), max(values))


def test_a_step_that_is_trained_again_replaces_what_came_after_it() -> None:
    series = Series()
    for step in range(10):
        series.put(step, 1.0)
    for step in range(5, 8):
        series.put(step, 2.0)
    assert [(p[0], p[1]) for p in series.points()] == [(s, 1.0) for s in range(5)] + [
        (s, 1.5 if s == 5 else 2.0) for s in range(5, 8)
    ]


def test_gauges_of_several_sources_are_summed_however_long_the_run() -> None:
    bins = TimeBins(limit=40)
    for second in range(1000):
        bins.put(50.0 + second, "rollout/0", 100.0)
        bins.put(50.0 + second, "rollout/1", 50.0)
    points = bins.points()
    assert len(points) <= 40
    assert {p[1] for p in points} == {150.0}
    assert 50 <= points[0][0] <= points[-1][0] <= 1080


def test_shares_are_spread_over_the_time_in_which_they_were_spent_and_survive_a_restart() -> None:
    bins = ShareBins(limit=20, width_s=1.0)
    bins.put(100.0, {"compute": 0.0, "wait-data": 0.0})
    bins.put(110.0, {"compute": 10.0, "wait-data": 0.0})
    bins.put(112.0, {"compute": 0.0, "wait-data": 1.0})  # began anew a second before
    bins.put(116.0, {"compute": 2.0, "wait-data": 3.0})
    found = dict(bins.shares())
    assert found[104.0] == {"compute": 1.0, "wait-data": 0.0}
    assert found[114.0] == pytest.approx({"compute": 0.5, "wait-data": 0.5})
    bins.put(1116.0, {"compute": 1002.0, "wait-data": 3.0})
    assert len(bins.shares()) <= 20
    assert all(sum(shares.values()) == pytest.approx(1.0) for _, shares in bins.shares())


def test_a_tail_reads_on_where_it_stopped_and_keeps_torn_lines_for_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonTail(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"a"')
    assert tail.read() == [{"a": 1}]
    with path.open("a") as file:
        file.write(': 2}\ngarbage\n[1]\n\n{"a": 3}\n')
    assert tail.read() == [{"a": 2}, {"a": 3}]
    assert tail.num_bad == 2
    path.write_text('{"a": 4}\n')
    assert tail.read() == [{"a": 4}], "a file that shrank is read anew"


def test_a_planted_run_becomes_charts(seat) -> None:
    history = History(seat.run_dir)
    assert history.read()
    assert not history.read()
    charts = {chart["title"]: chart for chart in all_charts(history)}
    lags = "Lag of the trained groups (versions)"
    assert {"Reward", "Loss", "Tokens per second", "Groups in the buffer", lags} <= charts.keys()
    wanted = {
        p["step"]: p["values"]["reward/raw_mean"]
        for p in map(json.loads, (seat.run_dir / "metrics.jsonl").read_text().splitlines())
        if "reward/raw_mean" in p["values"]
    }
    shown = {point[0]: point[1] for point in charts["Reward"]["lines"][0]["points"]}
    assert shown == pytest.approx(wanted, rel=1e-5)
    assert staleness_bound(history) == [(1.0, 2.0), (3.0, 2.0), (3.0, 4.0), (9.0, 4.0), (9.0, 2.0), (12.0, 2.0)]
    assert [mark["what"] for mark in marks(history)][:2] == ["max_staleness 2 -> 4", "temperature 1 -> 0.9"]
    strips = {strip["actor"]: strip for strip in time_charts(history)}
    assert next(iter(strips)) == "trainer/0"
    for bins in (strip["bins"] for strip in strips.values()):
        assert all(sum(shares) == pytest.approx(1.0, abs=0.01) for _, *shares in bins)


def test_lags_are_counted_over_the_newest_steps(tmp_path: Path) -> None:
    history = History(tmp_path)
    for step in range(100):
        history.take_metric(
            point("trainer/0", step, 5.0 + step, lag_hist__0=2.0, **({"lag_hist__9": 1.0} if step < 20 else {}))
        )
    assert history.lag_counts() == {0: 100.0}


def test_of_several_ranks_one_speaks(tmp_path: Path) -> None:
    history = History(tmp_path)
    for step in range(3):
        for rank in range(2):
            history.take_metric(point(f"trainer/{rank}", step, 5.0 + step, train__loss=float(rank)))
    assert [p[1] for p in history.by_step["train/loss"].points()] == [0.0, 0.0, 0.0]


def test_names_and_sources_are_bounded(tmp_path: Path) -> None:
    history = History(tmp_path)
    for n in range(2000):
        history.take_metric(point(f"s{n}", n, 5.0, **{f"train__{n}": 1.0, f"buffer__{n}": 1.0, "time__compute": 1.0}))
    assert max(len(history.by_step), len(history.by_time)) <= 512
    assert len(history.shares) <= 256
    for n in range(3000):
        history.take_event({"source": "a", "wall_s": 1.0, "kind": f"k{n}", "text": "x" * 9999})
    assert len(history.events) <= 400
    assert len(history.event_counts) <= 512


def test_routine_does_not_bury_the_event_that_counts(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.take_event({"source": "a", "wall_s": 1.0, "kind": "engine-gone", "text": "rollout/1 is gone"})
    for n in range(5000):
        history.take_event({"source": "a", "wall_s": 2.0 + n, "kind": "weights-adopted", "text": f"serves {n}"})
    assert history.events[0].kind == "engine-gone"
    assert history.events[-1].text == "serves 4999"
    assert history.event_counts["weights-adopted"] == 5000


GAUGES = {"ready": 3.0, "under_way": 8.0, "slots_used": 11.0, "slots_total": 64.0, "draw_wait_s": 900.0, "drawn": 5e4}


def test_groups_slots_and_seconds_are_not_on_one_axis(tmp_path: Path) -> None:
    history = History(tmp_path)
    for second in range(3):
        history.take_metric(point("buffer", -1, float(second), **{f"buffer/{name}": v for name, v in GAUGES.items()}))
    charts = {chart["title"]: {line["name"] for line in chart["lines"]} for chart in all_charts(history)}
    assert charts == {
        "Groups in the buffer": {"ready", "under way"}, "Slots of admission": {"slots used", "slots total"},
    }  # fmt: skip
    run = RunFiles(tmp_path)
    for name, value in GAUGES.items():
        run.by_time[f"buffer/{name}"] = {"buffer": [(float(second), value) for second in range(3)]}
    text = "".join(speed_charts(run))
    assert ("Slots of admission" in text, "draw wait" in text, "drawn" in text) == (True, False, False)


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)


@given(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("source", "step", "wall_s", "values", "kind", "text", "data"), ODD)
    )
)
def test_lines_of_any_shape_do_no_harm(record: dict[str, Any]) -> None:
    history = History(Path("/nowhere"))
    history.take_metric(record)
    history.take_event(record)
    history.take_audit(record)
    all_charts(history)
    time_charts(history)
