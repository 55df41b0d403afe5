"""Megatron-core's groups over proxies: `initialize_model_parallel` unchanged, losses equal to the bit after reloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.memory.comm_gang import WORLD, run_gangs

from myxa.memory.communicators.proxy_build import load

PROGRAM = Path(__file__).with_name("comm_megatron.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    load()
    return run_gangs(["dense,experts"], tmp_path_factory.mktemp("megatron"), program=PROGRAM)["dense"]


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_training_over_reloaded_groups_is_training(found: list[dict[str, Any]], name: str):
    """The program compares plain gloo, proxies, and proxies reloaded after every step; here: that it trained."""
    told = [facts[name]["losses"] for facts in found if facts[name]["losses"][0]]
    assert len(told) == WORLD // 2, "the ranks of the last stage tell losses"
    for losses in told:
        assert losses[-1] != losses[0]
    assert all(facts[name][f"{name} groups"] > 10 for facts in found), "Megatron makes many groups"
