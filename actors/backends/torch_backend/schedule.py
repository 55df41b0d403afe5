"""The learning rate as a function of finished optimizer updates. No state: resuming needs the count alone.

Library considered: `torch.optim.lr_scheduler`. Not used: it keeps its own counter inside the optimizer's groups, which
must then be saved, restored and kept equal to ours, and it fights with a rate changed while the run goes on.
"""

from __future__ import annotations

import math

from ....core.config import OptimizerConfig
from ....core.errors import ConfigError


def check_schedule(config: OptimizerConfig, total_updates: int) -> None:
    """Raise ConfigError if the end of a decay is neither given nor known from the run's length (0 = endless)."""
    if config.schedule != "constant" and config.decay_steps == 0 and total_updates <= 0:
        raise ConfigError(
            f'[optimizer] schedule = "{config.schedule}" has no end: the run has no fixed number of steps',
            remedy="set optimizer.decay_steps or run.num_steps",
        )


def learning_rate(config: OptimizerConfig, num_updates: int, total_updates: int) -> float:
    """Rate of the next update after `num_updates` finished ones.

    Warm-up rises linearly and reaches the peak at its last update; then constant, or a half cosine, or a line down to
    `min_lr_ratio * lr` at `decay_steps` (0: at `total_updates`). wsd ("warm-up, stable, decay", arXiv 2404.06395,
    section 4) is constant until `wsd_decay_steps` before that.
    """
    if num_updates < config.warmup_steps:
        return config.lr * (num_updates + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    end = config.decay_steps or total_updates
    start, course = config.warmup_steps, config.schedule
    if course == "wsd":
        start, course = max(start, end - config.wsd_decay_steps), config.wsd_decay
    progress = min(1.0, max(0, num_updates - start) / max(1, end - start))
    share = 1.0 - progress
    if course == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif course == "minus_sqrt":
        share = 1.0 - math.sqrt(progress)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)
