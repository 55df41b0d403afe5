"""A loss of a user's own for the tests of gangs: what loss = "ppo" does, and what it does not bear."""

from __future__ import annotations

from typing import Any

import torch


def clipped(tokens: Any) -> Any:
    """PPO's clip. A log-prob of the engine below -50 is too much for it."""
    if bool((tokens.behaviour_T < -50).any()):
        raise ValueError("a log-prob below -50")
    ratio = torch.exp((tokens.live_T - tokens.old_T).clamp(-20, 20))
    bounded = ratio.clamp(1 - tokens.config.clip_low, 1 + tokens.config.clip_high)
    loss = torch.maximum(-ratio * tokens.advantages_T, -bounded * tokens.advantages_T)
    return loss, {"ratio": ratio}
