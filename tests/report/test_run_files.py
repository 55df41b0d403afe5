"""The past of a run out of its files: whole, torn, or read on while they grow; bounded, whatever is in them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxa.launch.views.page_data import past_table, state_table
from myxa.launch.views.run_files import JsonTail, RunFiles, Series, TimeShares
from myxa.launch.views.run_view import RunView, run_view_of_files


def point(source: str, step: int, wall_s: float, **values: float) -> dict[str, Any]:
    named = {k.replace("__", "/"): v for k, v in values.items()}
    return {"source": source, "step": step, "wall_s": wall_s, "values": named}


def told(source: str, kind: str, text: str, wall_s: float = 1.0) -> dict[str, Any]:
    return {"source": source, "wall_s": wall_s, "kind": kind, "text": text}


@given(st.integers(1, 3000))
def test_a_series_is_bounded_and_keeps_its_sum_and_its_peaks(num: int) -> None:
    rng = random.Random(num)
    values = [rng.gauss(0, 1) for _ in range(num)]
    series = Series(limit=50)
    for x, y in enumerate(values):
        series.put(float(x), 100.0 + x, y)
    points = series.points
    assert len(points) <= 51
    assert series.steps() == sorted(series.steps())
    assert (series.newest.x, series.walls()[-1]) == (num - 1, 99.0 + num)
    assert (min(p.low for p in points), max(p.high for p in points)) == (min(values), max(values))
    assert sum(p.total for p in points) == pytest.approx(sum(values))


def test_a_step_that_is_trained_again_replaces_what_came_after_it() -> None:
    series = Series()
    for step in [*range(10), *range(5, 8)]:
        series.put(step, 0.0, 1.0 if (series.points and step == series.newest.x + 1) or step == 0 else 2.0)
    assert [(p.x, p.mean) for p in series.points] == [*((s, 1.0) for s in range(5)), (5, 2.0), (6, 1.0), (7, 1.0)]
    series.put(7, 0.0, 3.0)
    assert series.newest.mean == 2.0, "several engines report one step: their mean"
    series.put(7, 0.0, 5.0, replaces=True)
    assert (series.newest.x, series.newest.mean) == (7, 5.0), "a version that is evaluated again"


def test_gauges_of_several_sources_are_summed_however_long_the_run(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    for second in range(3000):
        for source, rate in (("rollout/0", 100.0), ("rollout/1", 50.0)):
            run.take_metric(point(source, second // 100, 50.0 + second, rollout__tokens_per_s=rate))
    points = run.summed("rollout/tokens_per_s")
    assert len(points) <= 161
    assert {value for _, value in points[:-1]} == {150.0}
    assert 50 <= points[0][0] <= points[-1][0] <= 3080
    assert run.last("rollout/tokens_per_s") == 150.0


def test_shares_are_spread_over_the_time_in_which_they_were_spent_and_survive_a_restart() -> None:
    times = TimeShares(limit=20)
    times.put(100.0, {"compute": 0.0, "wait-data": 0.0})
    times.put(110.0, {"compute": 10.0, "wait-data": 0.0, "compute/train": 10.0})
    times.put(112.0, {"compute": 0.0, "wait-data": 1.0})  # began anew a second before
    times.put(116.0, {"compute": 2.0, "wait-data": 3.0})
    assert times.stretches() == [
        (100.0, 110.0, {"compute": 1.0, "wait-data": 0.0}),
        (111.0, 112.0, {"compute": 0.0, "wait-data": 1.0}),
        (112.0, 116.0, {"compute": 0.5, "wait-data": 0.5}),
    ]
    assert times.shares() == pytest.approx({"compute": 12 / 15, "wait-data": 3 / 15, "compute/train": 10 / 15})
    for second in range(1000):
        times.put(117.0 + second, {"compute": 3.0 + second, "wait-data": 3.0})
    found = times.stretches()
    assert len(found) <= 20 and (found[0][0], found[-1][1]) == (100.0, 1116.0)
    assert all(sum(shares.values()) == pytest.approx(1.0) for _, _, shares in found)
    assert sum(end_s - begin_s for begin_s, end_s, _ in found) == pytest.approx(1016.0, abs=1.1)


def test_a_tail_reads_on_where_it_stopped_and_keeps_torn_lines_for_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonTail(path)
    assert (tail.read(), list(tail.notes("points"))) == ([], ["metrics.jsonl is missing"])
    path.write_text('{"a": 1}\n{"a"')
    assert tail.read() == [{"a": 1}]
    with path.open("a") as file:
        file.write(': 2}\ngarbage\n[1]\n\n{"a": 3}\n{"a": 4')
    assert tail.read() == [{"a": 2}, {"a": 3}]
    assert (tail.unfinished_line(), tail.num_bad) == ([], 3), "the run is over, and its last line does not end"
    assert JsonTail(path, last_bytes=12).read() == [], "a glance begins at a whole line"
    path.write_text('{"a": 5}\n')
    assert tail.read() == [{"a": 5}], "a file that shrank is read anew"


def test_a_growing_run_becomes_tables(seat) -> None:
    run = RunFiles(seat.run_dir)
    assert run.read()
    assert not run.read()
    past = past_table(run)
    wanted = {
        p["step"]: p["values"]["reward/raw_mean"]
        for p in map(json.loads, (seat.run_dir / "metrics.jsonl").read_text().splitlines())
        if "reward/raw_mean" in p["values"]
    }
    rows = {(metric, source): (past["axes"][axis], values) for metric, source, axis, values, *_ in past["series"]}
    (steps, _), values = rows["reward/raw_mean", "buffer"]
    assert dict(zip(steps, values, strict=True)) == pytest.approx(wanted, rel=1e-5)
    assert {source for metric, source in rows if metric == "rollout/running"} == {"", "rollout/0", "rollout/1"}
    assert [source for metric, source in rows if metric == "train/loss"] == ["trainer/0"]
    assert past["bound"] == [(1.0, 2.0), (3.0, 2.0), (3.0, 4.0), (9.0, 4.0), (9.0, 2.0), (12.0, 2.0)]
    assert [change["what"] for change in past["changes"]][:2] == ["max_staleness 2 -> 4", "temperature 1 -> 0.9"]
    assert past["lanes"][0]["actor"] == "trainer/0"
    for lane in past["lanes"]:
        assert all(sum(shares) == pytest.approx(1.0, abs=0.01) for _, _, *shares in lane["bins"])


def test_lanes_are_named_by_the_gpus_of_their_role(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[roles.trainer]\ndevices = "0"\n[roles.rollout]\ndevices = "cpu"\n')
    run = RunFiles(tmp_path)
    run.read()
    for actor in ("trainer/0", "rollout/0"):
        run.take_metric(point(actor, -1, 5.0, time__compute=1.0))
    assert [(lane["actor"], lane["devices"]) for lane in past_table(run)["lanes"]] == [
        ("trainer/0", "GPU 0"), ("rollout/0", ""),
    ]  # fmt: skip


def test_of_several_ranks_one_is_shown(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    for step in range(3):
        for rank in range(2):
            run.take_metric(point(f"trainer/{rank}", step, 5.0 + step, train__loss=float(rank)))
    assert run.steps("train/loss") == {0: 0.0, 1: 0.0, 2: 0.0}
    assert run.reported == [(5.0, 0), (6.0, 1), (7.0, 2)]
    assert len(past_table(run)["series"]) == 1


def test_f1_a_run_is_as_fast_as_its_steps_of_late_and_time_between_two_lives_does_not_count(tmp_path: Path) -> None:
    """F1."""
    run, wall_s = RunFiles(tmp_path), 0.0
    assert run.step_s is None
    for steps, step_s in ((range(60), 1.0), (range(55, 90), 10.0), (range(85, 110), 10.0)):
        wall_s += 3600.0
        for step in steps:
            wall_s += step_s
            run.take_metric(point("trainer/0", step, wall_s, train__loss=1.0))
    assert run.step_s == pytest.approx(10.0)


def test_names_sources_and_events_are_bounded_and_routine_does_not_bury_the_event_that_counts(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    run.take_event(told("a", "engine-gone", "rollout/1 is gone"))
    for n in range(3000):
        run.take_metric(point(f"s{n}", n, 5.0, **{f"train__{n}": 1.0, "time__compute": 1.0}))
        run.take_event(told("a", "weights-adopted", f"serves {n}", 2.0 + n))
    for n in range(2000):
        run.take_event(told("a", f"k{n}", "x" * 9999))
    assert len(run.series) <= 2048
    assert len(run.times) <= 256
    assert len(run.event_counts) <= 128
    assert run.event_counts["weights-adopted"] == 3000
    shown = past_table(run)["events"]
    assert len(shown) <= 600
    assert "rollout/1 is gone" in {event["text"] for event in shown}
    assert "serves 2999" in {event["text"] for event in shown}


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)
KEYS = ("source", "step", "wall_s", "values", "kind", "text", "data")


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, ODD)))
def test_lines_of_any_shape_do_no_harm(record: dict[str, Any]) -> None:
    run = RunFiles(Path("/nowhere"))
    run.take_metric(record)
    run.take_event(record)
    run.take_audit(record)
    json.dumps(past_table(run))
    json.dumps(state_table(run_view_of_files(run), run))


def test_groups_are_counted_by_lag_over_all_steps_and_one_above_the_bound_is_marked(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("async = { max_staleness = 1 }\n")
    run = RunFiles(tmp_path)
    run.read()
    for step in (1, 2):
        run.take_metric(point("trainer/0", step, float(step), train__loss=1.0, lag_hist__0=4.0, lag_hist__2=3.0 * step))
    lags = state_table(RunView(now_wall_s=2.0, started_wall_s=0.0), run)["lags"]
    assert [tuple(lag.values()) for lag in lags] == [(0, 8.0, True), (1, 0.0, True), (2, 9.0, False)]
