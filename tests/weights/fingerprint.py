"""A fingerprint of weights: what an engine says with them."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import numpy as np

from myxa.core.messages import SamplingParams
from myxa.core.protocols import GenerateRequest


async def greedy(engine: Any, name: str) -> tuple[list[int], list[float], list[int]]:
    """Tokens, log-probs and version stamps (each once) of a greedy answer."""
    request = GenerateRequest(
        request_id=name,
        input_ids=np.arange(3, 13, dtype=np.int32),
        sampling=SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True),
    )
    ids: list[int] = []
    logprobs: list[float] = []
    versions: set[int] = set()
    async with aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            ids += delta.output_ids.tolist()
            logprobs += delta.logprobs.tolist()
            versions |= set(delta.versions.tolist())
    return ids, logprobs, sorted(versions)
