"""What a workflow says of its sample reaches the reward function, or is the reward; nonsense costs its group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.group_runner import runner_of
from tests.workflows.chat_models import QWEN3, Drawn

from myxa.actors.ledger.file import decode_group, encode
from myxa.actors.rewards.rewarder import Rewarder
from myxa.actors.rollout.group_runner import Partial, drop_reason
from myxa.actors.stream_checks import checked_rollout
from myxa.actors.workflows.episode import WorkflowContext
from myxa.actors.workflows.named import load_workflow
from myxa.core.config import RewardSettings
from myxa.core.errors import ConfigError, MyxaError, RewardError, UserCodeError
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.protocols import Delta, GenerateRequest
from myxa.core.samples import Group, Message, Prompt, Sample

PROMPT = Prompt(
    group_id=5, row=7, pass_index=0, messages=(Message(role="user", content="open it"),), label="open", source="d.jsonl"
)
MINE = """\
async def judge(completion, weight=1.0):
    said = [(one.role, one.content) for one in completion.conversation]
    assert said == [("assistant", "push"), ("tool", "stuck"), ("assistant", "pull")], said
    assert completion.sample_metadata == {"opened": True, "path": ["push", "pull"]}
    assert completion.metadata == {}
    return {"reward": weight * completion.reward, "opened": completion.sample_metadata["opened"]}
"""

Flow = Callable[[WorkflowContext, Prompt], Awaitable[Any]]


class Door(Drawn):
    """A model that pushes first, then pulls; its second turn breaks off as often as it is told to."""

    def __init__(self, num_breaks: int = 0) -> None:
        super().__init__(QWEN3.tokenizer())
        self.num_breaks = num_breaks
        self.num_asked = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.num_asked += 1
        is_first = request.request_id.endswith(".0")
        self.next = ("push<|im_end|>" if is_first else "pull<|im_end|>", "stop")
        if not is_first and self.num_breaks:
            self.num_breaks -= 1
            self.next = ("", "abort")
        async for delta in super().generate(request):
            yield delta


async def door(ctx: WorkflowContext, prompt: Prompt, *, opens_by: str = "pull") -> Sample:
    turn = await ctx.episode.generate()
    path = [turn.text]
    while turn.text != opens_by and ctx.episode.num_turns < ctx.max_turns:
        ctx.episode.reply("tool", "stuck")
        turn = await ctx.episode.generate()
        path.append(turn.text)
    return ctx.episode.sample(reward=np.float64(0.5), metadata={"opened": turn.text == opens_by, "path": tuple(path)})


async def run(
    flow: Flow,
    settings: RewardSettings,
    *,
    engine: Door | None = None,
    partial: tuple[Sample, ...] = (),
    timeout_s: float = 60.0,
) -> Group:
    async def checked(ctx: WorkflowContext, prompt: Prompt) -> Sample:
        """As what comes from a worker process."""
        made, episode = await flow(ctx, prompt), ctx.episode
        temperatures = episode.temperatures
        (sample,) = checked_rollout([made], prompt, ctx.index, temperatures=temperatures, vocab_size=None)
        return sample

    rewarder = Rewarder(settings)
    runner = runner_of(checked, rewarder, QWEN3.tokenizer(), (engine or Door()).generate, timeout_s=timeout_s)
    try:
        return await runner.run(
            Assignment(prompt=PROMPT, attempt=1, num_samples=1, sampling=SamplingParams(), partial=partial)
        )
    finally:
        await rewarder.close()


async def test_what_the_workflow_says_is_the_reward_and_is_kept() -> None:
    group = await run(door, RewardSettings(fn="workflow"))
    assert group.rewards.tolist() == [0.5]
    kept = decode_group(5, encode(group)).samples[0]
    assert (kept.reward, kept.metadata) == (0.5, {"opened": True, "path": ["push", "pull"]})
    assert kept.replies == ((Message(role="tool", content="stuck"),),)


async def test_a_function_sees_all_turns_and_what_the_workflow_says(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    group = await run(door, RewardSettings(fn=f"{tmp_path}/mine.py:judge", args={"weight": 4.0}))
    assert group.rewards.tolist() == [2.0]
    assert group.reward_parts == ({"opened": 1.0},)


async def test_it_is_said_again_when_the_sample_goes_on_elsewhere() -> None:
    engine = Door(num_breaks=1)
    with pytest.raises(Partial) as caught:
        await run(door, RewardSettings(fn="workflow"), engine=engine)
    (partial,) = caught.value.samples
    assert (partial.reward, partial.replies) == (None, ((Message(role="tool", content="stuck"),),))
    group = await run(door, RewardSettings(fn="workflow"), engine=engine, partial=caught.value.samples)
    assert (group.rewards.tolist(), group.samples[0].reward, engine.num_asked) == ([0.5], 0.5, 3)


WALK = """\
async def walk(ctx, prompt, *, steps, far=1):
    await ctx.episode.generate()
    steps.append(far)
    return ctx.episode.sample(reward=len(steps), metadata={"far": far})
