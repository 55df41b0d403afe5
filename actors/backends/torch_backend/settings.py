"""What a step needs to know from the run file, and which of it can be changed while the run goes on.

Knows config sections. Must not know tensors. A knob is a live value from the control socket: it replaces a field for
one step, with the same checks as the run file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import ValidationError

from ....core.config import AlgoConfig, OptimizerConfig
from ....core.errors import ConfigError

ALGO_KNOBS = ("clip_low", "clip_high", "dual_clip", "tis_cap", "mis_low", "mis_high", "kl_coef", "entropy_coef")
OPTIMIZER_KNOBS = ("lr", "max_grad_norm", "weight_decay", "min_lr_ratio")
KNOBS = ALGO_KNOBS + OPTIMIZER_KNOBS
"""`lr` is the peak of the schedule, not the rate of the moment."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The plain values behind one step."""

    algo: AlgoConfig
    optimizer: OptimizerConfig
    temperature: float = 1.0
    """The one that engines sample with; log-probs are taken of softmax(logits / temperature)."""
    max_new_tokens: int = 1
    """Divisor per sample of reduction "constant" (Dr.GRPO, arXiv 2503.20783, section 3.2)."""
    total_updates: int = 0
    """Optimizer updates of the whole run, where decays end by default; 0 = unknown."""


def with_knobs(settings: StepSettings, knobs: Mapping[str, float], *, has_reference: bool) -> StepSettings:
    """`settings` with the knobs' values. Raises ConfigError for an unknown knob or an impossible value, and for a KL
    term without a reference model."""
    changed = _changed(settings, knobs) if knobs else settings
    if changed.algo.kl_coef > 0 and not has_reference:
        raise ConfigError(
            f"kl_coef = {changed.algo.kl_coef} needs a reference model, but the run began with kl_coef = 0",
            remedy="begin with a small kl_coef; it can be changed later",
        )
    return changed


def _changed(settings: StepSettings, knobs: Mapping[str, float]) -> StepSettings:
    unknown = sorted(set(knobs) - set(KNOBS))
    if unknown:
        raise ConfigError(f"no such knob: {', '.join(unknown)}", remedy=f"the trainer has {', '.join(KNOBS)}")
    algo = {name: value for name, value in knobs.items() if name in ALGO_KNOBS}
    optimizer = {name: value for name, value in knobs.items() if name in OPTIMIZER_KNOBS}
    try:
        return replace(
            settings,
            algo=AlgoConfig.model_validate({**settings.algo.model_dump(), **algo}),
            optimizer=OptimizerConfig.model_validate({**settings.optimizer.model_dump(), **optimizer}),
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or ", ".join(knobs)
        raise ConfigError(f"knob {name}: {first['msg']}", remedy="the run file's limits hold for knobs too") from error
