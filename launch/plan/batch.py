"""The arithmetic of a batch: prompts, samples, tokens, updates, passes over the data. Pure.

samples of a step = algo.batch_size (groups) x rollout.num_samples
tokens of a step <= samples x (prompt + rollout.max_new_tokens x rollout.max_turns)
updates = steps x algo.minibatches
passes = steps x algo.batch_size / rows           (more when a filter leaves groups out)
micro-batches of a rank >= tokens / replicas / trainer.max_tokens_per_microbatch
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...actors.backends.megatron.layout import ParallelLayout
from ...actors.models.model_config import ModelConfig
from ...core.config import RunConfig


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Counts of a run; None where the data or the model cannot be read."""

    num_prompts: int
    """Groups of a step."""
    num_samples: int
    """Samples of a step."""
    samples_per_prompt: int
    num_steps: int
    """0: endless."""
    updates_per_step: int
    num_updates: int
    samples_per_update: int
    tokens_per_step: int | None
    """At most, prompts not counted."""
    num_replicas: int
    """Data-parallel replicas, each of which trains its own share."""
    micro_batches_per_replica: int | None
    """At most."""
    num_rows: int | None
    """Of the training data."""
    passes: float | None
    """At least; None for an endless run."""
    steps_in_data: int | None
    """Batches that all passes hold; None: endless."""


def batch_of(
    config: RunConfig, model: ModelConfig | None, world_size: int, num_rows: int | None, num_draws: int | None
) -> BatchPlan:
    """All counts. `num_draws`: prompts in all passes; None: endless, or not known."""
    algo, rollout, steps = config.algo, config.rollout, config.run.num_steps
    samples = algo.batch_size * rollout.num_samples
    passes = steps * algo.batch_size / num_rows if num_rows and steps else None
    return BatchPlan(
        num_prompts=algo.batch_size,
        num_samples=samples,
        samples_per_prompt=rollout.num_samples,
        num_steps=steps,
        updates_per_step=algo.minibatches,
        num_updates=max(0, steps - config.critic.warmup_steps) * algo.minibatches,
        samples_per_update=samples // algo.minibatches,
        tokens_per_step=None if model is None else samples * longest_answer(config, model),
        num_replicas=num_replicas(config, world_size),
        micro_batches_per_replica=None if model is None else num_micro_batches(config, model, world_size),
        num_rows=num_rows,
        passes=passes,
        steps_in_data=None if num_draws is None else num_draws // algo.batch_size,
    )


def longest_answer(config: RunConfig, model: ModelConfig) -> int:
    """Tokens that a sample's model turns may have together."""
    context = config.engine.context_length or model.context_length
    if config.algo.kind == "sft":
        return context
    return min(context, config.rollout.max_new_tokens * config.rollout.max_turns)


def num_replicas(config: RunConfig, world_size: int) -> int:
    """Data-parallel replicas of the trainer."""
    if config.roles.trainer.kind != "megatron":
        return world_size
    return max(1, world_size // ParallelLayout.of(config.megatron).model_size)


def num_micro_batches(config: RunConfig, model: ModelConfig, world_size: int) -> int:
    """Passes of one replica for one update when all answers are as long as they may be."""
    limit = config.trainer.max_tokens_per_microbatch
    longest = longest_answer(config, model)
    samples = config.algo.batch_size * config.rollout.num_samples / config.algo.minibatches
    fitting = max(1, limit // max(1, longest))
    return max(1, math.ceil(samples / fitting / num_replicas(config, world_size)))
