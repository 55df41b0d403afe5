"""A planted run behind a real control socket; the planting lives in bench/, where people use it too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="session")
def planting() -> Iterator[ModuleType]:
    """`bench/planted_control.py`."""
    sys.path.append(str(BENCH))
    import planted_control  # pyright: ignore[reportMissingImports] - found by the line above

    yield planted_control
    sys.path.remove(str(BENCH))


@pytest.fixture
def seat(planting: ModuleType, tmp_path: Path):
    """A short planted run and the state behind its verbs."""
    return planting.plant_seat(tmp_path, num_steps=12)
