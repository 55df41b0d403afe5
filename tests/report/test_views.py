"""Numbers, text plots, charts and findings: the pure parts of what people see."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.launch.views.numbers import duration, short
from myxa.launch.views.report import findings
from myxa.launch.views.run_files import EventRow, RunFiles, SpanRow
from myxa.launch.views.svg import (
    ChartLine,
    actor_order,
    bar_chart,
    line_chart,
    moving_mean,
    nice_ticks,
    thinned,
    timeline,
)
from myxa.launch.views.textplot import plot, sparkline

FLOATS = st.floats(min_value=-1e12, max_value=1e12, allow_nan=False)


SHORT = {
    0.0: "0", 0.04123: "0.0412", 1.5: "1.5", 100.0: "100", 9999.0: "9999", 12345.0: "12.3k", 999_999.0: "1M", 4.1e6: "4.1M",
    2.5e9: "2.5G", 3.21e-5: "3.2e-5", -0.25: "-0.25", None: "-", math.nan: "nan", math.inf: "inf",
}  # fmt: skip
DURATIONS = {
    0.0: "0 s", 0.85: "850 ms", 12.34: "12.3 s", 50.0: "50 s", 59.97: "1 min 00 s", 245.0: "4 min 05 s",
    7620.0: "2 h 07 min", 3e5: "3 d 11 h", -1.0: "-", math.nan: "-",
}  # fmt: skip


def test_short_numbers_and_durations() -> None:
    assert {value: short(value) for value in SHORT} == SHORT
    assert {seconds: duration(seconds) for seconds in DURATIONS} == DURATIONS


@given(FLOATS)
@settings(deadline=None)
def test_a_short_number_is_short_and_near(value: float) -> None:
    text = short(value)
    assert len(text) <= 9
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert float(text.rstrip("kMGT")) * scale == pytest.approx(value, rel=0.06, abs=1e-300)


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 7], is_ascii=True) == "_#"
    assert sparkline([3, 3, 3]) == "▅▅▅"
    assert sparkline([]) == sparkline([math.nan]) == ""
    assert len(sparkline(list(range(1000)), 30)) == 30


@given(
    st.dictionaries(st.integers(0, 10_000), FLOATS, max_size=60), st.booleans(), st.integers(1, 90), st.integers(1, 20)
)
@settings(max_examples=60, deadline=None)
def test_a_plot_fits_its_frame_whatever_the_curve(
    curve: dict[int, float], is_ascii: bool, width: int, height: int
) -> None:
    lines = plot(curve, width=width, height=height, is_ascii=is_ascii)
    assert bool(lines) == bool(curve)
    if lines:
        assert len(lines) == max(height, 3) + 2
        assert max(len(line) for line in lines) <= max(width, 16) + 12
        if is_ascii:
            "\n".join(lines).encode("ascii")


def test_a_plot_shows_the_shape_and_the_marks() -> None:
    lines = plot({0: 0.0, 50: 0.0, 100: 1.0}, {0: 0.5}, width=20, height=5, is_ascii=True)
    assert lines[0].rstrip().endswith("*")
    assert lines[0].startswith("  1 |")
    assert lines[2].startswith("0.5 |o")
    assert lines[4].startswith("  0 |****")
    assert lines[-1].split() == ["0", "step", "100"]


def test_a_flat_curve_is_labelled_with_its_value_alone() -> None:
    lines = plot({0: 0.25, 9: 0.25}, width=10, height=4, is_ascii=True)
    assert [line.partition("|")[0].strip() for line in lines[:4]].count("0.25") == 1
    assert next(line for line in lines if line.startswith("0.25")).endswith("*" * 10)


@given(FLOATS, FLOATS, st.integers(1, 9))
@settings(deadline=None)
def test_ticks_are_round_few_and_inside(low: float, high: float, num: int) -> None:
    ticks = nice_ticks(low, high, num)
    assert 1 <= len(ticks) <= max(num + 1, 1) or high <= low or high - low < 1e-9
    if high - low > 1e-6 * max(abs(low), abs(high), 1e-300) and high > low:
        slack = (high - low) * 1e-6
        assert all(low - slack <= tick <= high + slack for tick in ticks)


def test_thinning_keeps_every_peak() -> None:
    rng = random.Random(3)
    points = [(float(x), rng.random()) for x in range(10_000)]
    points[7777] = (7777.0, 50.0)
    points[1234] = (1234.0, -50.0)
    kept = thinned(points, 400)
    assert len(kept) <= 402
    assert {points[0], points[-1], points[7777], points[1234]} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(points[:50], 400) == points[:50]


def test_the_moving_mean_keeps_length_and_level() -> None:
    points = [(float(x), 5.0 + (x % 2)) for x in range(240)]
    smooth = moving_mean(points)
    assert [x for x, _ in smooth] == [x for x, _ in points]
    assert all(abs(y - 5.5) < 0.06 for _, y in smooth)


def svg_of(markup: str) -> ET.Element:
    return ET.fromstring(markup).find("svg")  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    "points",
    [
        [(0.0, 1.0)],
        [(0.0, 0.0), (1.0, 0.0)],
        [(5.0, 1e-12), (6.0, 2e-12)],
        [(0.0, -1e12), (1.0, 1e12)],
        [(float(x), math.sin(x)) for x in range(5000)],
    ],
)
def test_a_line_chart_stays_inside_its_box(points: list[tuple[float, float]]) -> None:
    svg = svg_of(line_chart("t", [ChartLine("a <b>", points, is_noisy=True), ChartLine("empty", [])]))
    lines = svg.findall("polyline")
    assert lines
    for line in lines:
        corners = [corner.split(",") for corner in line.attrib["points"].split()]
        assert all(0 <= float(x) <= 560 and 0 <= float(y) <= 210 for x, y in corners)
    assert line_chart("t", []) == line_chart("t", [ChartLine("a", [])]) == ""


def test_bars_are_as_high_as_their_values() -> None:
    svg = svg_of(bar_chart("t", {"0": 10.0, "1": 5.0, "2": 0.0}))
    heights = [float(rect.attrib["height"]) for rect in svg.findall("rect")]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    assert heights[2] == 0
    assert bar_chart("t", {}) == bar_chart("t", {"a": 0.0}) == ""


def rects(markup: str) -> list[tuple[str, float, float]]:
    found = [rect.attrib for rect in svg_of(markup).findall("rect")]
    return [(rect["class"], float(rect["x"]), float(rect["width"])) for rect in found]


def test_a_timeline_of_few_spans_shows_each_in_its_place() -> None:
    spans = {"trainer/0": [SpanRow(100.0, 5.0, "compute", "train"), SpanRow(105.0, 5.0, "wait-data", "claim")]}
    markup = timeline("t", spans, start_s=100.0, end_s=110.0, origin_s=100.0)
    (a, left, wide), (b, right, _) = rects(markup)
    assert (a, b) == ("k-compute", "k-wait-data")
    assert right == pytest.approx(left + wide)
    assert "wait-data (claim), 5 s from 5 s" in markup


def test_a_timeline_of_many_spans_shows_what_fills_most_of_each_column() -> None:
    spans = [SpanRow(index * 0.01, 0.009 if index < 50_000 else 0.002, "compute", "x") for index in range(100_000)]
    waits = [SpanRow(index * 0.01 + 0.002, 0.008, "wait-data", "y") for index in range(50_000, 100_000)]
    rows = {"rollout/0": sorted([*spans, *waits], key=lambda span: span.start_s)}
    drawn = rects(timeline("t", rows, start_s=0.0, end_s=1000.0, origin_s=0.0))
    assert [kind for kind, _, _ in drawn] == ["k-compute", "k-wait-data"]
    assert drawn[0][2] == pytest.approx(drawn[1][2], rel=0.02)


def test_a_timeline_hides_actors_beyond_its_limit_and_says_so() -> None:
    spans = {f"rollout/{index}": [SpanRow(0.0, 1.0, "compute", "")] for index in range(40)}
    markup = timeline("t", spans, start_s=0.0, end_s=1.0, origin_s=0.0)
    assert "8 more actors are not shown" in markup
    assert timeline("t", spans, start_s=5.0, end_s=6.0, origin_s=0.0) == ""
    assert sorted(["monitor", "rollout/10", "rollout/2", "trainer/0", "zebra"], key=actor_order) == [
        "trainer/0", "rollout/2", "rollout/10", "monitor", "zebra",
    ]  # fmt: skip


def run_with(*events: tuple[str, str], **series: list[float]) -> RunFiles:
    run = RunFiles(Path("x"), config={"async": {"max_staleness": 2}})
    for name, values in series.items():
        metric = name.replace("__", "/")
        run.by_step[metric] = {"trainer/0": dict(enumerate(values))}
        run.by_time[metric] = {"trainer/0": [(float(step), value) for step, value in enumerate(values)]}
    run.events = [EventRow(0.0, "x", kind, text) for kind, text in events]
    return run


SICK: list[tuple[str, str, RunFiles]] = [
    ("red", "train/loss is nan", run_with(("non-finite", "train/loss is nan at step 3"))),
    ("red", "Lag 3 at step 1", run_with(lag__max=[1, 3, 2])),
    ("amber", "max_staleness was changed", run_with(("knob", "max_staleness = 4"), lag__max=[3])),
    ("amber", "0.2 nats", run_with(train__logprob_diff_abs_mean=[0.01] * 8 + [0.2] * 2)),
    ("red", "0.5 nats", run_with(train__logprob_diff_abs_mean=[0.5])),
    ("amber", "75 % of the groups", run_with(reward__zero_std_groups=[24.0], batch__num_groups=[32.0])),
    (
        "amber",
        "80 % all wrong, 10 % all right",
        run_with(
            reward__zero_std_groups=[90.0], reward__finished_groups=[100.0], reward__all_wrong=[0.8],
            reward__all_right=[0.1], batch__num_groups=[10.0],
        ),
    ),
    ("amber", "40 % of the samples", run_with(batch__truncated_fraction=[0.4])),
    ("amber", "from 0.9 to 0.1", run_with(reward__mean=[0.1] * 5 + [0.9] * 10 + [0.1] * 10)),
    ("amber", "from 2 to 0.001", run_with(train__entropy=[2.0] * 8 + [0.001] * 8)),
    ("amber", "9 groups", run_with(**{"buffer/dropped/stale": [3.0, 9.0], "batch__num_groups": [10.0, 10.0]})),
    ("amber", "Telemetry is incomplete", run_with(("sink-disabled", "sink x failed"))),
]  # fmt: skip


@pytest.mark.parametrize(("level", "says", "run"), SICK, ids=[says for _, says, _ in SICK])
def test_a_sick_run_is_found_out(level: str, says: str, run: RunFiles) -> None:
    found = findings(run)
    assert [finding.level for finding in found] == [level]
    assert says in found[0].text


def test_a_healthy_run_has_no_findings() -> None:
    rising = [min(0.95, index / 50) for index in range(100)]
    run = run_with(
        reward__mean=rising,
        lag__max=[2.0] * 100,
        train__entropy=[2.0 - value for value in rising],
        train__logprob_diff_abs_mean=[0.01] * 100,
        reward__zero_std_groups=[8.0] * 100,
        batch__num_groups=[32.0] * 100,
        batch__truncated_fraction=[0.01] * 100,
        **{"buffer/dropped/zero-variance": [900.0]},
    )
    assert findings(run) == []
    assert findings(RunFiles(Path("x"))) == []


def test_no_view_writes_numbers_that_svg_does_not_know() -> None:
    markup = line_chart("t", [ChartLine("a", [(0.0, 1e-300), (1.0, 1e300)])], bound=("b", 5.0))
    assert not re.search(r"nan|inf", str(markup).partition("<svg")[2].replace("in 2 points", ""))
