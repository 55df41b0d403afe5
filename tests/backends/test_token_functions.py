"""A loss and a weight of the user's own on one rank: one that is a built-in's trains the same bits; one that is wrong is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.backends.gang_rank import Backends, make_shards, same, weights_of

from myxa.core.errors import ConfigError, UserCodeError
from myxa.core.samples import TrainShard

EXAMPLE = (Path(__file__).parents[2] / "examples" / "own_algorithm.py").read_text()
WRONG = """
import torch

def raises(tokens):
    return tokens.live_T[tokens.missing]

def stacks(tokens):
    return torch.stack([tokens.live_T, tokens.live_T[:-1]])

def mean(tokens):
    return tokens.live_T.mean()

def detached(tokens):
    return tokens.live_T.detach()

def nan(tokens):
    return torch.where(tokens.segments.sample_T == 0, tokens.live_T, tokens.live_T * torch.inf)

def number(tokens):
    return 0.5

def whole(tokens):
    return torch.ones_like(tokens.live_T, dtype=torch.int64)

def metric(tokens):
    return tokens.live_T, {"kl": tokens.live_T.mean()}

def names(tokens):
    return tokens.live_T, ["kl"]

def complex_keep(tokens):
    return tokens.live_T, tokens.live_T.to(torch.complex64)

async def later(tokens):
    return tokens.live_T
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mine.py"
    file.write_text(EXAMPLE)
    return file


ALGOS = [
    {"batch_size": 6, "minibatches": 3, "entropy_coef": 1e-30},
    {"batch_size": 6, "minibatches": 2, "kl_coef": 0.1, "correction": "mis", "veto": 0.2, "reduction": "rollout"},
]


@pytest.mark.parametrize("algo", ALGOS, ids=["decoupled", "mis"])
def test_the_example_trains_the_bits_of_the_built_in_loss(backends: Backends, mine: Path, algo: dict[str, Any]) -> None:
    results = []
    for extra in ({}, {"loss_fn": f"{mine}:loss"}):
        backend = backends(algo={**algo, **extra}, optimizer={"lr": 0.02, "eps": 1e-4})
        for seed in (31, 32):
            (shard,) = make_shards(seed, minibatches=algo["minibatches"])
            metrics = backend.train(shard, {}).metrics
        results.append((metrics, weights_of(backend)))
    (built_in, weights), (own, own_weights) = results
    assert same(weights, own_weights)
    assert 0 < built_in["train/clip_fraction"] <= own.pop("train/user/bounded") < 1
    differing = {name for name in built_in if own[name] != built_in[name]}
    assert {n for n in differing if not n.endswith(("_s", "/tokens_per_s"))} == {"train/clip_fraction"}


@pytest.mark.parametrize("algo", ALGOS[:1], ids=["decoupled"])
def test_the_example_weighs_as_the_built_in_correction(backends: Backends, mine: Path, algo: dict[str, Any]) -> None:
    (shard,) = make_shards(31, minibatches=algo["minibatches"])
    mine.write_text(f"{EXAMPLE}\ndef half(tokens):\n    return weight(tokens), tokens.segments.sample_T % 2 == 0\n")
    results = []
    for extra in ({}, {"weight_fn": f"{mine}:weight"}, {"weight_fn": f"{mine}:half"}):
        backend = backends(algo={**algo, **extra, "tis_cap": 1.5}, optimizer={"lr": 0.02, "eps": 1e-4})
        results.append((backend.train(shard, {}).metrics, weights_of(backend)))
    (built_in, weights), (own, own_weights), (half, other_weights) = results
    assert same(weights, own_weights)
    assert own["train/weight"] == built_in["train/weight"] < 1.5
    assert (
        built_in["train/weight_cut_fraction"] > 0 == own["train/removed_fraction"] < half["train/removed_fraction"] < 1
    )
    assert not same(weights, other_weights)


