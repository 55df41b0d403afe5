"""Held-out prompts answered and judged by one engine. They are not in the ledger."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from ...algos.rewards.outcome import pass_rates
from ...core.errors import EngineError
from ...core.messages import Assignment, EvalRequest, EvalResult, GroupText
from ...core.samples import Group
from ..group_text import group_text
from ..rewards.guard import Scorer, all_ended
from .group_runner import GroupRunner


class Evaluation:
    """Of one rollout actor."""

    def __init__(self, scorers: Mapping[str, Scorer] | None = None, *, num_shown: int = 0) -> None:
        """`scorers`: of sets judged otherwise. `num_shown`: prompts whose answers people can read later."""
        self._num_shown = num_shown
        self._show: Callable[[GroupText], None] | None = None
        self._scorers = dict(scorers or {})
        self._numbers = itertools.count(1)
        """Of questions: asked again while the first still runs, one must not be taken for the other."""

    def listen(self, tell: Callable[[str, str], None], show: Callable[[GroupText], None] | None = None) -> None:
        """`tell` (kind, text): calls of a set's own function stop or resume; `show`: answers."""
        self._show = show
        for name, scorer in self._scorers.items():
            scorer.listen(lambda kind, text, name=name: tell(kind, f"evaluation set {name}: {text}"))

    async def answer(
        self, runner: GroupRunner, request: EvalRequest, name: str, version: int, *, log: logging.Logger
    ) -> EvalResult:
        """Mean reward over the prompts that were answered; failures are logged and counted. `version` is used when no
        token has a version. Raises EngineError when not a single prompt was answered."""
        scorer, number = self._scorers.get(request.name), next(self._numbers)
        judged = runner if scorer is None else runner.judged_by(scorer)
        assignments = [
            Assignment(prompt=p, attempt=-number, num_samples=request.num_samples, sampling=request.sampling)
            for p in request.prompts
        ]
        results = await asyncio.gather(*(judged.run(a) for a in assignments), return_exceptions=True)
        groups = [r for r in results if isinstance(r, Group)]
        for failure in results:
            if isinstance(failure, BaseException):
                log.warning("evaluation: %s", failure)
        if not groups:
            raise EngineError(
                f"{name}: none of {len(results)} evaluation prompts was answered; first: {results[:1]}",
                remedy="see this actor's log",
            )
        rewards = [float(r) for g in groups for r in g.rollout_rewards()]
        self._show_some(groups, request.name, name, version)
        versions = [v for g in groups for s in g.samples for v in s.versions.tolist() if v >= 0] or [version]
        return EvalResult(
            mean_reward=sum(rewards) / len(rewards),
            num_samples=len(rewards),
            oldest_version=min(versions),
            newest_version=max(versions),
            num_errors=len(results) - len(groups),
            metrics=measured(groups, request.pass_reward) | {"num_errors": float(len(results) - len(groups))},
        )

    def _show_some(self, groups: Sequence[Group], eval_set: str, name: str, version: int) -> None:
        if self._show is None:
            return
        for group in groups[: self._num_shown]:
            text = group_text(
                group, step=version, outcome="held-out", wall_s=time.time(), source=name, eval_set=eval_set
            )
            self._show(replace(text, step=max(text.newest_version, version)))

    async def close(self) -> None:
        await all_ended(scorer.close() for scorer in self._scorers.values())


def measured(groups: Sequence[Group], pass_reward: float) -> dict[str, float]:
    """Metrics of answered prompts: mean reward, pass@k, mean length in tokens, share of answers cut off."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [float(reward) for group in groups for reward in group.rollout_rewards()]
    solved = [(int((row >= pass_reward).sum()), len(row)) for row in (group.task_rewards() for group in groups)]
    return {
        "reward": sum(rewards) / len(rewards),
        **{f"pass_at_{k}": rate for k, rate in pass_rates(solved).items()},
        "response_length": sum(len(sample.response_ids) for sample in samples) / len(samples),
        "truncated_ratio": sum(sample.finish == "length" for sample in samples) / len(samples),
    }
