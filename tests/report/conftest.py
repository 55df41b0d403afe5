"""A planted run directory; the planting lives in bench/, where people use it too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tests.harness.scripts import loaded


@pytest.fixture(scope="session")
def planter() -> ModuleType:
    return loaded("bench/planted_run.py")


@pytest.fixture(scope="session")
def plant_run(planter: ModuleType) -> Callable[..., Path]:
    return planter.plant_run


@pytest.fixture(scope="session")
def planted(plant_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 40 steps; read only."""
    return plant_run(tmp_path_factory.mktemp("runs") / "sort-1", num_steps=40)
