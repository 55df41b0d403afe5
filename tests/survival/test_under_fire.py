"""Random kills: the demo reaches the same reward while an actor is killed every ten seconds, in at most 1.6 times the
time. That takes minutes per seed, so only `make soak` does it (`bench/under_fire.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "under_fire.py"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_demo_learns_under_fire(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seeds", "3"],
        capture_output=True, text=True, timeout=3500, check=False, cwd=tmp_path,
    )  # fmt: skip
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
