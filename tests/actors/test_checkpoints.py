"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from myxa.actors.checkpoints import CheckpointOptions, Checkpoints


@pytest.mark.parametrize(("keep_last", "left"), [(1, [45]), (2, [45, 60]), (0, [45, 50, 60])])
def test_the_one_just_written_stays_whatever_a_life_before_left_there(
    tmp_path: Path, keep_last: int, left: list[int]
) -> None:
    """A run that went back to step 40 writes 45 beside 50 and 60 of the life that it left."""
    for version in (45, 50, 60):
        (tmp_path / f"version_{version:08d}").mkdir()
    nobody: Any = None
    options = CheckpointOptions(run_dir=str(tmp_path), every=15, keep_last=keep_last)
    kept = Checkpoints(nobody, options, nobody, nobody, nobody, nobody, nobody)
    kept._prune(tmp_path / "version_00000045")
    assert sorted(int(p.name.removeprefix("version_")) for p in tmp_path.iterdir()) == left
