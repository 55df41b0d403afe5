"""Canary prompts answered by the engine alone, for comparison with the trainer: no workflow, no reward."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ...core.errors import EngineError
from ...core.messages import CanaryAnswers, EvalRequest
from ...core.protocols import Tokenizer
from ...core.samples import Prompt, Sample
from ..workflows.episode import Episode, Interrupted, ModelAccess


async def answer_canary(
    model: ModelAccess, tokenizer: Tokenizer, request: EvalRequest, *, name: str, prefix: str
) -> CanaryAnswers:
    """One turn for every prompt, side by side; the first that fails ends the others. Raises what the engine raises,
    DataError for a prompt that is too long, EngineError when the actor was told to stop.

    `prefix`: makes the request ids unique among all that this actor sends, also for the same question asked again.
    """
    access = replace(model, sampling=request.sampling, request_prefix=prefix)

    async def answer(prompt: Prompt, index: int) -> Sample:
        episode = Episode(prompt=prompt, index=index, tokenizer=tokenizer, model=access)
        try:
            await episode.generate()
        except Interrupted as err:
            raise EngineError(
                f"{name} was told to stop in the middle of a canary", remedy="ask another engine"
            ) from err
        return episode.sample()

    try:
        async with asyncio.TaskGroup() as group:
            jobs = [
                group.create_task(answer(prompt, index))
                for prompt in request.prompts
                for index in range(request.num_samples)
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return CanaryAnswers(rollout=name, samples=tuple(job.result() for job in jobs))
