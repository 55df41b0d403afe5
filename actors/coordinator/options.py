"""Plain settings of the coordinator, as the run file gives them. Some may be changed while the run goes on: see
`knobs.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...core.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """See the module's head."""

    name: str
    num_steps: int
    has_engines: bool
    """False for supervised runs: nothing to adopt, nothing to evaluate on."""
    audit_path: Path
    """Where is recorded what operators change."""
    journal_path: Path
    """Where is kept what a coordinator that is started anew must know."""
    launch: str
    """Names the launcher: what is kept under another one is no word of this run."""
    max_wall_s: float = 0.0
    stop_reward: float = 0.0
    eval_every: int = 0
    eval_at_start: bool = True
    eval_prompts: int = 0
    """0: no evaluation set."""
    eval_samples: int = 1
    eval_sampling: SamplingParams = field(default_factory=SamplingParams)
    canary_prompts: int = 8
    canary_sampling: SamplingParams = field(default_factory=SamplingParams)
    start_timeout_s: float = 300.0
    prepare_s: float = 60.0
    commit_s: float = 30.0
    """Of an engine that reads the new version's bytes; `sent_commit_s`: of one that they are sent to meanwhile."""
    sent_commit_s: float = 0.0
    stall_s: float = 20.0
    """An engine's update may stand still for so long; 0: only the deadlines of its phases count."""
    adopt_at_once: int = 1
    """Engines that bring a version in at the same time."""
    takes_turns: bool = False
    """Trainer and engines share devices in turns: a version is let go as soon as every engine has it, and engines may
    lose their weights between two versions."""
