"""The groups of a claimed batch, in as many messages as they need.

Texts and metadata of a large batch are more than one message may hold. How much they come to is known to the buffer
alone, so the leader asks for all of them, and for fewer at a time once that was too much.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from ...core.errors import MessageTooLarge, TrainError
from ...core.messages import GroupMeta
from ...core.samples import Group

MAX_SAMPLES = 8192
"""In one message, which holds 65,536 arrays at most; a sample has five."""


class Fetching:
    """Remembers how many groups came at a time."""

    def __init__(self, fetch: Callable[[tuple[int, ...]], Awaitable[tuple[Group, ...]]]) -> None:
        """`fetch`: asks the buffer; raises MessageTooLarge if the answer is."""
        self._fetch = fetch
        self.at_once = MAX_SAMPLES

    async def groups(self, metas: Sequence[GroupMeta]) -> tuple[Group, ...]:
        """In that order. Raises TrainError for a group that is too large by itself, and what `fetch` raises."""
        found: list[Group] = []
        num_samples = max((len(meta.num_tokens) for meta in metas), default=1)
        while left := metas[len(found) :]:
            piece = left[: min(self.at_once, max(1, MAX_SAMPLES // num_samples))]
            try:
                found += await self._fetch(tuple(meta.group_id for meta in piece))
            except MessageTooLarge as error:
                if len(piece) == 1:
                    raise TrainError(
                        f"group {piece[0].group_id} cannot be handed to the trainer: {error.message}",
                        remedy="lower rollout.num_samples or rollout.max_new_tokens, or give the row less metadata",
                    ) from error
                self.at_once = len(piece) // 2
        return tuple(found)
