"""Supervised fine-tuning through the rollout actor: the "generation" is the row's own demonstration.

A row carries `metadata["demonstration"]` (one assistant answer) or `metadata["demonstration_turns"]` (a list of
`{"role", "content"}` in order); `actors/data` puts them there from the configured answer column.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.errors import DataError
from ...core.samples import Message, Prompt, Sample
from .context import WorkflowContext


async def generate(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    """The demonstration as a sample: assistant turns masked in, everything else masked out."""
    return ctx.episode.demonstration(shown_turns(prompt))


def shown_turns(prompt: Prompt) -> list[Message]:
    """The turns of the row's demonstration. Raises DataError."""
    metadata: dict[str, Any] = prompt.metadata
    if "demonstration_turns" in metadata:
        try:
            turns = msgspec.convert(metadata["demonstration_turns"], list[Message])
        except msgspec.ValidationError as err:
            raise DataError(
                f"row {prompt.row} of {prompt.source}: demonstration turns are not messages ({err})",
                remedy='write them as [{"role": ..., "content": ...}, ...]',
            ) from err
        if not turns or turns[0].role != "assistant":
            raise DataError(
                f"row {prompt.row} of {prompt.source}: the demonstration does not begin with an assistant's turn",
                remedy="put what stands before it into the prompt",
            )
        return turns
    answer = metadata.get("demonstration")
    if not isinstance(answer, str):
        raise DataError(
            f"row {prompt.row} of {prompt.source} has no demonstration",
            remedy='name the answer column with data.answer_key, or use preset = "chat"',
        )
    return [Message(role="assistant", content=answer)]
