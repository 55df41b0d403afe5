"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.harness.run_job import Job, make_job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path)
