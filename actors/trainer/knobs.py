"""The trainer's live knobs: declarations, values in force, and what steps and plans take of them.

The leader (trainer/0) owns them for all ranks: what ranks use travels with every shard, so all of them use it in the
same step. The training backend decides whether values are compatible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.config import AlgoConfig, OptimizerConfig
from ...core.knobs import KnobSheet, KnobValue, Tunable
from ..knobs.owner import Knob, knob_maker
from .step_plan import StepPlanOptions

OWNER = "trainer"
_knob = knob_maker(OWNER, "step")


def _algo(*names: str, **more: Any) -> tuple[Tunable, ...]:
    """Judged by the training backend, together with the other values."""
    return tuple(_knob(f"algo.{name}", is_judged=True, **more) for name in names)


# fmt: off
STEP_TUNABLES: tuple[Tunable, ...] = (
    _knob("optimizer.lr", guard_factor=10),
    _knob("optimizer.weight_decay"),
    _knob("optimizer.max_grad_norm"),
    _knob("optimizer.min_lr_ratio"),
    _knob("optimizer.decay_steps", unit="updates"),
    *_algo("clip_low", "clip_high", "dual_clip", "sapo_tau_pos", "sapo_tau_neg", "tis_cap", "tis_floor", "mis_low",
           "mis_high", "reject_low", "reject_high", "veto"),
    *_algo("opsm_delta", unit="nats"),
    *_algo("kl_coef", note="Above 0 only in a run that began so."),
    *_algo("entropy_coef"),
    *_algo("minibatches", unit="updates"),
    *_algo("epochs"),
    *_algo("ref_update_every", unit="steps"),
)
"""What ranks use in a step; names are those of the fields of the run file's sections."""

LEADER_TUNABLES: tuple[Tunable, ...] = (
    _knob("run.num_steps", "A schedule's end does not move with it: see decay_steps.", unit="steps", is_judged=True),
    _knob("trainer.max_tokens_per_microbatch", unit="tokens"),
    _knob("trainer.checkpoint_every", unit="steps"),
    _knob("trainer.keep_last", unit="checkpoints"),
    _knob("weights_every",
          "Steps between two weight versions that engines are given; the last one, and one without which nothing is "
          "dispatched, is given whenever it is made. Samples grow older by up to so many steps less one.",
          kind="int", boundary="weights", unit="steps", low=1, high=1000),
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

    def __init__(self, file_values: Mapping[str, KnobValue]) -> None:
        self._first = dict(file_values)
        self._values = dict(file_values)
        self._changed: set[str] = set()
        self.is_at_end = False
        """The run makes no more steps."""

    def knobs(self) -> tuple[Knob, ...]:
        return tuple(self._knob(t) for t in TUNABLES if t.name in self._first)

    def _knob(self, tunable: Tunable) -> Knob:
        name = tunable.name

        def use(value: KnobValue) -> None:
            self._values[name] = value
            self._changed.add(name)

        return Knob(tunable, lambda: self._values[name], use)

    def count(self, name: str, otherwise: int = 0) -> int:
        """A whole number in force; `otherwise` where there is no such knob."""
        return int(self._values.get(name, otherwise))

    def refuses_end(self, values: Mapping[str, KnobValue], earliest: int) -> str:
        """Why it cannot end with `num_steps`; the step from version `earliest` is the first that could know of it."""
        num_steps = values.get("num_steps")
        if num_steps is not None and self.is_at_end:
            return f"num_steps = {num_steps}: the last step is made and the run ends; continue with trainer.resume"
        if num_steps == 0 and self._first["num_steps"]:
            return "num_steps = 0: a run that was to end would never end"
        if num_steps and int(num_steps) <= earliest:
            return f"num_steps = {num_steps}: the trainer makes version {earliest + 1} next"
        return ""

    def for_step(self) -> dict[str, float]:
        """What ranks must know: the values that are not the run file's, which they have."""
        return of_ranks({name: v for name, v in self._values.items() if v != self._first[name]})

    def plan_options(self, options: StepPlanOptions) -> StepPlanOptions:
        """`options` with the values in force."""
        return replace(
            options,
            minibatches=self.count("minibatches", options.minibatches),
            max_tokens=self.count("max_tokens_per_microbatch", options.max_tokens),
        )

    def metrics(self) -> dict[str, float]:
        """Knobs that were ever changed, as they are now; those that are numbers."""
        values = ((name, self._values[name]) for name in sorted(self._changed))
        return {f"knob/{name}": float(value) for name, value in values if not isinstance(value, str)}


def with_pending(sheet: KnobSheet, values: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """Everything as it will be once `values`, and all that waits for its boundary, are in force."""
    pending = {s.tunable.name: s.value if s.pending is None else s.pending for s in sheet.knobs}
    return pending | dict(values)


def of_ranks(values: Mapping[str, KnobValue]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if name in _OF_RANKS}
