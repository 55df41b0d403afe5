"""Real runs of the real product that fail for reasons no exception tells of: what a person reads then."""

from __future__ import annotations

import sys

import pytest
from tests.harness.run_job import Job

from myxa.launch.first_failure import REPORT_LINES

pytestmark = pytest.mark.timeout(240)

ENOUGH_TO_IMPORT_KB = 2_500_000


def report_in(said: str) -> list[str]:
    """The report, and nothing of what was said before or after it."""
    lines = said.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("first failure: "))
    ends = ("small: failed after", "first failure: ")  # the latter where a run failed before all were up
    end = next(i for i in range(begin + 1, len(lines)) if lines[i].startswith(ends))
    assert end - begin <= REPORT_LINES, lines[begin:end]
    return lines[begin:end]


def test_a_filter_that_ends_its_process(job: Job) -> None:
    (job.folder / "mine.py").write_text("import os\n\n\ndef leaves(group):\n    os._exit(3)\n")
    code, said, _ = job.run("algo.group_filter=mine.py:leaves", "roles.buffer.max_restarts=0")
    assert code == 4, said
    report = report_in(said)
    assert report[0].startswith("first failure: buffer ended with exit status 3")
    assert report[1] == ("remedy: it ended without a word, so something in it called exit: a filter or a library")
    assert any("buffer serves as attempt 0" in line for line in report), "the end of its log"


@pytest.mark.soak
def test_an_engine_without_memory(job: Job) -> None:
    tight = job.folder / "tight_python"
    tight.write_text(f'#!/bin/sh\nulimit -v {ENOUGH_TO_IMPORT_KB}\nexec {sys.executable} "$@"\n')
    tight.chmod(0o755)
    code, said, _ = job.run(
        f'roles.rollout.python="{tight}"', "roles.rollout.max_restarts=0", "engine.max_running=4096"
    )
    assert code == 4, said
    report = report_in(said)
    assert report[0].startswith("first failure: rollout/0 ended with exit status 1")
    assert report[1].startswith("myxa: MemoryError: Unable to allocate")
    assert report[2].startswith("remedy: it ran out of memory: raise its limit")
    assert "engine.max_running" in report[2]
    assert any("actors/engines/embedded" in line for line in report), "where it was"
