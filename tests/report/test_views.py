"""Numbers, names and findings: the pure parts of what people see."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.launch.views.findings import findings
from myxa.launch.views.numbers import PLAIN, duration, short, sparkline
from myxa.launch.views.run_files import RunFiles

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
    assert sparkline([0, 7]).encode("ascii", PLAIN) == b"_#"
    assert sparkline([3, 3, 3]) == "▅▅▅"
    assert sparkline([]) == sparkline([math.nan]) == ""
    assert len(sparkline(list(range(1000)), 30)) == 30


def run_with(*events: tuple[str, str], **series: list[float]) -> RunFiles:
    run = RunFiles(Path("x"))
    run.config = {"async": {"max_staleness": 2}}
    for name, values in series.items():
        for step, value in enumerate(values):
            metric = {name.replace("__", "/"): value}
            run.take_metric({"source": "trainer/0", "step": step, "wall_s": float(step), "values": metric})
    for kind, text in events:
        run.take_event({"source": "x", "wall_s": 0.0, "kind": kind, "text": text})
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
