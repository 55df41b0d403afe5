"""One prompt, one answer."""

from __future__ import annotations

from ...core.samples import Prompt, Sample
from .context import WorkflowContext


async def generate(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    """Ask the model once."""
    await ctx.episode.generate()
    return ctx.episode.sample()
