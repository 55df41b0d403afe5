"""The contract and the actor that the programs of this folder share."""

from myxa.core.actor import Actor
from myxa.core.handlers import call


class JudgeContract(Actor):
    @call(deadline=5)
    async def score(self, text: str) -> float:
        raise NotImplementedError


class Judge(JudgeContract):
    async def score(self, text: str) -> float:
        return len(text) / 10
