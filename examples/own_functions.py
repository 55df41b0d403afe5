"""A reward, a reward of a whole group, a workflow and both filters.

docs/rewards-and-data.md says what each gets and returns; a run file names them as `own_functions.py:score` and so on.
"""

from collections.abc import Sequence

from myxa.actors.workflows.episode import WorkflowContext
from myxa.core.completions import Completion
from myxa.core.samples import Group, Prompt, Sample


def score(completion: Completion, *, weight: float = 1.0) -> float | dict[str, float]:
    is_right = completion.text.strip() == completion.label
    return {"reward": is_right + weight * (completion.num_tokens < 200), "is_right": is_right}


async def rank(completions: Sequence[Completion]) -> Sequence[float | dict[str, float]]:
    shortest = min(c.num_tokens for c in completions)
    return [{"reward": c.text == c.label, "over": c.num_tokens - shortest} for c in completions]


async def look_up(question: str) -> str:
    return question.upper()


async def generate(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    for _ in range(ctx.max_turns):
        turn = await ctx.episode.generate()  # the model's turn; its tokens are learnt
        if "CALL" not in turn.text or not ctx.episode.reply("user", await look_up(turn.text)):
            break  # reply(): not the model's tokens, masked out of the loss
    return ctx.episode.sample()


def keep(group: Group) -> bool | str:
    return True if group.rewards.max() > 0 else "none solved it"


def learn(group: Group, *, most: int = 2000) -> Sequence[bool | str]:
    return [True if len(s.response_ids) <= most else "rambles" for s in group.samples]
