"""Answers of lognormal length: what `long_tail.py` has the engine generate."""

from __future__ import annotations

import math
import random

from myxa.actors.workflows.episode import WorkflowContext
from myxa.core.messages import SamplingParams
from myxa.core.samples import Prompt, Sample

MEDIAN, SIGMA, MOST = 64, 1.5, 1024


async def answer(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    """One turn of so many tokens, whatever they are. A sample has the same length in every run."""
    gauss = random.Random(prompt.group_id * 1009 + ctx.index).gauss(0.0, 1.0)
    wanted = min(MOST, max(1, int(MEDIAN * math.exp(SIGMA * gauss))))
    await ctx.episode.generate(SamplingParams(max_new_tokens=wanted, ignore_eos=True))
    return ctx.episode.sample()
