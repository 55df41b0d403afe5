"""Runners of groups, and what engines stream to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from myxa.actors.rollout.group_runner import GroupLoad, GroupRunner, RolloutOptions
from myxa.actors.workflows.episode import ModelAccess
from myxa.core.clock import SystemClock
from myxa.core.config import RewardSettings
from myxa.core.config.run import GatewaySettings, RolloutSettings
from myxa.core.messages import SamplingParams
from myxa.core.protocols import Delta
from myxa.core.samples import FinishReason


def rollout_options(**given: Any) -> RolloutOptions:
    """Each by its name in the options, or in the section of the run file that has it."""
    sections = {"rollout": RolloutSettings, "reward": RewardSettings, "gateway": GatewaySettings}
    parts: dict[str, Any] = {}
    for name, kind in sections.items():
        parts[name] = kind(**{key: given.pop(key) for key in list(given) if key in kind.model_fields})
    return RolloutOptions(**parts, **given)


def runner_of(
    workflow: Any,
    scorer: Any,
    tokenizer: Any,
    generate: Any = None,
    *,
    model: ModelAccess | None = None,
    context_length: int = 512,
    on_load: Callable[[GroupLoad], None] = lambda load: None,
    max_turns: int = 2,
    **options: Any,
) -> GroupRunner:
    """`generate`: of the engine, where there is one."""
    access = model or ModelAccess(generate=generate, sampling=SamplingParams(), context_length=context_length)
    return GroupRunner(
        workflow=workflow, scorer=scorer, tokenizer=tokenizer, clock=SystemClock(), model=access, on_load=on_load,
        options=rollout_options(max_turns=max_turns, **options),
    )  # fmt: skip


def delta(ids: Sequence[int], finish: FinishReason | None, version: int = 3) -> Delta:
    size = len(ids)
    return Delta(
        output_ids=np.asarray(ids, np.int32), logprobs=np.full(size, -0.5, np.float32),
        versions=np.full(size, version, np.int32), finish=finish,
    )  # fmt: skip
