"""Which waiting requests join a step, and how their contexts are packed; no tensors, no side effects on rows.

Requests with the same context (the members of a group) are prefilled once, into the row of the first of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....core.samples import I32
from .arrays import Index
from .request import Running


@dataclass(frozen=True, slots=True)
class Admission:
    """Requests that get rows first, first + 1, ... in this order."""

    requests: list[Running]
    contexts: list[I32]
    """Distinct ones, shortest first, so that prompts of equal length lie side by side."""
    rows: list[int]
    """Row of each context."""
    copies: list[tuple[int, int, int]]
    """(row that is prefilled, row that gets a copy, tokens)."""
    lasts: Index
    """For each request: where the last token of its context lies in the packed contexts."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each context."""
        return [len(context) for context in self.contexts]


def take_waiting(waiting: deque[Running], num_free: int, max_tokens: int) -> list[Running]:
    """Take requests off the queue, in order, for the free rows.

    Their distinct contexts stay within `max_tokens`, except that one is always taken.
    """
    taken: list[Running] = []
    seen: set[bytes] = set()
    room = max_tokens
    while waiting and len(taken) < num_free:
        context = waiting[0].context
        key = context.tobytes()
        if key not in seen:
            if taken and len(context) > room:
                break
            seen.add(key)
            room -= len(context)
        taken.append(waiting.popleft())
    return taken


def plan_admission(requests: Sequence[Running], first: int) -> Admission:
    """Pack the contexts of requests that get rows from `first` on."""
    members: dict[bytes, list[int]] = {}
    for number, request in enumerate(requests):
        members.setdefault(request.context.tobytes(), []).append(number)
    groups = sorted(members.values(), key=lambda numbers: len(requests[numbers[0]].context))
    contexts = [requests[numbers[0]].context for numbers in groups]
    lasts: Index = np.zeros(len(requests), dtype=np.int64)
    for numbers, end in zip(groups, np.cumsum([len(c) for c in contexts]).tolist(), strict=True):
        lasts[numbers] = end - 1
    return Admission(
        requests=list(requests),
        contexts=contexts,
        rows=[first + numbers[0] for numbers in groups],
        copies=[
            (first + numbers[0], first + other, len(context))
            for numbers, context in zip(groups, contexts, strict=True)
            for other in numbers[1:]
        ],
        lasts=lasts,
    )
