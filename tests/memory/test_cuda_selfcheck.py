"""What is run first on a GPU runs here too, over the stand-in: it must not be its own arguments that fail there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "bench/gpu/memory_selfcheck.py"


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = {**os.environ, "OUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)


def test_the_self_check_holds_over_the_stand_in(tmp_path: Path):
    done = run(tmp_path, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())["memory_selfcheck"]
    assert {row[1] for row in found["checks"]} == {"holds"}
    assert len(found["checks"]) == 13
    assert found["cycles"][2]["out_gb_s"] > 0
