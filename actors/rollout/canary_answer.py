"""Canary prompts answered by the engine alone, for comparison with the trainer: no workflow, no reward."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ...core.messages import CanaryAnswers, EvalRequest
from ...core.protocols import Tokenizer
from ...core.samples import Prompt, Sample
from ..workflows.episode import Episode, ModelAccess


async def answer_canary(
    model: ModelAccess, tokenizer: Tokenizer, request: EvalRequest, *, name: str, prefix: str
) -> CanaryAnswers:
    """One turn for every prompt, side by side. Raises what the engine raises, DataError for a prompt that is too long.

    `prefix`: makes the request ids unique among all that this actor sends.
    """
    access = replace(model, sampling=request.sampling, request_prefix=prefix)

    async def answer(prompt: Prompt, index: int) -> Sample:
        episode = Episode(prompt=prompt, index=index, tokenizer=tokenizer, model=access)
        await episode.generate()
        return episode.sample()

    jobs = [answer(prompt, index) for prompt in request.prompts for index in range(request.num_samples)]
    return CanaryAnswers(rollout=name, samples=tuple(await asyncio.gather(*jobs)))
