"""What a run file allows its live knobs, beyond what is possible at all. Knows the configuration and the roles."""

from __future__ import annotations

from ...actors.buffer.difficulty import Window
from ...actors.buffer.knobs import MAX_TOKENS, BufferLimits
from ...actors.buffer.settings import MAX_ID
from ...core.config import RunConfig
from ...core.errors import ModelError

MAX_DEATHS = 10
"""A run may bear a thousand deaths of an actor, but not of one prompt."""


def buffer_limits(config: RunConfig) -> BufferLimits:
    """The same bounds that the run file itself is checked by."""
    context_length, quarantine_after = config.engine.context_length, config.reward.quarantine_after
    # One death more than that would end the run, or cost it an engine for good.
    max_deaths = min(config.roles.rollout.max_restarts, MAX_DEATHS)
    if config.algo.kind == "sft":
        return BufferLimits(
            max_samples=1,
            quarantine_after=quarantine_after,
            max_deaths=max_deaths,
            has_rewards=False,
            samples_per_step=config.monitor.samples_per_step,
        )
    data = config.data
    return BufferLimits(
        min_samples=2 if config.algo.needs_groups else 1,
        max_new_tokens=context_length - 1 if context_length else MAX_TOKENS,
        quarantine_after=quarantine_after,
        max_deaths=max_deaths,
        difficulty=Window(low=data.difficulty_low, high=data.difficulty_high, skips=data.difficulty_skips),
        samples_per_step=config.monitor.samples_per_step,
        pass_reward=config.reward.pass_reward,
        vocab_size=_vocab_size(config.model.path),
        only_temperature=1.0 if config.algo.ref_urls else None,
    )


def _vocab_size(model_path: str) -> int:
    """As the model's folder says it; without one that can be read here, whatever is a token id at all."""
    from ...actors.models.hf_folder import read_config

    try:
        return read_config(model_path).vocab_size
    except ModelError:
        return MAX_ID + 1
