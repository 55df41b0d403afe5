"""What a step needs to know from the run file, and which of it can be changed during the run.

A knob is a live value from the control socket: it replaces a field for one step, with the same checks as the run file.
`learning_rate` is a function of finished optimizer updates. It has no state: resuming needs the count alone.

Library considered: `torch.optim.lr_scheduler`. Not used: it keeps its own counter inside the optimizer's groups, which
must then be saved, restored and kept equal to ours, and it conflicts with a rate that is changed during the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import ValidationError

from ....algos.objective import OPTIONS_OWN, TokenFunctions
from ....core.config import AlgoConfig, OptimizerConfig
from ....core.errors import ConfigError
from ...trainer.knobs import STEP_TUNABLES


def check_schedule(config: OptimizerConfig, total_updates: int) -> None:
    """Raise ConfigError if the end of a decay is neither given nor known from the run's length (0 = endless)."""
    if config.schedule != "constant" and config.decay_steps == 0 and total_updates <= 0:
        raise ConfigError(
            f'[optimizer] schedule = "{config.schedule}" has no end: the run has no fixed number of steps',
            remedy="set optimizer.decay_steps or run.num_steps",
        )


def learning_rate(config: OptimizerConfig, num_updates: int, total_updates: int) -> float:
    """Rate of the next update after `num_updates` finished ones. Warm-up rises linearly and reaches the peak at its
    last update; then constant, or a half cosine, or a line down to `min_lr_ratio * lr` at `decay_steps` (0: at
    `total_updates`). wsd ("warm-up, stable, decay", arXiv 2404.06395, section 4) is constant until `wsd_decay_steps`
    before that."""
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


KNOBS = {tunable.name: tunable for tunable in STEP_TUNABLES}
"""`lr` is the peak of the schedule, not the rate of the moment."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The plain values behind one step."""

    algo: AlgoConfig
    optimizer: OptimizerConfig
    max_new_tokens: int = 1
    """Divisor per sample of reduction "constant" (Dr.GRPO, arXiv 2503.20783, section 3.2)."""
    total_updates: int = 0
    """Optimizer updates of the whole run, where decays end by default; 0 = unknown."""
    functions: TokenFunctions = OPTIONS_OWN
    """The user's, where `[algo]` names some."""


def with_knobs(settings: StepSettings, knobs: Mapping[str, float], *, has_reference: bool) -> StepSettings:
    """`settings` with the knobs' values. Raises ConfigError for an unknown knob or an impossible value, and for a KL
    term without a reference model, here or served elsewhere."""
    changed = _changed(settings, knobs) if knobs else settings
    if changed.algo.kl_coef > 0 and not (has_reference or changed.algo.ref_urls):
        raise ConfigError(
            f"kl_coef = {changed.algo.kl_coef} needs a reference model, but the run began with kl_coef = 0",
            remedy="begin with a small kl_coef; it can be changed later",
        )
    if changed.algo.ref_update_every and not has_reference:
        raise ConfigError(
            f"ref_update_every = {changed.algo.ref_update_every}: this trainer keeps no reference model", remedy="use 0"
        )
    return changed


def _changed(settings: StepSettings, knobs: Mapping[str, float]) -> StepSettings:
    unknown = sorted(set(knobs) - set(KNOBS))
    if unknown:
        raise ConfigError(f"no such knob: {', '.join(unknown)}", remedy=f"the trainer has {', '.join(KNOBS)}")
    values = {KNOBS[name].key: int(value) if KNOBS[name].kind == "int" else value for name, value in knobs.items()}
    algo, optimizer = (
        {key.removeprefix(section): value for key, value in values.items() if key.startswith(section)}
        for section in ("algo.", "optimizer.")
    )
    try:
        return replace(
            settings,
            algo=AlgoConfig.model_validate({**settings.algo.model_dump(), **algo}),
            optimizer=OptimizerConfig.model_validate({**settings.optimizer.model_dump(), **optimizer}),
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])  # nothing where several values do not go together
        raise ConfigError(
            f"knob {name}: {first['msg']}" if name else first["msg"], remedy="the run file's limits hold for knobs too"
        ) from error
