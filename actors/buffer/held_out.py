"""Prompts of the buffer's data that are no draws: the held-out ones, and those that compare an engine with the trainer.

Part of the buffer. Knows the prompt source; must not know the ledger.
"""

from __future__ import annotations

import msgspec

from ...core.prompt_sources import MixedSources, PromptSource
from ...core.samples import Prompt
from ..contracts.roles import DataContract
from .sources import Sources

CANARY_ID = -1_000_000
"""Group id of the first canary prompt; the others follow downwards, far from held-out prompts."""


class HeldOutPrompts(DataContract):
    """See the module's head."""

    _source: PromptSource | MixedSources

    async def num_held_out(self, name: str = "") -> int:
        return self._source.num_held_out(name)

    async def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        return self._source.eval_prompts(max(limit, 0), name)

    async def canary_prompts(self, limit: int) -> tuple[Prompt, ...]:
        found = Sources(self._source).first_prompts(max(limit, 0))
        return tuple(
            msgspec.structs.replace(prompt, group_id=CANARY_ID - number) for number, prompt in enumerate(found)
        )
