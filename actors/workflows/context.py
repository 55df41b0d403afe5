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


Workflow = Callable[[WorkflowContext, Prompt], Awaitable[Sample]]
"""A workflow turns a prompt into a finished sample, usually by `ctx.episode`."""
