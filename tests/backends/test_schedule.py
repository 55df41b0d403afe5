"""The learning rate at every update, and AdamW against torch's own."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

from myxa.actors.backends.torch_backend.adamw import AdamW
from myxa.actors.backends.torch_backend.settings import check_schedule, learning_rate
from myxa.core.config import OptimizerConfig
from myxa.core.errors import ConfigError


def rates(num: int, **options: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 2.0, **options})
    return [learning_rate(config, n, total_updates=10) for n in range(num)]


def test_warm_up_rises_from_above_zero_and_reaches_the_peak() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_linear_goes_down_to_its_floor_and_stays_there() -> None:
    got = rates(13, schedule="linear", min_lr_ratio=0.5, warmup_steps=2)
    assert got[:3] == pytest.approx([1.0, 2.0, 2.0])
    assert got[6] == pytest.approx(1.5)
    assert got[10:] == pytest.approx([1.0] * 3)


def test_cosine_passes_the_middle_halfway() -> None:
    got = rates(9, schedule="cosine", decay_steps=8)
    assert (got[0], got[4], got[8]) == pytest.approx((2.0, 1.0, 0.0))
    assert all(a > b for a, b in itertools.pairwise(got))


def test_wsd_stays_at_the_top_and_goes_down_at_the_end() -> None:
    got = rates(13, schedule="wsd", warmup_steps=2, wsd_decay_steps=4, min_lr_ratio=0.5)
    assert got == pytest.approx([1.0] + [2.0] * 6 + [1.75, 1.5, 1.25] + [1.0] * 3)
    root = rates(11, schedule="wsd", wsd_decay_steps=4, wsd_decay="minus_sqrt")
    assert root[6:] == pytest.approx([2.0, 1.0, 2 - 2 * 0.5**0.5, 2 - 2 * 0.75**0.5, 0.0])
    curve = rates(9, schedule="wsd", decay_steps=8, wsd_decay_steps=4, wsd_decay="cosine")
    assert (curve[4], curve[6], curve[8]) == pytest.approx((2.0, 1.0, 0.0))
    with pytest.raises(ConfigError, match="has no end"):
        check_schedule(OptimizerConfig(schedule="wsd", wsd_decay_steps=4), 0)


def test_a_decay_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no end"):
        check_schedule(OptimizerConfig(schedule="cosine"), 0)
    check_schedule(OptimizerConfig(schedule="cosine", decay_steps=5), 0)
    check_schedule(OptimizerConfig(), 0)


def test_adamw_walks_as_torch_does() -> None:
    sys.stdout.write("seed 4\n")
    generator = torch.Generator().manual_seed(4)
    start = {"matrix": torch.randn(5, 3, generator=generator), "vector": torch.randn(4, generator=generator)}
    ours = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    mine = AdamW(list(ours.items()), (0.9, 0.95), 1e-8)
    judge = torch.optim.AdamW(
        [{"params": [theirs["matrix"]], "weight_decay": 0.1}, {"params": [theirs["vector"]], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(20):
        rate = 0.01 / (1 + step)
        for name, value in start.items():
            gradient = torch.randn(value.shape, generator=generator)
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        for group in judge.param_groups:
            group["lr"] = rate
        judge.step()
        mine.update(rate, 0.1)
    for name in start:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


def test_a_parameter_without_gradient_stays() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = AdamW([("w", parameter)], (0.9, 0.95), 1e-8)
    optimizer.update(1.0, 0.5)
    assert torch.equal(parameter, torch.ones(2, 2))
