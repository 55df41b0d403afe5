"""Self-play against a frozen model of the run's own: who sorts the same digits better?

Both sort the prompt of the row. The policy wins if more of its digits are in their places than of the opponent's; a
draw is half a win. The opponent is the model that the policy began as, and never gets new weights.
"""

from __future__ import annotations

import asyncio

from myxa.actors.workflows.episode import WorkflowContext
from myxa.core.samples import Prompt, Sample


def share(answer: str, label: str) -> float:
    """Of digits that are in their places."""
    return sum(a == b for a, b in zip(answer, label, strict=False)) / max(len(answer), len(label))


async def match(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    """One match."""
    mine, theirs = await asyncio.gather(ctx.episode.generate(), ctx.models["opponent"].generate(prompt.messages))
    won = share(mine.text, prompt.label) - share(theirs.text, prompt.label)
    reward = 1.0 if won > 0 else 0.5 if won == 0 else 0.0
    return ctx.episode.sample(reward=reward, metadata={"opponent": theirs.text})
