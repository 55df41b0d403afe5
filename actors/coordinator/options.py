"""Settings of the coordinator, as the run file gives them, and those of them that are live knobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...core.config import RunConfig
from ...core.config.data import EvalSetSettings, EvalSettings
from ...core.config.run import RunSettings, WeightSettings
from ...core.knobs import Tunable
from ...core.messages import SamplingParams
from ..knobs.owner import knob_maker
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
    file: RunConfig | None = None
    """The run file, which changes of knobs are judged by; None: by their owners alone."""
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
    """A version is released once every engine has it; engines may lose their weights between two versions."""


_knob = knob_maker("coordinator", "now")

# fmt: off
COORDINATOR_TUNABLES: tuple[Tunable, ...] = (
    _knob("eval.every", name="eval_every", unit="steps"),
    _knob("eval.num_prompts", name="eval_prompts", unit="prompts"),
    _knob("eval.num_samples", name="eval_samples", unit="answers", high=1024),
    _knob("eval.temperature", name="eval_temperature"),
    _knob("run.stop_reward"),
    _knob("run.max_wall_s", unit="s", is_judged=True),
    _knob("weights.adopt_at_once", "Those that do already are left to it.", unit="engines"),
)
# fmt: on
