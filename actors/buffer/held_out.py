"""Prompts of the buffer's data that are no draws: the held-out ones, and those that compare an engine with the trainer.

Part of the buffer. Knows the prompt source; must not know the ledger.
"""

from __future__ import annotations

import msgspec

from ...core.protocols import PromptSource
from ...core.samples import Prompt
from ..contracts.roles import DataContract

CANARY_ID = -1_000_000
"""Group id of the first canary prompt; the others follow downwards, far from held-out prompts."""


class HeldOutPrompts(DataContract):
    """See the module's head."""

    _source: PromptSource

    async def eval_prompts(self, limit: int) -> tuple[Prompt, ...]:
        return self._source.eval_prompts(max(limit, 0))

    async def canary_prompts(self, limit: int) -> tuple[Prompt, ...]:
        drawn = (self._source.prompt(draw) for draw in range(max(limit, 0)))
        return tuple(
            msgspec.structs.replace(prompt, group_id=CANARY_ID - draw)
            for draw, prompt in enumerate(drawn)
            if prompt is not None
        )
