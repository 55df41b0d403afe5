"""F3: charts of one unit, and pages that can be read on a phone and on a laptop."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from myxa.launch.views.report import speed_charts
from myxa.launch.views.run_files import RunFiles
from myxa.launch.web.history import History
from myxa.launch.web.state import all_charts

PACKAGE = Path(__file__).parents[2] / "launch"
GAUGES = {"ready": 3.0, "under_way": 8.0, "slots_used": 11.0, "slots_total": 64.0, "draw_wait_s": 900.0, "drawn": 5e4}


def test_f3_groups_slots_and_seconds_are_not_on_one_axis(tmp_path: Path) -> None:
    history = History(tmp_path)
    for second in range(3):
        values = {f"buffer/{name}": value for name, value in GAUGES.items()}
        history.take_metric({"source": "buffer", "step": -1, "wall_s": float(second), "values": values})
    charts = {chart["title"]: {line["name"] for line in chart["lines"]} for chart in all_charts(history)}
    assert charts == {
        "Groups in the buffer": {"ready", "under way"},
        "Slots of admission": {"slots used", "slots total"},
    }
    run = RunFiles(tmp_path)
    for name, value in GAUGES.items():
        run.by_time[f"buffer/{name}"] = {"buffer": [(float(second), value) for second in range(3)]}
    text = "".join(speed_charts(run))
    assert "Slots of admission" in text
    assert "draw wait" not in text
    assert "drawn" not in text


@pytest.mark.parametrize("file", ["web/style.css", "views/report_style.jinja"])
def test_f3_charts_keep_their_letters_on_a_narrow_screen(file: str) -> None:
    style = (PACKAGE / file).read_text()
    narrow = re.search(
        r"@media \(max-width: (\d+)px\) \{ \.chart \{ overflow-x: auto; \} \.chart svg \{ min-width: (\d+)px", style
    )
    assert narrow is not None
    widths = {
        int(w)
        for name in ("web/plots.js", "views/svg.py")
        for w in re.findall(r"WIDTH(?:, HEIGHT)? = (\d+)", (PACKAGE / name).read_text())
    }
    assert int(narrow[1]) > 400
    assert all(11 * int(narrow[2]) / width >= 9 for width in widths), f"drawn {widths} wide, with letters of 11"


def test_f3_a_button_is_one_line() -> None:
    style = (PACKAGE / "web/style.css").read_text()
    (rule,) = re.findall(r"^button \{([^}]*)\}", style, re.MULTILINE)
    assert "white-space: nowrap" in rule
