"""The trainer's live knobs: declarations, values in force, and what steps and plans take of them.

The leader (trainer/0) owns them for all ranks: what ranks use travels with every shard, so all of them use it in the
same step. The training backend decides whether values are compatible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.config import AlgoConfig, OptimizerConfig
from ...core.knobs import KnobSheet, KnobValue, Tunable, knob_maker
from ..knobs.owner import Knob
from .step_plan import StepPlanOptions

OWNER = "trainer"
_knob = knob_maker(OWNER, "step")
_ABOVE_0: dict[str, Any] = {"low": 0.0, "is_low_open": True}
_FROM_0: dict[str, Any] = {"low": 0.0}
_SHARE: dict[str, Any] = {"low": 0.0, "high": 1.0}
_WITH_OTHERS: dict[str, Any] = {"is_judged": True}
"""Judged by the training backend, together with the other values."""

# fmt: off
STEP_TUNABLES: tuple[Tunable, ...] = (
    _knob("lr", "float", "optimizer.lr", "Learning rate at the top of the schedule.", guard_factor=10, **_ABOVE_0),
    _knob("weight_decay", "float", "optimizer.weight_decay", "Decoupled weight decay of matrices.", **_FROM_0),
    _knob("max_grad_norm", "float", "optimizer.max_grad_norm",
          "Global gradient norm above which gradients are scaled down.", **_ABOVE_0),
    _knob("min_lr_ratio", "float", "optimizer.min_lr_ratio",
          "Share of lr at which the schedule ends; constant has no end.", **_SHARE),
    _knob("decay_steps", "int", "optimizer.decay_steps",
          "Optimizer updates at which the schedule ends; 0 = at the end of the run.",
          unit="updates", low=0, **_WITH_OTHERS),
    _knob("clip_low", "float", "algo.clip_low",
          "The ratio is clipped below at 1 - clip_low; dppo: bound of the divergence where A < 0.",
          **_ABOVE_0, **_WITH_OTHERS),
    _knob("clip_high", "float", "algo.clip_high",
          "The ratio is clipped above at 1 + clip_high; dppo: bound of the divergence where A > 0.",
          **_ABOVE_0, **_WITH_OTHERS),
    _knob("dual_clip", "float", "algo.dual_clip",
          "Bound (above 1) on the loss of negative advantages, for the ppo and gspo losses; 0 = off.",
          **_FROM_0, **_WITH_OTHERS),
    _knob("sapo_tau_pos", "float", "algo.sapo_tau_pos",
          "Temperature of the sapo loss where the advantage is positive.", **_ABOVE_0, **_WITH_OTHERS),
    _knob("sapo_tau_neg", "float", "algo.sapo_tau_neg",
          "Temperature of the sapo loss where the advantage is not positive.", **_ABOVE_0, **_WITH_OTHERS),
    _knob("tis_cap", "float", "algo.tis_cap",
          "Upper bound of the importance weight of tis, icepop and decoupled.", **_ABOVE_0, **_WITH_OTHERS),
    _knob("tis_floor", "float", "algo.tis_floor",
          "Lower bound of the importance weight of tis; 0 = none.", **_FROM_0, **_WITH_OTHERS),
    _knob("mis_low", "float", "algo.mis_low",
          "Lower bound of the importance weight of mis and icepop.", **_ABOVE_0, **_WITH_OTHERS),
    _knob("mis_high", "float", "algo.mis_high",
          "Upper bound of the importance weight of mis.", **_ABOVE_0, **_WITH_OTHERS),
    _knob("reject_low", "float", "algo.reject_low",
          "Importance weight below which mis removes tokens or samples; needs reject_high.", **_FROM_0, **_WITH_OTHERS),
    _knob("reject_high", "float", "algo.reject_high",
          "Importance weight above which mis removes tokens or samples; 0 = none is rejected.",
          **_FROM_0, **_WITH_OTHERS),
    _knob("veto", "float", "algo.veto",
          "Importance weight of a token below which mis removes its whole sample; 0 = off.", **_SHARE, **_WITH_OTHERS),
    _knob("opsm_delta", "float", "algo.opsm_delta",
          "Mean of (behaviour - live) log-probs above which a sample of negative advantage loses its policy loss; "
          "0 = off.",
          unit="nats", **_FROM_0, **_WITH_OTHERS),
    _knob("kl_coef", "float", "algo.kl_coef",
          "Weight of the KL term towards the reference model; above 0 only in a run that began so and keeps that "
          "model.",
          **_FROM_0, **_WITH_OTHERS),
    _knob("entropy_coef", "float", "algo.entropy_coef",
          "Weight of the entropy bonus; 0 = off.", **_FROM_0, **_WITH_OTHERS),
    _knob("minibatches", "int", "algo.minibatches",
          "Optimizer updates in one pass over the batch; divides algo.batch_size.", unit="updates", low=1,
          **_WITH_OTHERS),
    _knob("epochs", "int", "algo.epochs", "Passes over the batch in one step.", low=1, **_WITH_OTHERS),
    _knob("ref_update_every", "int", "algo.ref_update_every",
          "Steps after which the policy becomes the reference model, again and again; 0 = never.",
          unit="steps", low=0, **_WITH_OTHERS),
)
"""What ranks use in a step; names are those of the fields of the run file's sections."""