def test_advantages_per_token_reach_the_loss(backends: Backends) -> None:
    """The same number for every token is the sample's; others are not, and tokens outside the loss do not count."""

    def with_rows(shard: TrainShard, row: Callable[[Any], np.ndarray]) -> TrainShard:
        samples = tuple(msgspec.structs.replace(s, token_advantages=row(s)) for s in shard.samples)
        return msgspec.structs.replace(shard, samples=samples)

    (shard,) = make_shards(31)
    rows: list[Callable[[Any], np.ndarray]] = [
        lambda s: np.where(s.loss_mask, s.advantage, 99.0).astype(np.float32),
        lambda s: (s.advantage * np.linspace(0, 2, len(s.loss_mask))).astype(np.float32),
    ]
    results = []
    for given in (shard, with_rows(shard, rows[0]), with_rows(shard, rows[1])):
        backend = backends(algo={"entropy_coef": 1e-30}, optimizer={"lr": 0.01, "eps": 1e-4})
        backend.train(given, {})
        results.append(weights_of(backend))
    scalar, alike, other = results
    assert same(scalar, alike)
    assert not same(scalar, other)


def test_a_sample_is_left_out_only_if_no_token_of_it_counts(backends: Backends) -> None:
    (shard,) = make_shards(31)
    (at, *_) = [i for i, s in enumerate(shard.samples) if s.advantage == 0 and s.loss_mask.sum() > 1]
    row = np.zeros(len(shard.samples[at].loss_mask), np.float32)
    row[np.flatnonzero(shard.samples[at].loss_mask)[:2]] = 1, -1
    samples = list(shard.samples)
    samples[at] = msgspec.structs.replace(samples[at], token_advantages=row)
    told = [
        backends().train(given, {}).metrics["train/num_trained_samples"]
        for given in (shard, msgspec.structs.replace(shard, samples=tuple(samples)))
    ]
    assert told[1] == told[0] + 1


REFUSED = [
    ("raises", "raised AttributeError: 'LossTokens' object has no attribute 'missing' at {file}:5"),
    ("stacks", "raised RuntimeError: stack expects each tensor to be equal size"),
    ("mean", "its loss has shape [] for "),
    ("detached", "returned a loss without gradient"),
    ("nan", "its loss is -inf at token "),
    ("number", "its loss is of type float, not a tensor"),
    ("whole", "its loss is torch.int64 on cpu, the log-probs are torch.float32 on cpu"),
    ("metric", 'its metric "kl" has shape [] for '),
    ("names", "returned metrics of type list"),
]


@pytest.mark.parametrize(("name", "said"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_cannot_be_trained_on_is_refused_before_the_update(
    backends: Backends, mine: Path, name: str, said: str
) -> None:
    mine.write_text(WRONG)
    backend = backends(algo={"loss_fn": f"{mine}:{name}"})
    before = weights_of(backend)
    with pytest.raises(UserCodeError) as caught:
        backend.train(make_shards(31)[0], {})
    text = str(caught.value)
    assert text.startswith(f'step 31, mini-batch 0, rank 0: algo.loss_fn = "{mine}:{name}"')
    assert said.format(file=mine) in text
    after = weights_of(backend)
    assert same(before, after)


@pytest.mark.parametrize(
    ("name", "said"),
    [("mean", "its weight has shape [] for "), ("complex_keep", "what it keeps is torch.complex64"), REFUSED[0]],
)
def test_a_weight_that_is_none_is_refused(backends: Backends, mine: Path, name: str, said: str) -> None:
    mine.write_text(WRONG)
    with pytest.raises(UserCodeError) as caught:
        backends(algo={"weight_fn": f"{mine}:{name}"}).train(make_shards(31)[0], {})
    assert f'algo.weight_fn = "{mine}:{name}"' in str(caught.value)
    assert said.format(file=mine) in str(caught.value)


@pytest.mark.parametrize(("name", "said"), [("later", "is an async function"), ("losss", 'has no "losss"')])
def test_a_loss_that_is_none_is_refused_at_set_up(backends: Backends, mine: Path, name: str, said: str) -> None:
    mine.write_text(WRONG)
    with pytest.raises(ConfigError, match=said):
        backends(algo={"loss_fn": f"{mine}:{name}"})
