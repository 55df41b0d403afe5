"""Settings of the coordinator, as the run file gives them, and those of them that are live knobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...core.config.data import EvalSetSettings, EvalSettings
from ...core.config.run import RunSettings, WeightSettings
from ...core.knobs import KnobValue, Tunable
from ...core.messages import SamplingParams
from ..knobs.owner import Knob, knob_maker
from ..weights.rollout_update import AdoptionLimits


@dataclass(slots=True)
class CoordinatorOptions:
    """See the module's head. The coordinator has a copy, in which it changes what its knobs say."""

    has_engines: bool
    """False for supervised runs: nothing to adopt, nothing to evaluate on."""
    audit_path: Path
    journal_path: Path
    """What a restarted coordinator must know; see `journal.py`."""
    launch: str
    """Names the launcher: a journal of another launcher is not used."""
    run: RunSettings = field(default_factory=RunSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    weights: WeightSettings = field(default_factory=WeightSettings)
    eval_sampling: SamplingParams = field(default_factory=SamplingParams)
    """But for its temperature."""
    eval_sets: Mapping[str, EvalSetSettings] = field(default_factory=dict[str, EvalSetSettings])
    """In the order of names; the only one is called ""."""
    start_timeout_s: float = 300.0
    limits: AdoptionLimits = field(default_factory=lambda: AdoptionLimits(prepare_s=60.0, commit_s=30.0))
    takes_turns: bool = False
    """Trainer and engines share devices in turns: a version is released as soon as every engine has it, and engines
    may lose their weights between two versions."""


_knob = knob_maker("coordinator", "now")

# fmt: off
COORDINATOR_TUNABLES: tuple[Tunable, ...] = (
    _knob("eval.every", name="eval_every", unit="steps", is_judged=True),
    _knob("eval.num_prompts", name="eval_prompts", unit="prompts", is_judged=True),
    _knob("eval.num_samples", name="eval_samples", unit="answers", high=1024, is_judged=True),
    _knob("eval.temperature", name="eval_temperature", is_judged=True),
    _knob("run.stop_reward", is_judged=True),
    _knob("run.max_wall_s", unit="s", is_judged=True),
    _knob("weights.adopt_at_once", "Those that do already are left to it.", unit="engines"),
)
# fmt: on


def coordinator_knobs(
    live: CoordinatorOptions, *, age_s: Callable[[], float], on_change: Callable[[], None]
) -> tuple[Knob, ...]:
    """`live`: what the coordinator uses now. `age_s`: for how long the run has trained. `on_change`: called when a
    value is another one."""

    def knob(tunable: Tunable) -> Knob:
        section, _, key = tunable.key.partition(".")

        def use(value: KnobValue) -> None:
            setattr(live, section, getattr(live, section).model_copy(update={key: value}))
            on_change()

        def judge(value: KnobValue) -> str:
            if key == "max_wall_s":
                return _judge_end(float(value), age_s())
            if not live.eval.has_prompts and (section == "eval" or key == "stop_reward"):
                return f"{tunable.name}: this run has no held-out prompts; eval.data in the run file names them"
            return ""

        return Knob(tunable, lambda: getattr(getattr(live, section), key), use, judge)

    return tuple(map(knob, COORDINATOR_TUNABLES))


def _judge_end(max_wall_s: float, age_s: float) -> str:
    if 0 < max_wall_s <= age_s:
        return f"max_wall_s = {max_wall_s:g}: the run is {age_s:.0f} s old and would end at once; `myxa down` ends it"
    return ""
