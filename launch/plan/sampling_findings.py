"""Sampling by which training samples are drawn from another distribution than the trainer scores. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.config import RunConfig
from ...core.errors import ConfigError
from ..preflight.finding import ConfigFinding


def sampling_findings(config: RunConfig) -> Iterator[ConfigFinding]:
    """One warning for each key that does so."""
    if config.algo.kind == "sft":
        return
    rollout = config.rollout
    for key, value, rest in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, -1), ("min_p", rollout.min_p, 0)):
        if value != rest:
            yield _warning(
                key,
                f"= {value:g}: tokens are drawn from a part of the distribution, their log-probs and the trainer's are "
                "of all of it: what is cut off is never tried, and no correction sees that",
                f"set it to {rest} for training",
            )
    if rollout.deterministic and config.asynchrony.max_staleness:
        yield _warning(
            "deterministic",
            f"= true with async.max_staleness = {config.asynchrony.max_staleness}: turns have seeds of their own, but "
            "which weights a token meets is a matter of time: two runs are not equal",
            "set async.max_staleness = 0 for runs that repeat to the bit",
        )
    if rollout.deterministic and config.data.difficulty_low < config.data.difficulty_high:
        yield _warning(
            "deterministic",
            f"= true with a difficulty window of {config.data.difficulty_low:g} to {config.data.difficulty_high:g}: a "
            "prompt that comes twice within a step may be passed over or not, as its first group is finished by then "
            "or not: two runs are not equal",
            "leave the window out (data.difficulty_low = data.difficulty_high) for runs that repeat to the bit",
        )
    for key, value, rest in (
        ("repetition_penalty", rollout.repetition_penalty, 1),
        ("frequency_penalty", rollout.frequency_penalty, 0),
        ("presence_penalty", rollout.presence_penalty, 0),
        ("min_new_tokens", rollout.min_new_tokens, 0),
    ):
        if value != rest:
            yield _warning(
                key,
                f"= {value:g}: log-probs of sampled tokens are those after the penalty, the trainer scores without it: "
                "its ratios are not 1 on fresh samples either, and the correction (algo.correction) weighs that",
                f"set it to {rest} for training, or watch the importance weights (docs/algorithms.md)",
            )


def _warning(key: str, text: str, remedy: str) -> ConfigFinding:
    return ConfigFinding(f"rollout.{key}", ConfigError(f"rollout.{key} {text}", remedy=remedy), is_warning=True)
