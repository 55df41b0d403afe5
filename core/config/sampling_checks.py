"""Sampling that does not go with the engine of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .conflict import Conflict

if TYPE_CHECKING:
    from .root import RunConfig


def sampling_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Seeds need servers that draw by them, and those cannot cut by min-p."""
    rollout, is_sglang = config.rollout, config.roles.rollout.kind == "sglang"
    if config.algo.kind == "sft" or not is_sglang:
        return
    draws_by_seed = config.sglang.get("enable_deterministic_inference") is True
    if rollout.deterministic and not config.engine.attach and not draws_by_seed:
        yield Conflict(
            ("rollout.deterministic", "sglang.enable_deterministic_inference"),
            "needs sglang.enable_deterministic_inference = true: SGLang does not look at requests' seeds without",
        )
    if rollout.min_p and (rollout.deterministic or draws_by_seed):
        yield Conflict(
            ("rollout.min_p", "rollout.deterministic", "sglang.enable_deterministic_inference"),
            "must be 0 with seeds: SGLang's sampler ends the server when it is to do both; use top_p or top_k",
        )
