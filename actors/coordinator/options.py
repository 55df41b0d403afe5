"""Plain settings of the coordinator, as the run file gives them. `knobs.py` has those that may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...core.config.data import EvalSetSettings
from ...core.messages import SamplingParams


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
    prepare_s: float = 60.0
    commit_s: float = 30.0
    """Of an engine that reads the new version's bytes; `sent_commit_s`: of one that they are sent to meanwhile."""
    sent_commit_s: float = 0.0
    stall_s: float = 20.0
    """An engine's update may make no progress for so long; 0: only the deadlines of its phases count."""
    adopt_at_once: int = 1
    """Engines that bring a version in at the same time."""
    takes_turns: bool = False
    """Trainer and engines share devices in turns: a version is released as soon as every engine has it, and engines
    may lose their weights between two versions."""
