"""`megatron.routing_replay = "rollout"`: tokens go to the experts that their samples name, and to no others, however the
model is cut; their log-probs are then those of transformers whose routers are made to choose alike.

Real processes over gloo. Experts are random, so no router would choose them by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.backends.test_megatron_model import MODELS, SIZES, make_folder
from tests.harness.ports import held_port

from myxa.actors.models.hf_folder import read_config
from myxa.core.samples import ExpertChoices, Sample
from myxa.transport.codec import Codec

PROGRAM = Path(__file__).with_name("routed_rank.py")
SEED = 20261129
MAX_ERROR = 1e-5
CASES: list[tuple[str, dict[str, Any]]] = [
    ("moe-mixed", {"ep": 2}),
    ("qwen2-moe", {"cp": 2}),
    ("glm4-moe", {"pp": 2, "vpp": 2}),
    ("deepseek", {"tp": 2, "sequence_parallel": True}),
]
pytestmark = pytest.mark.timeout(300)


def name_of(model: str, layout: dict[str, Any]) -> str:
    return "-".join([model, *layout])


def make_samples(choices: ExpertChoices) -> list[Sample]:
    """Of several lengths, one with a reply, one whose last tokens are a reply that no engine was asked about; the last
    one was demonstrated, so no engine chose anything."""
    rng = np.random.default_rng(SEED)
    found: list[Sample] = []
    for number in range(8):
        before, length = int(rng.integers(2, 9)), int(rng.integers(5, 12))
        mask = np.ones(length, np.uint8)
        mask[2 : 4 if number == 1 else 2] = 0
        mask[length - 2 :] = number != 2
        is_shown = number == 7
        num_told = before + int(np.flatnonzero(mask)[-1])
        shape = (num_told, len(choices.layers), choices.num_experts)
        ids = np.argsort(rng.random(shape), axis=-1)[..., : choices.top_k]
        found.append(
            Sample(
                group_id=number // 2, index=number % 2,
                prompt_ids=rng.integers(2, SIZES["vocab_size"], before).astype(np.int32),
                response_ids=rng.integers(2, SIZES["vocab_size"], length).astype(np.int32),
                logprobs=np.where(mask, -4.0, 0.0).astype(np.float32), loss_mask=mask,
                versions=np.where(mask, -1 if is_shown else 0, -1).astype(np.int32), finish="stop",
                experts=None if is_shown else choices.packed(ids),
            )
        )  # fmt: skip
    return found


def forced_scores(folder: Path, samples: list[Sample], choices: ExpertChoices, *, is_forced: bool) -> list[np.ndarray]:
    """float32 [R] each, 0 where nothing is learnt: transformers' log-probs, its routers choosing what samples name."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    free = torch.topk
    found: list[np.ndarray] = []
    for sample in samples:
        columns = np.flatnonzero(sample.loss_mask)
        ids = np.concatenate([sample.prompt_ids, sample.response_ids])[: len(sample.prompt_ids) + columns[-1]]
        told = None if sample.experts is None or not is_forced else choices.ids(sample.experts).astype(np.int64)
        layers = iter(range(len(choices.layers)))

        def topk(scores: torch.Tensor, k: int, told: Any = told, layers: Any = layers, **options: Any) -> Any:
            if scores.shape[-1] != choices.num_experts or told is None:
                return free(scores, k, **options)
            chosen = torch.from_numpy(told[:, next(layers)])
            return scores.gather(-1, chosen), chosen

        with patch.object(torch, "topk", topk), torch.no_grad():
            rows = torch.log_softmax(model(torch.from_numpy(ids).long()[None]).logits[0].double(), -1)
        assert told is None or next(layers, None) is None, "every layer chose what it was made to"
        row = np.zeros(len(sample.response_ids), np.float32)
        row[columns] = rows[len(sample.prompt_ids) + columns - 1, sample.response_ids[columns]].numpy()
        found.append(row)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    print(f"seed {SEED}")
    place = tmp_path_factory.mktemp("families")
    return {name: make_folder(place, name) for name, _ in CASES}


@pytest.fixture(scope="module")
def outcomes(
    folders: dict[str, Path], ranks: Callable[..., list[tuple[int, str]]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("routed")
    cases: list[dict[str, Any]] = []
    for model, layout in CASES:
        file = out / f"{model}.samples"
        made = make_samples(read_config(folders[model]).expert_choices)
        body, frames = Codec(list[Sample]).encode(made)
        file.write_bytes(msgspec.msgpack.encode([body, *map(bytes, frames)]))
        cases.append({
            "name": name_of(model, layout), "model": str(folders[model]), "samples": str(file), "port": held_port(),
            "megatron": {**layout, "routing_replay": "rollout"},
        })  # fmt: skip
    spec = {
        "out": str(out), "num_ranks": 2, "cases": cases, "optimizer": {"lr": 0.05},
        "algo": {"kind": "grpo", "batch_size": 8, "minibatches": 2},
    }  # fmt: skip
    (out / "spec.json").write_text(json.dumps(spec))
    for rank, (status, output) in enumerate(ranks(2, PROGRAM, str(out / "spec.json"), timeout_s=150)):
        assert status == 0, f"rank {rank} ended with {status}:\n{output}"
    return out


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_tokens_go_to_the_experts_that_their_engine_chose(
    model: str, layout: dict[str, Any], outcomes: Path, folders: dict[str, Path]
) -> None:
    assert model in MODELS
    results = [json.loads(path.read_text()) for path in sorted((outcomes / name_of(model, layout)).glob("rank*.json"))]
    assert len(results) == 2
    choices = read_config(folders[model]).expert_choices
    samples = make_samples(choices)
    right = forced_scores(folders[model], samples, choices, is_forced=True)
    free = forced_scores(folders[model], samples, choices, is_forced=False)
    together = {int(n): row for result in results for n, row in result["scores"].items()}
    assert sorted(together) == list(range(len(samples)))
    for number, row in together.items():
        np.testing.assert_allclose(row, right[number], rtol=0, atol=MAX_ERROR, err_msg=str(number))
    assert max(float(np.abs(a - b).max()) for a, b in zip(right, free, strict=True)) > 0.05, "or this proves nothing"
    for result in results:
        assert result["metrics"]["train/logprob_diff_abs_max"] == 0.0, "training passes choose what scoring ones do"
        assert result["metrics"]["train/grad_norm"] > 0
        assert result["moved"] > 1e-3, "it learns"
        assert "the engine told the experts of 0 of " in result["refusal"]
        assert "megatron.routing_replay = true" in result["refusal"], "what to do"
