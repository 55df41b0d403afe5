"""Megatron trains the same bits whether or not its memory leaves between steps (unmodified megatron-core, on the
CPU)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.harness.ports import held_port

from myxa.actors.backends.megatron.offload import rebuilds_params
from myxa.core.config import TrainerConfig
from myxa.core.config.learning import MegatronSettings
from myxa.core.device_memory import OPTIMIZER_PARTS

PROGRAM = Path(__file__).with_name("megatron_moving.py")
TIMEOUT_S = 120
OPTIMIZER = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}
GRPO = {"kind": "grpo", "batch_size": 6, "minibatches": 2}
BF16 = {"dtype": "bfloat16"}
CASES: list[dict[str, Any]] = [
    {"name": "rebuilt", "trainer": BF16, "policy": "auto"},
    {"name": "masters", "trainer": {"dtype": "float32"}, "policy": "auto"},
]


@pytest.fixture(scope="module")
def runs(
    model: Path, tmp_path_factory: pytest.TempPathFactory, ranks: Callable[..., list[tuple[int, str]]]
) -> Callable[[str], list[dict[str, Any]]]:
    """What two ranks told of a case, staying ("False") and moving ("True")."""
    out = tmp_path_factory.mktemp("moving")
    cases = [{**case, "ports": [held_port(), held_port()], "model": str(model)} for case in CASES]
    spec = {"out": str(out), "num_ranks": 2, "algo": GRPO, "optimizer": OPTIMIZER, "cases": cases}
    place = out / "spec.json"
    place.write_text(json.dumps(spec))
    ended = ranks(2, PROGRAM, str(place), timeout_s=TIMEOUT_S)
    for rank, (status, output) in enumerate(ended):
        assert status == 0, f"rank {rank} ended with {status}:\n{output[-3000:]}"
    return lambda name: [json.loads((out / name / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_moving_changes_nothing(name: str, runs: Callable[[str], list[dict[str, Any]]]) -> None:
    for told in runs(name):
        stays, moves = told["False"], told["True"]
        assert moves["metrics"] == stays["metrics"]
        assert moves["scores"] == stays["scores"]
        assert moves["weights"] == stays["weights"]
    assert any(runs(name)[0]["True"]["weights"])


def test_everything_is_built_in_the_region_of_its_tag(runs: Callable[[str], list[dict[str, Any]]]) -> None:
    moves = runs("rebuilt")[0]["True"]
    assert [tuple(region) for region in moves["regions"]] == [
        ("frozen", "backup"),
        ("params", "rematerialise"),
        ("grads", "discard"),
        ("masters", "backup"),
        ("optimizer", "backup"),
    ]
    assert moves["shrunk"] == ["frozen", "params", "grads", "masters", "optimizer"]
    assert ["params", "backup"] in runs("masters")[0]["True"]["regions"]
    assert moves["waits"] > 0, "moments came in behind the restore"
    assert set(moves["dirty"]) == {"params", "masters", *OPTIMIZER_PARTS}


def test_parameters_are_rebuilt_only_where_there_are_masters() -> None:
    bf16, float32 = TrainerConfig(dtype="bfloat16"), TrainerConfig(dtype="float32")
    assert rebuilds_params(MegatronSettings(), bf16)
    assert not rebuilds_params(MegatronSettings(distributed_optimizer=False), bf16)
    assert not rebuilds_params(MegatronSettings(), float32)
