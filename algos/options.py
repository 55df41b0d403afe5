"""Options of the objective with every "auto" resolved, and what the options ask of the trainer.

Knows the run file's `[algo]` section. Must not know tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ..core.config.learning import (
    LOSS_OF_KIND,
    AlgoConfig,
    AlgoKind,
    Correction,
    KlKind,
    KlPlace,
    LossName,
    Reduction,
    resolve_correction,
)
from ..core.errors import ConfigError
from .ratios import Level, Mode

CHOICES: dict[str, tuple[str, ...]] = {
    "kind": get_args(AlgoKind),
    "loss": get_args(LossName),
    "correction": get_args(Correction),
    "reduction": get_args(Reduction),
    "kl_in": get_args(KlPlace),
    "kl_kind": get_args(KlKind),
    "mis_level": get_args(Level),
    "mis_mode": get_args(Mode),
    "reject_level": get_args(Level),
}
NOT_NEGATIVE = ("clip_low", "clip_high", "dual_clip", "tis_cap", "tis_floor", "mis_low", "reject_low", "veto",
                "kl_coef", "entropy_coef", "opsm_delta")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    """What `policy_objective` does. "auto" for loss and correction is replaced by its meaning on construction.

    Raises ConfigError for values that do not exist or do not go together.
    """

    kind: AlgoKind = "grpo"
    loss: LossName = "auto"
    """auto: the one that belongs to `kind`."""
    correction: Correction = "auto"
    """auto: see `resolve_correction`."""
    minibatches: int = 1
    """Optimizer steps on one batch."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    """0 = off, else > 1; for the ppo and gspo losses."""
    tis_cap: float = 2.0
    """Upper bound of the weight of decoupled, tis and icepop."""
    tis_floor: float = 0.0
    """Lower bound of the weight of tis."""
    mis_level: Level = "token"
    """Level of the weights of mis and icepop."""
    mis_mode: Mode = "mask"
    mis_low: float = 0.5
    """Lower bound of the weight of mis and icepop."""
    mis_high: float = 2.0
    mis_normalise: bool = False
    """mis: weights are divided by `Normaliser.mean_weight`."""
    reject_level: Level = "geometric"
    reject_low: float = 0.0
    reject_high: float = 0.0
    """mis: tokens (samples) whose weight at `reject_level` lies outside the bounds are removed; 0 = off."""
    veto: float = 0.0
    """mis: a sample with any token of weight below this is removed; 0 = off."""
    kl_coef: float = 0.0
    kl_in: KlPlace = "loss"
    kl_kind: KlKind = "k2"
    kl_unbiased: bool = False
    entropy_coef: float = 0.0
    reduction: Reduction = "token"
    opsm_delta: float = 0.0
    """Off-policy sequence masking: samples of negative advantage further away than this lose their loss; 0 = off."""
    has_loss_fn: bool = False
    """The loss per token is a function of the user's; `loss` says what the metrics' ratio is."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f'{name} = "{value}" is not known', remedy=f"use one of {', '.join(allowed)}")
        for name in NOT_NEGATIVE:
            value = float(getattr(self, name))
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} = {value}", remedy="it must be a finite number, not negative")
        if self.loss == "auto":
            object.__setattr__(self, "loss", LOSS_OF_KIND.get(self.kind, "ppo"))
        # A demonstration has no behaviour policy, so there is nothing to correct for.
        if self.minibatches < 1:
            raise ConfigError(f"minibatches = {self.minibatches}", remedy="it must be at least 1")
        resolved = "none" if self.loss == "sft" else resolve_correction(self.correction, self.minibatches)
        object.__setattr__(self, "correction", resolved)
        self._check_together()

    def _check_together(self) -> None:
        for name, low, high in (("mis", self.mis_low, self.mis_high), ("reject", self.reject_low, self.reject_high)):
            if high and low >= high:
                raise ConfigError(f"{name}_low = {low} is not below {name}_high = {high}", remedy="swap or widen them")
        if self.dual_clip and (self.dual_clip <= 1 or self.loss not in ("ppo", "gspo")):
            raise ConfigError(
                f'dual_clip = {self.dual_clip} with loss "{self.loss}"', remedy="more than 1, for ppo and gspo only"
            )
        if self.mis_normalise and self.mis_level == "geometric":
            raise ConfigError("geometric weights have no batch mean", remedy='use mis_level = "token" or "sequence"')


def needs_proximal(config: ObjectiveConfig) -> bool:
    """Whether the batch must be scored once under the step's first weights, before its first mini-batch.

    With one mini-batch the live log-probs of the training pass are the same numbers, unless weights must be known
    before it (`mis_normalise`).
    """
    if config.correction in ("none", "behaviour"):
        return False
    return config.minibatches > 1 or (config.correction == "mis" and config.mis_normalise)


def needs_reference(config: ObjectiveConfig) -> bool:
    """Whether a reference model must score the batch: there is a KL term, wherever it goes."""
    return config.kl_coef > 0


def objective_config(algo: AlgoConfig, minibatches: int | None = None) -> ObjectiveConfig:
    """From the run file's `[algo]` section; `minibatches` overrides the section's own number."""
    return ObjectiveConfig(
        kind=algo.kind,
        loss=algo.loss,
        correction=algo.correction,
        minibatches=algo.minibatches if minibatches is None else minibatches,
        clip_low=algo.clip_low,
        clip_high=algo.clip_high,
        dual_clip=algo.dual_clip,
        tis_cap=algo.tis_cap,
        tis_floor=algo.tis_floor,
        mis_level=algo.mis_level,
        mis_mode=algo.mis_mode,
        mis_low=algo.mis_low,
        mis_high=algo.mis_high,
        mis_normalise=algo.mis_normalise,
        reject_level=algo.reject_level,
        reject_low=algo.reject_low,
        reject_high=algo.reject_high,
        veto=algo.veto,
        kl_coef=algo.kl_coef,
        kl_in=algo.kl_in,
        kl_kind=algo.kl_estimator,
        kl_unbiased=algo.kl_unbiased,
        entropy_coef=algo.entropy_coef,
        reduction=algo.reduction,
        opsm_delta=algo.opsm_delta,
        has_loss_fn=bool(algo.loss_fn),
    )
