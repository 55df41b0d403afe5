"""What judges generated samples: rewards, and a served reference model. The protocols that the role needs of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from ...core.completions import Completion
from ...core.samples import Prompt, Sample


class ScoredOutcome(Protocol):
    """A reward and its named parts."""

    @property
    def value(self) -> float: ...
    @property
    def parts(self) -> dict[str, float]: ...


class Scorer(Protocol):
    """Scores completions; raises UserCodeError naming function, sample and cause."""

    @property
    def judges_groups(self) -> bool: ...

    async def score(self, completion: Completion) -> ScoredOutcome: ...

    async def score_group(self, completions: Sequence[Completion]) -> Sequence[ScoredOutcome]: ...


class _Guarded(Protocol):
    """Something with an error budget, and what else it has to close."""

    @property
    def too_many_errors(self) -> str: ...

    def allow(self, max_error_rate: float) -> None: ...

    def listen(self, tell: Callable[[str, str], None]) -> None:
        """`tell` (kind, text) is called when calls stop and when they resume."""
        ...

    def gauges(self) -> dict[str, float]: ...

    async def close(self) -> None: ...


class PooledScorer(Scorer, _Guarded, Protocol):
    """A scorer with worker processes and an error budget."""


class Reference(_Guarded, Protocol):
    """A reference model that is not the trainer's."""

    async def judged(self, prompt: Prompt, sample: Sample) -> Sample:
        """The sample with its reference log-probs. Raises ReferenceFailed."""
        ...


class ScorerAndReference:
    """Both, for an actor's checks of errors, its reports and its end."""

    def __init__(self, scorer: PooledScorer, reference: Reference) -> None:
        self._scorer = scorer
        self._reference = reference
        self._both: tuple[_Guarded, ...] = (scorer, reference)

    @property
    def judges_groups(self) -> bool:
        return self._scorer.judges_groups

    async def score(self, completion: Completion) -> ScoredOutcome:
        return await self._scorer.score(completion)

    async def score_group(self, completions: Sequence[Completion]) -> Sequence[ScoredOutcome]:
        return await self._scorer.score_group(completions)

    @property
    def too_many_errors(self) -> str:
        """Of the first of them that ends the run."""
        return next((words for one in self._both if (words := one.too_many_errors)), "")

    def allow(self, max_error_rate: float) -> None:
        for one in self._both:
            one.allow(max_error_rate)

    def listen(self, tell: Callable[[str, str], None]) -> None:
        for one in self._both:
            one.listen(tell)

    def gauges(self) -> dict[str, float]:
        return {key: value for one in self._both for key, value in one.gauges().items()}

    async def close(self) -> None:
        """Neither waits for the other, or fails by it."""
        done = await asyncio.gather(*(one.close() for one in self._both), return_exceptions=True)
        for error in filter(None, done):
            raise error
