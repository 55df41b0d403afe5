"""The example of tests/simulation/README.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).with_name("README.md")


def test_the_guides_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(compile(code.replace("seeds(200", "seeds(10"), str(GUIDE), "exec"), names)
    names["test_counter"]()
