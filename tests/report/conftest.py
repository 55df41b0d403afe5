"""A planted run directory; the planting lives in bench/, where people use it too."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def planter() -> ModuleType:
    """`bench/planted_run.py`."""
    path = Path(__file__).parents[2] / "bench" / "planted_run.py"
    spec = importlib.util.spec_from_file_location("planted_run", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def plant_run(planter: ModuleType) -> Callable[..., Path]:
    return planter.plant_run


@pytest.fixture(scope="session")
def planted(plant_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 40 steps; read only."""
    return plant_run(tmp_path_factory.mktemp("runs") / "sort-1", num_steps=40)
