"""The contract, asked of every engine of this machine and of the recorded answers of real servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.contract_subjects import OPTIONS, Scores, about_of, all_scenarios, kinds, make_versions, running

DEADLINE_S = 60.0
LIVE = ("embedded", "http")
RACES = {"requests_that_come_during_a_commit_are_answered"}
"""Scenarios whose requests cross a control call as chance will have it: they have no recording that would always fit."""
SCENARIOS = all_scenarios()


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_versions(tmp_path_factory.mktemp("models"))


def cases() -> Iterator[tuple[str, str]]:
    """Every engine with every scenario, but those that a recorded server could not serve (its about.json says why). Our
    own server is asked about pauses and weights only: the rest is said by the recorded ones, which are real."""
    for kind in kinds():
        left_out = about_of(kind)["left_out"] | (dict.fromkeys(RACES, "") if kind not in LIVE else {})
        if kind == "http":
            left_out |= {n: "" for n, run in SCENARIOS.items() if not run.__module__.endswith("contract_weights")}
        yield from ((kind, name) for name in SCENARIOS if name not in left_out)


@pytest.mark.parametrize(("kind", "name"), list(cases()))
async def test_contract(kind: str, name: str, versions: list[Path], judge: Scores, tmp_path: Path):
    async with asyncio.timeout(DEADLINE_S), running(kind, name, versions, tmp_path, judge) as subject:
        await SCENARIOS[name](subject)
    assert not [t.name for t in threading.enumerate() if t.name.startswith(OPTIONS.name)]
