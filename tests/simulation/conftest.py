"""Simulated runs: the helpers beside the tests are importable, and the log is silent (it would be most of the time)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Crashes are what these tests are about; tracebacks of them are formatted for nobody."""
    log = logging.getLogger("myxa")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    yield
    log.setLevel(before)
