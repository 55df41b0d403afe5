"""Rollouts of several samples: a planner with two sub-agents, and a history that is made short.

Both sort digits, as the demo's model does. All samples of a rollout get the reward of its last answer.

    myxa demo --dir demo         # leaves a model that sorts one prompt in four: demo/sft/export
    myxa up planner.toml
    myxa up short_history.toml
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from myxa.actors.workflows.episode import WorkflowContext
from myxa.core.completions import Completion
from myxa.core.samples import Message, Prompt, Sample


def task(digits: str) -> list[Message]:
    return [Message(role="user", content=f"sort {digits}")]


def reward(completion: Completion) -> float:
    """The share of digits that are in their places."""
    right = sum(a == b for a, b in zip(completion.text, completion.label, strict=False))
    return right / max(len(completion.text), len(completion.label))


async def planner(ctx: WorkflowContext, prompt: Prompt) -> Sequence[Sample]:
    """The planner's draft is cut in two, each part goes to a sub-agent, and the planner answers with their answers."""
    draft = (await ctx.episode.generate()).text
    middle = len(draft) // 2
    agents = [ctx.episode.session(task(part)) for part in (draft[:middle], draft[middle:])]
    answers = await asyncio.gather(*(agent.generate() for agent in agents))
    ctx.episode.reply("user", "sort " + "".join(answer.text for answer in answers))
    await ctx.episode.generate()
    return [*(agent.sample() for agent in agents), ctx.episode.sample()]


async def short_history(ctx: WorkflowContext, prompt: Prompt) -> Sequence[Sample]:
    """After two turns the conversation continues in another session that knows the last answer alone."""
    draft = (await ctx.episode.generate()).text
    ctx.episode.reply("user", f"sort {draft}")
    better = (await ctx.episode.generate()).text
    short = ctx.episode.session(task(better))
    await short.generate()
    return [ctx.episode.sample(), short.sample()]
