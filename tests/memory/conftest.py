"""Devices for the tests of memory: a driver library that is Linux's memory, and our allocator compiled against nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.memory.standin_gpu import StandinGpu, build

from myxa.memory.arenas.segment_table import built


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="session")
def allocator_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    built(folder)
    return folder


@pytest.fixture
def gpu(standin_library: Path, tmp_path: Path):
    """Whoever uses it leaves nothing on it and breaks none of the driver's rules."""
    gpu = StandinGpu(standin_library, tmp_path)
    yield gpu
    assert gpu.broken_rule() == ""
    assert gpu.live() == {}


@pytest.fixture
def cache_dir(allocator_cache: Path, tmp_path: Path) -> Path:
    """The compiled allocator, at a path of its own: with a table of its own."""
    return Path(shutil.copytree(allocator_cache, tmp_path / "native"))
