"""Numbers and durations as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.launch.views.numbers import PLAIN, duration, short, sparkline

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
