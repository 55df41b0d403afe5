"""Held-out prompts answered by one engine, and what came of it. Knows the group runner; touches no ledger."""

from __future__ import annotations

import asyncio
import logging

from ...core.errors import EngineError
from ...core.messages import Assignment, EvalRequest, EvalResult
from ...core.samples import Group
from .group_runner import GroupRunner


async def evaluate(
    runner: GroupRunner, request: EvalRequest, name: str, version: int, *, number: int, log: logging.Logger
) -> EvalResult:
    """Mean reward over the prompts that were answered; failures are logged and counted.

    `version` stands in when no token has a version; `number`: of this evaluation, for the ids of its requests. Raises
    EngineError when not a single prompt was answered.
    """
    assignments = [
        Assignment(prompt=p, attempt=-number, num_samples=request.num_samples, sampling=request.sampling)
        for p in request.prompts
    ]
    results = await asyncio.gather(*(runner.run(a) for a in assignments), return_exceptions=True)
    groups = [r for r in results if isinstance(r, Group)]
    for failure in results:
        if isinstance(failure, BaseException):
            log.warning("evaluation: %s", failure)
    if not groups:
        raise EngineError(
            f"{name}: none of {len(results)} evaluation prompts was answered; first: {results[:1]}",
            remedy="see this actor's log",
        )
    rewards = [float(r) for g in groups for r in g.rewards]
    versions = [v for g in groups for s in g.samples for v in s.versions.tolist() if v >= 0] or [version]
    return EvalResult(
        mean_reward=sum(rewards) / len(rewards),
        num_samples=len(rewards),
        oldest_version=min(versions),
        newest_version=max(versions),
        num_errors=len(results) - len(groups),
    )
