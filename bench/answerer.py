"""The actor that the benchmarks of embedding call."""

from __future__ import annotations

from myxa.core.actor import Actor
from myxa.core.handlers import call


class AnswererContract(Actor):
    """What is called."""

    @call(deadline=30)
    async def answer(self, number: int) -> int:
        raise NotImplementedError


class Answerer(AnswererContract):
    """Answers at once, and counts."""

    mailbox_size = 16384

    def __init__(self) -> None:
        self.num_answered = 0

    async def answer(self, number: int) -> int:
        self.num_answered += 1
        return number
