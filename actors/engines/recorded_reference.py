"""Reference log-probs as they were recorded with the answers: `algo.ref_urls = ["recorded"]`.

Knows the engine that has the recordings. Must not know servers, or who wants them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from ...core.errors import ReferenceFailed
from ...core.samples import Prompt, Sample
from .recorded import RecordedEngine


class RecordedReference:
    """One per rollout actor."""

    too_many_errors = ""

    def __init__(self, engine: RecordedEngine) -> None:
        self._engine = engine

    async def judged(self, prompt: Prompt, sample: Sample) -> Sample:
        """The sample with the log-probs of its recording, of which it may be the beginning. Raises ReferenceFailed."""
        found = await self._engine.sample(prompt, sample.index)
        size = len(sample.response_ids)
        told = None if found is None else found.reference_logprobs
        if (
            found is None
            or told is None
            or not np.array_equal(found.prompt_ids, sample.prompt_ids)
            or not np.array_equal(found.response_ids[:size], sample.response_ids)
        ):
            if not sample.loss_mask.any():
                return sample
            raise ReferenceFailed(
                f"group {prompt.group_id}, sample {sample.index}: no reference log-probs of these tokens are recorded",
                remedy="use a dump of a run with algo.ref_urls, and the workflow that it was recorded with",
            )
        return replace(sample, reference_logprobs=np.where(sample.loss_mask != 0, told[:size], np.float32(0)))

    def allow(self, max_error_rate: float) -> None:
        """Nothing to fail."""

    def listen(self, tell: Callable[[str, str], None]) -> None:
        """Nothing to tell."""

    def gauges(self) -> dict[str, float]:
        """Nothing to show."""
        return {}

    async def close(self) -> None:
        """The engine is closed by its owner."""
