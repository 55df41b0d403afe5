"""The example of docs/simulation.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "simulation.md"


def test_the_guides_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(compile(code.replace("seeds(200", "seeds(30"), str(GUIDE), "exec"), names)
    names["test_counter"]()
