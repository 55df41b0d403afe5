"""`bench/agent_faults.py` at the size of CI: an environment that blocks, hangs and raises costs no step and no group."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from tests.harness.commands import Command

BENCH = Path(__file__).parents[2] / "bench" / "agent_faults.py"


@pytest.mark.timeout(240)
def test_d01_d02_d03_a_run_with_a_bad_environment_trains_all_its_steps_and_blames_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("agent_faults", BENCH)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "agent_faults", bench)
    spec.loader.exec_module(bench)
    wishes = {"steps": 6, "block": 30.0, "hang": 3600.0, "limit": 6.0, "max_block": 1.0, "env": 0.5}
    found = bench.run(tmp_path, **wishes, start=lambda words, folder, log: Command(words, folder, log=log))
    assert found.wrong(6) == []
