"""Trainers on GPUs of a deterministic run: set before CUDA starts, so it can be seen without one. And what Megatron says
of a machine that has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from myxa.actors.models.tiny import make_tiny_model

PROGRAM = Path(__file__).with_name("kernels_rank.py")
CASES = [
    (kind, is_deterministic, device)
    for kind in ("torch", "megatron")
    for is_deterministic, device in ((True, "0"), (False, "0"), (True, "cpu"))
]


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, ranks: Callable[..., list[tuple[int, str]]]
) -> list[dict[str, Any]]:
    """By case, each in a process of its own; the last is of a Megatron trainer on the CPU that is set up."""
    folder = tmp_path_factory.mktemp("kernels")
    make_tiny_model(folder / "model", "0p5m")
    (folder / "data.jsonl").write_text('{"prompt": "a", "label": "a"}\n')
    (folder / "run.toml").write_text('[model]\npath = "model"\n[data]\ntrain = "data.jsonl"\n')
    rows = [
        [
            f"rollout.deterministic={str(strict).lower()}",
            f'roles.trainer.kind="{kind}"',
            f'roles.trainer.devices="{on}"',
        ]
        for kind, strict, on in CASES
    ]
    cases = [{"sets": sets} for sets in rows] + [{"sets": rows[-1], "begins": True}]
    (folder / "cases.json").write_text(json.dumps(cases))
    ended = ranks(len(cases), PROGRAM, str(folder / "run.toml"), str(folder / "cases.json"))
    assert [status for status, _ in ended] == [0] * len(cases), ended
    return [json.loads(said.splitlines()[-1]) for _, said in ended]


@pytest.mark.parametrize("case", CASES)
def test_kernels_of_a_deterministic_run(case: tuple[str, bool, str], found: list[dict[str, Any]]) -> None:
    kind, is_deterministic, device = case
    is_strict, cublas, nccl, mode = found[CASES.index(case)]["found"]
    on_gpus = is_deterministic and device == "0"
    assert (is_strict, cublas, nccl) == ((True, ":4096:8", "Ring") if on_gpus else (False, None, None))
    assert mode == (True if kind == "megatron" and is_deterministic else None)


def test_a_machine_without_cuda_is_refused_by_the_megatron_trainer(found: list[dict[str, Any]]) -> None:
    assert 'roles.trainer.kind = "torch"' in found[-1]["refusal"]