"""


async def test_arguments_of_the_run_file_arrive_by_name_and_as_they_are_in_it(tmp_path: Path) -> None:
    (tmp_path / "walk.py").write_text(WALK)
    name = f"{tmp_path}/walk.py:walk"
    workflow = load_workflow(name, {"steps": [0], "far": 3})
    for _ in range(2):  # what a sample changes in them stays with it
        group = await run(workflow.made()["run"], RewardSettings(fn="workflow"))
        assert (group.rewards.tolist(), group.samples[0].metadata) == ([2.0], {"far": 3})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'fast'.*workflow_args holds: steps, fast"):
        load_workflow(name, {"steps": [0], "fast": True})


async def test_a_workflow_that_waits_for_an_engine_too_long_costs_its_group() -> None:
    class Silent(Door):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
            await asyncio.sleep(60)
            async for delta in super().generate(request):
                yield delta

    with pytest.raises(UserCodeError, match=r"did not finish within 0.05 s \(group 5, sample 0, row 7") as caught:
        await run(door, RewardSettings(fn="workflow"), engine=Silent(), timeout_s=0.05)
    assert drop_reason(caught.value) == "workflow-error"


def says(**outcome: Any) -> Flow:
    async def flow(ctx: WorkflowContext, prompt: Prompt) -> Sample:
        await ctx.episode.generate()
        return ctx.episode.sample(**outcome)

    return flow


@pytest.mark.parametrize(("flow", "fn", "words"), [
    (says(reward="much"), "workflow", "workflow: reward of its sample: returned a value of type str, not a number"),
    (says(reward={"reward": 1.0}), "workflow", "reward of its sample: returned a value of type dict, not a number"),
    (says(reward=float("nan")), "workflow", "reward of its sample: returned nan"),
    (says(reward=1e300), "workflow", "too large for a float32"),
    (says(metadata={"board": object()}), "format", "its sample cannot be written as JSON: Type is not JSON"),
    (says(metadata={1: 2}), "format", "its sample cannot be written as JSON: Dict key must be str"),
    (says(metadata={"log": "x" * 70_000}), "format", "the metadata of its sample has 70,010 bytes as JSON"),
])  # fmt: skip
async def test_nonsense_costs_the_group_and_says_what_to_do(flow: Flow, fn: str, words: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        await run(flow, RewardSettings(fn=fn))
    assert words in str(caught.value)
    assert "(group 5, sample 0)" in str(caught.value)
    assert "episode.sample(" in caught.value.remedy
    assert drop_reason(caught.value) == "workflow-error"


@pytest.mark.parametrize(("flow", "fn", "words"), [
    (says(), "workflow", "the workflow said no reward; it does so by `return ctx.episode.sample(reward=...)`"),
    (says(reward=1), "exact", 'reward.fn = "exact" does not heed it; set reward.fn = "workflow"'),
])  # fmt: skip
async def test_a_reward_that_nobody_said_or_nobody_heeds_is_an_error(flow: Flow, fn: str, words: str) -> None:
    with pytest.raises(MyxaError) as caught:
        await run(flow, RewardSettings(fn=fn))
    assert isinstance(caught.value, RewardError)
    assert words in str(caught.value)
