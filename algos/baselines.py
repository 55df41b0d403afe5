"""Sample-level advantages: rewards compared inside their group. numpy only, so the leader can plan without a device.

Groups are distinguished by *id*, so groups of unequal size (a member was masked) are normalised rightly. A rollout
counts once in all statistics, whatever number of samples or turns it has: their weights add up to 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..core.config.learning import Normalise

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

STD_EPS = 1e-6
"""Added to the standard deviation (in units of reward)."""


class _Groups:
    """Statistics per sample of the group it belongs to; all float64 [S]. Its count is that of rollouts."""

    def __init__(self, rewards_S: F64, group_ids_S: I64, weights_S: F64) -> None:
        _, group_S = np.unique(group_ids_S, return_inverse=True)
        self.weights_S = weights_S
        count_G = np.bincount(group_S, weights=weights_S).round().astype(np.float64)
        mean_G = np.bincount(group_S, weights=weights_S * rewards_S) / count_G
        self.count_S: F64 = count_G[group_S]
        self.centred_S: F64 = rewards_S - mean_G[group_S]
        # Equal rewards must give exactly 0: a rounding residue of the mean divided by STD_EPS would be a signal.
        high_G = np.full(count_G.shape, -np.inf)
        low_G = np.full(count_G.shape, np.inf)
        np.maximum.at(high_G, group_S, rewards_S)
        np.minimum.at(low_G, group_S, rewards_S)
        self.centred_S[(high_G == low_G)[group_S]] = 0.0
        square_G = np.bincount(group_S, weights=weights_S * self.centred_S**2)
        self.std_S: F64 = np.sqrt(square_G / np.maximum(count_G - 1, 1))[group_S]


def _standardised(groups: _Groups, rewards_S: F64, normalise: Normalise) -> F64:
    """(R - mean) / (std + eps), unbiased std: of the group, GRPO, arXiv 2402.03300, section 4.1.2; of the batch, arXiv
    2508.08221, section 4.1; without std: Dr.GRPO."""
    if normalise == "none":
        return groups.centred_S
    if normalise == "group":
        return groups.centred_S / (groups.std_S + STD_EPS)
    count = groups.weights_S.sum().round()
    gap_S = rewards_S - (groups.weights_S * rewards_S).sum() / count
    return groups.centred_S / (np.sqrt((groups.weights_S * gap_S**2).sum() / max(count - 1, 1)) + STD_EPS)


BASELINES: dict[str, Callable[[_Groups, F64, Normalise], F64]] = {
    **dict.fromkeys(("grpo", "dapo", "gspo", "cispo"), _standardised),
    # R - mean: Dr.GRPO, arXiv 2503.20783, section 3; REINFORCE++-baseline before its whitening
    **dict.fromkeys(("dr_grpo", "reinforce_pp_baseline", "reward"), lambda groups, rewards_S, _: groups.centred_S),
    # R - mean of the others = (R - mean) n / (n - 1): RLOO, arXiv 2402.14740; a lone sample gets 0
    "rloo": lambda groups, rewards_S, _: groups.centred_S * groups.count_S / np.maximum(groups.count_S - 1, 1),
    # their baseline is elsewhere: values, or whitening over the batch
    **dict.fromkeys(("reinforce_pp", "ppo"), lambda groups, rewards_S, _: rewards_S),
    "sft": lambda groups, rewards_S, _: np.ones_like(rewards_S),
    "dpo": lambda groups, rewards_S, _: np.sign(groups.centred_S),  # 1 for the better answer, -1 for the worse one
}


def group_advantages(
    kind: str,
    rewards_S: npt.ArrayLike,
    group_ids_S: npt.ArrayLike,
    *,
    normalise: Normalise = "group",
    weights_S: npt.ArrayLike | None = None,
) -> F32:
    """float32 [S]: one advantage per sample (or turn) from its reward and the rewards of its group.

    `rewards_S` numbers [S] in any order, `group_ids_S` integers [S], `weights_S` the part of its rollout that each is
    (None: all of it). A group of equal rewards, or of one rollout, gets exactly 0 from all kinds that compare.
    `normalise` concerns grpo, dapo, gspo and cispo; the formula of each kind is above.
    """
    rewards = np.asarray(rewards_S, dtype=np.float64)
    ids = np.asarray(group_ids_S, dtype=np.int64)
    weights = np.ones_like(rewards) if weights_S is None else np.asarray(weights_S, dtype=np.float64)
    return BASELINES[kind](_Groups(rewards, ids, weights), rewards, normalise).astype(np.float32)
