"""How tokens are drawn for training, evaluation and the canary, by the run file. Plain knowledge."""

from __future__ import annotations

from ...actors.engines.sglang_needs import SglangNeeds
from ...core.config import RunConfig
from ...core.messages import SamplingParams


def train_sampling(config: RunConfig) -> SamplingParams:
    """How training samples are drawn."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_new_tokens=rollout.max_new_tokens,
        min_new_tokens=rollout.min_new_tokens,
        repetition_penalty=rollout.repetition_penalty,
        frequency_penalty=rollout.frequency_penalty,
        presence_penalty=rollout.presence_penalty,
        stop_token_ids=rollout.stop_token_ids,
        stop=rollout.stop,
        seed=_seed(config),
    )


def eval_sampling(config: RunConfig) -> SamplingParams:
    """How held-out prompts are answered: the whole distribution at the evaluation temperature."""
    return SamplingParams(
        temperature=config.eval.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        stop_token_ids=config.rollout.stop_token_ids,
        stop=config.rollout.stop,
        seed=_seed(config),
    )


def canary_sampling(config: RunConfig) -> SamplingParams:
    """How canary prompts are answered: as the trainer scores, from the whole distribution at its temperature."""
    return SamplingParams(
        temperature=config.rollout.temperature or 1.0,
        max_new_tokens=min(config.guard.max_new_tokens, config.rollout.max_new_tokens),
        stop_token_ids=config.rollout.stop_token_ids,
    )


def _seed(config: RunConfig) -> int | None:
    return config.run.seed if config.rollout.deterministic else None


def sglang_needs(config: RunConfig) -> SglangNeeds:
    """What servers must have been started with, or without, for this sampling."""
    rollout = config.rollout
    return SglangNeeds(
        tokenizer=bool(rollout.stop or rollout.min_new_tokens),
        seeds=rollout.deterministic,
        min_p=rollout.min_p > 0,
    )
