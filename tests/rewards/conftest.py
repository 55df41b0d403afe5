"""A file of the user's own functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.rewards.world import call_here


@pytest.fixture
def write_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes mine.py; what its import adds to the path is gone after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(code: str) -> Path:
        file = tmp_path / "mine.py"
        file.write_text(code)
        return file

    return write


@pytest.fixture
def called_here(monkeypatch: pytest.MonkeyPatch) -> None:
    call_here(monkeypatch)
