"""A reward model in the policy's place: its scores, gradients and folder against transformers' classifier."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.backends.gang_rank import Backends, held_out, make_shards, save, token_ids, weights_of
from tests.backends.test_critic import with_head
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from myxa.actors.backends.convert import convert
from myxa.actors.models.hf_folder import read_config
from myxa.actors.models.tiny import END_ID, PAD_ID
from myxa.core.errors import ModelError, TrainError
from myxa.core.samples import TrainShard

REWARD = {"kind": "reward", "center_coef": 0.05}
RECIPROCAL = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0, "max_grad_norm": 1e9}
"""The first update is g / (|g| + 1)."""


@pytest.fixture(scope="module")
def scorer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose head says something."""
    folder = tmp_path_factory.mktemp("scorer") / "hf"
    shutil.copytree(model, folder)
    with_head(folder, folder, "score.weight")
    return folder


def pairs(seed: int) -> TrainShard:
    """Without the pad token inside of texts, whose embedding gets no gradient in transformers."""

    def plain(ids: np.ndarray) -> np.ndarray:
        return np.where(ids == PAD_ID, 7, ids).astype(ids.dtype)

    (shard,) = make_shards(seed, kind="reward", max_tokens=150)
    samples = tuple(
        msgspec.structs.replace(one, prompt_ids=plain(one.prompt_ids), response_ids=plain(one.response_ids))
        for one in shard.samples
    )
    return msgspec.structs.replace(shard, samples=samples)


def theirs(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def exported(backend: Any, folder: Path) -> Any:
    backend.export_hf(str(folder))
    return theirs(folder)


def scores_by(judge: Any, shard: TrainShard) -> Tensor:
    """[S], in one padded batch."""
    rows = [torch.from_numpy(token_ids(one)).long() for one in shard.samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return judge(input_ids=ids, attention_mask=mask).logits.squeeze(-1)


def loss_of(scores_S: Tensor, shard: TrainShard) -> tuple[Tensor, Tensor, Tensor]:
    """As TRL's RewardTrainer has it; scores of better and worse answers."""
    better = {one.group_id: k for k, one in enumerate(shard.samples) if one.advantage > 0}
    worse = {one.group_id: k for k, one in enumerate(shard.samples) if one.advantage < 0}
    chosen, rejected = scores_S[[better[g] for g in better]], scores_S[[worse[g] for g in better]]
    loss = -logsigmoid(chosen - rejected).mean() + REWARD["center_coef"] * torch.mean((chosen + rejected) ** 2)
    return loss, chosen, rejected


def test_scores_loss_and_gradient_are_those_of_the_classifier(backends: Backends, scorer: Path, tmp_path: Path) -> None:
    backend = backends(folder=scorer, algo=REWARD, optimizer=RECIPROCAL)
    shard = pairs(81)
    judge, before = exported(backend, tmp_path / "before"), weights_of(backend)
    scores_S = scores_by(judge, shard)
    loss, chosen, rejected = loss_of(scores_S, shard)
    loss.backward()
    stats = backend.train(shard, {}).metrics
    assert stats["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert stats["train/rewards/chosen"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert stats["train/margin"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-5)
    assert stats["train/accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
    wanted = {name: parameter.grad for name, parameter in judge.named_parameters()}
    after = weights_of(backend)
    assert wanted.keys() == after.keys()
    for name, gradient in wanted.items():
        step = before[name].astype(np.float64) - after[name]
        np.testing.assert_allclose(step / (1 - np.abs(step)), gradient.numpy(), atol=2e-5, err_msg=name)


def test_held_out_pairs_are_compared_and_nothing_is_learnt(backends: Backends, scorer: Path, tmp_path: Path) -> None:
    one, other = (backends(folder=scorer, algo=REWARD, optimizer={"lr": 1e-2}) for _ in range(2))
    shard, held = pairs(85), pairs(86)
    wanted, chosen, rejected = loss_of(scores_by(exported(one, tmp_path / "before"), held), held)
    told = one.train(held_out(held), {}).metrics
    assert told["train/loss"] == pytest.approx(wanted.item(), abs=1e-6)
    assert told["train/accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert told["train/num_updates"] == 0
    for backend in (one, other):
        backend.train(shard, {})
    assert all(np.array_equal(value, weights_of(other)[name]) for name, value in weights_of(one).items())


def test_a_checkpoint_converts_to_what_is_exported_and_goes_on_to_the_bit(
    backends: Backends, model: Path, tmp_path: Path
) -> None:
    shards = [pairs(seed) for seed in (82, 83)]
    one = backends(algo=REWARD, optimizer={"lr": 1e-2})
    one.train(shards[0], {})
    save(one, str(tmp_path / "checkpoint"), {"version": 1})
    convert(tmp_path / "checkpoint", model, tmp_path / "converted")
    judge = exported(one, tmp_path / "exported")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "converted" / name).read_bytes() == (tmp_path / "exported" / name).read_bytes(), name
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["pad_token_id"] == PAD_ID
    assert judge.config.num_labels == 1
    other = backends(algo=REWARD, optimizer={"lr": 1e-2})
    other.load(str(tmp_path / "checkpoint"))
    a, b = (backend.train(shards[1], {}).metrics["train/loss"] for backend in (one, other))
    assert a == b
    assert all(np.array_equal(value, weights_of(other)[name]) for name, value in weights_of(one).items())
    policy = backends()
    with pytest.raises(TrainError, match="is_scorer is True"):
        policy.load(str(tmp_path / "checkpoint"))


def test_a_reward_model_is_trained_on_and_is_no_policy(backends: Backends, model: Path, tmp_path: Path) -> None:
    shard = pairs(84)
    first = backends(algo=REWARD, optimizer={"lr": 1e-2})
    first.train(shard, {})
    judge = exported(first, tmp_path / "rm")
    assert read_config(tmp_path / "rm").is_scorer
    loss, _, _ = loss_of(scores_by(judge, shard), shard)
    again = backends(folder=tmp_path / "rm", algo=REWARD)
    assert again.train(shard, {}).metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
    with pytest.raises(ModelError, match="scores texts"):
        backends(folder=tmp_path / "rm")


def test_a_pad_token_that_ends_texts_is_not_named(backends: Backends, model: Path, tmp_path: Path) -> None:
    """transformers would score a text at the token before its end."""
    shutil.copytree(model, tmp_path / "model")
    place = tmp_path / "model" / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "pad_token_id": END_ID}))
    judge = exported(backends(folder=tmp_path / "model", algo=REWARD), tmp_path / "rm")
    assert judge.config.pad_token_id is None


def test_a_head_of_several_classes_is_refused(backends: Backends, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    with_head(model, tmp_path / "model", "score.weight", rows=3)
    with pytest.raises(ModelError, match="score.weight has shape"):
        backends(folder=tmp_path / "model", algo=REWARD)
