"""What is run first on a GPU runs here too, over the stand-in: it must not be its own arguments that fail there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_the_self_check_holds_over_the_stand_in(
    bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["memory_selfcheck.py", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        bench("memory_selfcheck").main()
    assert ended.value.code == 0
    found = json.loads((tmp_path / "gpu.json").read_text())["memory_selfcheck"]
    assert {row[1] for row in found["checks"]} == {"holds"}
    assert len(found["checks"]) == 13
    assert found["cycles"][2]["out_gb_s"] > 0
