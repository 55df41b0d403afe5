"""Random token batches for the tests of the objective; every draw comes from a printed seed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from myxa.algos.objective import TokenBatch, objective_config
from myxa.algos.ratios import Segments
from myxa.core.config.learning import AlgoConfig

LENGTHS = (5, 3, 7, 0, 4)


def options(**given: object) -> AlgoConfig:
    """Of a step; also such as a run file may not have."""
    return objective_config(AlgoConfig.model_construct(**{"reduction": "token", **given}))


@dataclass(frozen=True)
class Draw:
    """A batch as plain lists: what the explicit loops of a test read. Sample 3 of the default has no token."""

    live: list[float]
    behaviour: list[float]
    proximal: list[float]
    reference: list[float]
    entropy: list[float]
    advantages: list[float]
    owner: list[int]
    num_samples: int
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)

    def batch(self, *, dtype: torch.dtype = torch.float64, leave_out: Sequence[str] = ()) -> TokenBatch:
        """The same as tensors; `leaves` keeps those that get a gradient."""
        live = torch.tensor(self.live, dtype=dtype, requires_grad=True)
        entropy = torch.tensor(self.entropy, dtype=dtype, requires_grad=True)
        self.leaves.update(live=live, entropy=entropy)
        optional = {
            "proximal_T": torch.tensor(self.proximal, dtype=dtype),
            "reference_T": torch.tensor(self.reference, dtype=dtype),
            "entropy_T": entropy,
        }
        return TokenBatch(
            logprobs_T=live,
            behaviour_T=torch.tensor(self.behaviour, dtype=dtype),
            advantages_T=torch.tensor(self.advantages, dtype=dtype),
            segments=Segments(torch.tensor(self.owner, dtype=torch.int64), self.num_samples),
            **{name: tensor for name, tensor in optional.items() if name not in leave_out},
        )

    def part(self, samples: Sequence[int]) -> Draw:
        """Only these samples, renumbered: one micro-batch of several."""
        new = {s: k for k, s in enumerate(samples)}
        at = [t for s in samples for t, owner in enumerate(self.owner) if owner == s]

        def pick(values: list) -> list:
            return [values[t] for t in at]

        names = ("live", "behaviour", "proximal", "reference", "entropy", "advantages")
        return replace(
            self,
            **{name: pick(getattr(self, name)) for name in names},
            owner=[new[self.owner[t]] for t in at],
            num_samples=len(samples),
            leaves={},
        )

    @property
    def num_tokens(self) -> int:
        return len(self.live)

    @property
    def num_present(self) -> int:
        return len(set(self.owner))


def draw_batch(seed: int, lengths: Sequence[int] = LENGTHS, spread: float = 0.4) -> Draw:
    """Log-probs in (-4, 0), the policies `spread` nats apart, one advantage a sample."""
    sys.stdout.write(f"seed {seed}\n")
    gen = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(total, generator=gen, dtype=torch.float64) * scale

    base = -4 * torch.rand(total, generator=gen, dtype=torch.float64) - 0.5
    owner = [s for s, length in enumerate(lengths) for _ in range(length)]
    per_sample = torch.randn(len(lengths), generator=gen, dtype=torch.float64).tolist()
    return Draw(
        live=(base + noise(spread)).tolist(),
        behaviour=(base + noise(spread)).tolist(),
        proximal=(base + noise(spread / 2)).tolist(),
        reference=(base + noise(spread)).tolist(),
        entropy=(torch.rand(total, generator=gen, dtype=torch.float64) + 0.2).tolist(),
        advantages=[per_sample[o] for o in owner],
        owner=owner,
        num_samples=len(lengths),
    )


@pytest.fixture
def draw() -> Callable[..., Draw]:
    return draw_batch
