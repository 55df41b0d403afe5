"""Loads for `async_gain.py`: a reward that takes its time, and answers whose lengths have a long tail.

Both draw from the sample's own identity, so every run of the comparison meets the same delays and lengths.
"""

from __future__ import annotations

import asyncio
import math
import random

import msgspec

from myxa.actors.workflows.episode import WorkflowContext
from myxa.core.completions import Completion
from myxa.core.messages import SamplingParams
from myxa.core.samples import Prompt, Sample

MEDIAN_S = 0.15
SIGMA = 1.0
MEDIAN_TOKENS = 24
TOKEN_SIGMA = 1.0
MAX_TOKENS = 360


def _gauss(group_id: int, index: int) -> float:
    return random.Random(group_id * 1009 + index).gauss(0.0, 1.0)


def _is_right(completion: Completion) -> float:
    return float(completion.turns[0] == completion.label)


async def slow_reward(completion: Completion) -> float:
    """Exact match after a lognormal wait (median 0.15 s, sigma 1) that costs no CPU: a tool, a judge, a sandbox."""
    await asyncio.sleep(MEDIAN_S * math.exp(SIGMA * _gauss(completion.group_id, completion.index)))
    return _is_right(completion)


def plain_reward(completion: Completion) -> float:
    """Exact match of the first turn."""
    return _is_right(completion)


async def long_tail(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    """The answer, then a lognormal number of further tokens that are generated but neither judged nor trained on."""
    episode = ctx.episode
    turn = await episode.generate()
    wanted = int(MEDIAN_TOKENS * math.exp(TOKEN_SIGMA * _gauss(prompt.group_id, ctx.index)))
    answer_tokens = len(turn.token_ids)
    if turn.finish == "stop" and episode.reply("user", ""):
        tail = SamplingParams(max_new_tokens=max(1, min(wanted, MAX_TOKENS)), ignore_eos=True)
        await episode.generate(tail)
    sample = episode.sample()
    mask = sample.loss_mask.copy()
    mask[answer_tokens:] = 0
    logprobs = sample.logprobs.copy()
    logprobs[answer_tokens:] = 0.0
    return msgspec.structs.replace(sample, loss_mask=mask, logprobs=logprobs, finish="stop")
