"""Settings of the coordinator, as the run file gives them, and those of them that are live knobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...core.config.data import EvalSetSettings
from ...core.knobs import KnobValue, Tunable
from ...core.messages import SamplingParams
from ..knobs.owner import Knob, knob_maker
from ..weights.rollout_update import Adoption, AdoptionLimits


@dataclass(slots=True)
class CoordinatorOptions:
    """See the module's head. The coordinator has a copy, in which it changes what its knobs say."""

    name: str
    num_steps: int
    has_engines: bool
    """False for supervised runs: nothing to adopt, nothing to evaluate on."""
    audit_path: Path
    journal_path: Path
    """What a restarted coordinator must know; see `journal.py`."""
    launch: str
    """Names the launcher: a journal of another launcher is not used."""
    max_wall_s: float = 0.0
    stop_reward: float = 0.0
    eval_every: int = 0
    eval_at_start: bool = True
    eval_prompts: int = 0
    """0: no evaluation set."""
    eval_samples: int = 1
    eval_temperature: float = 1.0
    eval_sampling: SamplingParams = field(default_factory=SamplingParams)
    """But for its temperature."""
    eval_sets: Mapping[str, EvalSetSettings] = field(default_factory=dict[str, EvalSetSettings])
    """In the order of names; the only one is called ""."""
    start_timeout_s: float = 300.0
    limits: AdoptionLimits = field(default_factory=lambda: AdoptionLimits(prepare_s=60.0, commit_s=30.0))
    adopt_at_once: int = 1
    """Engines that bring a version in at the same time."""
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
    live: CoordinatorOptions, *, age_s: Callable[[], float], on_wall_clock: Callable[[], None], adoption: Adoption
) -> tuple[Knob, ...]:
    """`live`: what the coordinator uses now. `age_s`: for how long the run has trained. `on_wall_clock`: called when
    its end by time was moved. `adoption` keeps the number of engines that adopt at once."""
    has_eval = live.eval_prompts > 0

    def judge(name: str) -> Callable[[KnobValue], str] | None:
        if name == "max_wall_s":
            return lambda value: _judge_end(float(value), age_s())
        if not has_eval and name in ("eval_every", "eval_prompts", "eval_samples", "eval_temperature", "stop_reward"):
            return lambda _: f"{name}: this run has no held-out prompts; eval.data in the run file names them"
        return None

    def held(name: str) -> tuple[object, str]:
        return (adoption, "at_once") if name == "adopt_at_once" else (live, name)

    def use(name: str) -> Callable[[KnobValue], None]:
        def put(value: KnobValue) -> None:
            setattr(*held(name), value)
            if name == "max_wall_s":
                on_wall_clock()

        return put

    def read(name: str) -> Callable[[], KnobValue]:
        return lambda: getattr(*held(name))

    return tuple(Knob(t, read(t.name), use(t.name), judge(t.name)) for t in COORDINATOR_TUNABLES)


def _judge_end(max_wall_s: float, age_s: float) -> str:
    if 0 < max_wall_s <= age_s:
        return f"max_wall_s = {max_wall_s:g}: the run is {age_s:.0f} s old and would end at once; `myxa down` ends it"
    return ""