LEADER_TUNABLES: tuple[Tunable, ...] = (
    _knob("num_steps", "int", "run.num_steps",
          "Training steps of the whole run; 0 = until the data ends or the run is stopped, where the run file says so. "
          "A schedule's end does not move with it: see decay_steps.", unit="steps", low=0, is_judged=True),
    _knob("max_tokens_per_microbatch", "int", "trainer.max_tokens_per_microbatch",
          "Tokens (prompt and answer, all samples) in one forward pass; more is faster and takes more memory.",
          unit="tokens", low=1),
    _knob("checkpoint_every", "int", "trainer.checkpoint_every",
          "Steps between checkpoints; 0 = none during the run.", unit="steps", low=0, is_judged=True),
    _knob("keep_last", "int", "trainer.keep_last",
          "Checkpoints kept; older ones are deleted when the next one is there.", unit="checkpoints", low=1),
    _knob("weights_every", "int", "",
          "Steps between two weight versions that engines are given; the last one, and one without which nothing is "
          "dispatched, is given whenever it is made. Samples grow older by up to so many steps less one.",
          boundary="weights", unit="steps", low=1, high=1000),
)
"""What the leader uses by itself."""
# fmt: on

TUNABLES = STEP_TUNABLES + LEADER_TUNABLES
_OF_RANKS = frozenset(t.name for t in STEP_TUNABLES)


def step_values(algo: AlgoConfig, optimizer: OptimizerConfig) -> dict[str, KnobValue]:
    """First values of the knobs that ranks use, from the run file."""
    sections = {"algo": algo, "optimizer": optimizer}
    return {t.name: getattr(sections[t.key.partition(".")[0]], t.name) for t in STEP_TUNABLES}


class TrainerKnobs:
    """Values in force. A knob exists where it has a first value."""

    def __init__(self, first: Mapping[str, KnobValue]) -> None:
        """`first`: what the run file says."""
        self._first = dict(first)
        self._values = dict(first)
        self._moved: set[str] = set()
        self.is_at_end = False
        """The run makes no more steps."""

    def knobs(self) -> tuple[Knob, ...]:
        return tuple(self._knob(t) for t in TUNABLES if t.name in self._first)

    def _knob(self, tunable: Tunable) -> Knob:
        name = tunable.name

        def use(value: KnobValue) -> None:
            self._values[name] = value
            self._moved.add(name)

        return Knob(tunable, lambda: self._values[name], use)

    def count(self, name: str, otherwise: int = 0) -> int:
        """A whole number in force; `otherwise` where there is no such knob."""
        return int(self._values.get(name, otherwise))

    def refuses_end(self, values: Mapping[str, KnobValue], earliest: int) -> str:
        """Why the run cannot end with `num_steps`, if that is among the values; the step from version `earliest` is the
        first that could know of it."""
        wanted = values.get("num_steps")
        if wanted is not None and self.is_at_end:
            return f"num_steps = {wanted}: the last step is made and the run ends; continue with trainer.resume"
        if wanted == 0 and self._first["num_steps"]:
            return "num_steps = 0: a run that was to end would never end"
        if wanted and int(wanted) <= earliest:
            return f"num_steps = {wanted}: the trainer makes version {earliest + 1} next"
        return ""

    def for_step(self) -> dict[str, float]:
        """What ranks must know: the values that are not the run file's, which they have."""
        return of_ranks({name: v for name, v in self._values.items() if v != self._first[name]})

    def planned(self, options: StepPlanOptions) -> StepPlanOptions:
        minibatches, max_tokens = (
            int(self._values.get(name, given))
            for name, given in (("minibatches", options.minibatches), ("max_tokens_per_microbatch", options.max_tokens))
        )
        if (minibatches, max_tokens) == (options.minibatches, options.max_tokens):
            return options
        return replace(options, minibatches=minibatches, max_tokens=max_tokens)

    def metrics(self) -> dict[str, float]:
        """Knobs that were ever changed, as they are now; those that are numbers."""
        moved = {name: self._values[name] for name in sorted(self._moved)}
        return {f"knob/{name}": float(value) for name, value in moved.items() if not isinstance(value, str)}


def after(sheet: KnobSheet, values: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """Everything as it will be once `values`, and all that waits for its boundary, are in force."""
    pending = {s.tunable.name: s.value if s.pending is None else s.pending for s in sheet.knobs}
    return pending | dict(values)


def of_ranks(values: Mapping[str, KnobValue]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if name in _OF_RANKS}
