"""What a reward function is given: one finished answer as text, with everything that belongs to its prompt.

Tokens are left out on purpose: a reward that needs ids decodes differently from what was trained.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .samples import FinishReason, Message


class Completion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finished answer to one prompt. Plain values only, so that it can go to another process."""

    group_id: int
    index: int
    """Member number inside the group, 0-based."""
    messages: tuple[Message, ...]
    """The conversation that was answered."""
    prompt: str
    """Text of its last message."""
    text: str
    """Text of the last model turn, without special tokens."""
    turns: tuple[str, ...] = ()
    conversation: tuple[Message, ...] = ()
    """All that was said after the prompt: model turns, and replies of tools and environments."""
    label: str = ""
    """The row's expected answer."""
    metadata: dict[str, Any] = {}
    """The row's metadata."""
    finish: FinishReason = "stop"
    """Why generation ended; "length": it was cut off."""
    num_tokens: int = 0
    """Response tokens, tool replies included."""
    reward: float | None = None
    """What the workflow said that it is worth; None: it said nothing."""
    sample_metadata: dict[str, Any] = {}
    """Further values from the workflow."""
    begins_in_thought: bool = False
    """Whether `text` begins inside a thought, for the chat template opened it."""

    @property
    def is_truncated(self) -> bool:
        return self.finish == "length"
