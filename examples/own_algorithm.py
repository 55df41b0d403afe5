"""Functions of your own for a run's algorithm: docs/algorithms.md says what each gets and returns."""

import numpy as np
import torch


def process(groups):
    """Up to 0.1 less for an answer as long as the batch's longest."""
    longest = max(len(sample.response_ids) for group in groups for sample in group.samples)
    return [
        [
            reward - 0.1 * len(sample.response_ids) / longest
            for reward, sample in zip(group.rewards, group.samples, strict=True)
        ]
        for group in groups
    ]


def advantages(groups):
    """What kind = "grpo" does, to the bit."""
    return [
        (group.rewards - np.mean(group.rewards, dtype=float)) / (group.rewards.std(ddof=1, dtype=float) + 1e-6)
        for group in groups
    ]


def weight(tokens):
    """What correction = "decoupled" does, to the bit."""
    return torch.exp(tokens.train_T - tokens.behaviour_T).clamp(max=tokens.config.tis_cap)


def loss(tokens):
    """What loss = "ppo" does, to the bit."""
    ratio = torch.exp(tokens.live_T - tokens.old_T)
    bounded = ratio.clamp(1 - tokens.config.clip_low, 1 + tokens.config.clip_high)
    loss = torch.maximum(-ratio * tokens.advantages_T, -bounded * tokens.advantages_T)
    return loss, {"bounded": ratio != bounded}
