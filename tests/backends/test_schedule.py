"""The learning rate at every update, and AdamW against torch's own."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from myxa.actors.backends.torch_backend.accounting import learning_rate
from myxa.actors.backends.torch_backend.parallel import AdamW
from myxa.core.config import OptimizerConfig

RATES: dict[str, tuple[dict[str, object], dict[int, float]]] = {
    "warm-up rises from above zero": ({"warmup_steps": 4}, dict(enumerate([0.5, 1.0, 1.5, 2.0, 2.0, 2.0]))),
    "linear stays at its floor": (
        {"schedule": "linear", "min_lr_ratio": 0.5, "warmup_steps": 2},
        {0: 1.0, 1: 2.0, 2: 2.0, 6: 1.5, 10: 1.0, 11: 1.0, 12: 1.0},
    ),
    "cosine": ({"schedule": "cosine", "decay_steps": 8}, {n: 1 + math.cos(math.pi * n / 8) for n in range(9)}),
    "wsd stays at the top and goes down at the end": (
        {"schedule": "wsd", "warmup_steps": 2, "wsd_decay_steps": 4, "min_lr_ratio": 0.5},
        dict(enumerate([1.0] + [2.0] * 6 + [1.75, 1.5, 1.25] + [1.0] * 3)),
    ),
    "wsd by a root": (
        {"schedule": "wsd", "wsd_decay_steps": 4, "wsd_decay": "minus_sqrt"},
        {6: 2.0, 7: 1.0, 8: 2 - 2 * 0.5**0.5, 9: 2 - 2 * 0.75**0.5, 10: 0.0},
    ),
    "wsd by a cosine": (
        {"schedule": "wsd", "decay_steps": 8, "wsd_decay_steps": 4, "wsd_decay": "cosine"}, {4: 2.0, 6: 1.0, 8: 0.0}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RATES)
def test_the_rate_of_every_update(name: str) -> None:
    options, wanted = RATES[name]
    config = OptimizerConfig.model_validate({"lr": 2.0, **options})
    assert {n: learning_rate(config, n, total_updates=10) for n in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("is_fused", [False, True])
def test_adamw_walks_as_torch_does(*, is_fused: bool) -> None:
    sys.stdout.write("seed 4\n")
    generator = torch.Generator().manual_seed(4)
    start = {"matrix": torch.randn(5, 3, generator=generator), "vector": torch.randn(4, generator=generator)}
    ours = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    mine = AdamW(list(ours.items()), (0.9, 0.95), 1e-8, is_fused=is_fused)
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
