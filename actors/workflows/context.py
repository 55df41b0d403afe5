"""What a workflow is given: the episode, the settings, and nothing of the engine behind them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...core.protocols import Tokenizer
from ...core.samples import Prompt, Sample
from .episode import Episode


@dataclass(frozen=True, slots=True)
class WorkflowContext:
    """Handed to a workflow for one sample."""

    episode: Episode
    tokenizer: Tokenizer
    max_turns: int
    """`rollout.max_turns` of the run file."""
    index: int
    """Member number inside the group."""
    session_id: str = ""
    """Of this member of this group in this run: the same in every attempt, in whatever process it is made."""
    attempt: int = 0
    """How often this member was begun before, as far as the run knows: by an actor that died, or by an attempt that
    failed through its environment."""

    @property
    def is_replay(self) -> bool:
        """Whether an earlier attempt may have had side effects already."""
        return self.attempt > 0


Workflow = Callable[[WorkflowContext, Prompt], Awaitable[Sample]]
"""A workflow turns a prompt into a finished sample, usually by `ctx.episode`."""
