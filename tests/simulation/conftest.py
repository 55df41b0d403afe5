"""Simulated runs: the helpers beside the tests are importable, and the log is silent (it would be most of the time)."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Crashes are what these tests are about; tracebacks of them are formatted for nobody."""
    log = logging.getLogger("myxa")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    yield
    log.setLevel(before)
